"""Configuration of the data side: every key, its default and its unit, declared once."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


def key(default: Any, doc: str) -> Any:  # noqa: ANN401 - a dataclass field of any type
    """Declares one configuration key with its default and the text that ``--help`` shows."""
    metadata = {"doc": doc}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# What `data.fingerprint` records; declared here because the configuration may allow a mismatch.
FINGERPRINT_FIELDS = (
    "tokenizer",
    "chat_template",
    "probe_renders",
    "stop_ids",
    "target_config",
    "target_weights",
    "regenerate",
    "rows",
    "tap_layers",
    "block_layout",
    "mask_token_id",
)


class Precision(Enum):
    """Floating-point type of weights or compute."""

    fp32 = "fp32"
    bf16 = "bf16"


class Device(Enum):
    """Where to compute; ``auto`` takes CUDA when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Codec(Enum):
    """How hidden states are stored."""

    bf16 = "bf16"


class Truncated(Enum):
    """What becomes of an answer that was cut at its token limit."""

    keep = "keep"
    drop = "drop"


class CacheMode(Enum):
    """What ``dspark cache`` does."""

    build = "build"
    verify = "verify"
    info = "info"
    explain = "explain"


@dataclass
class TargetConfig:
    """The frozen target model."""

    path: str = key("", "Folder of the target, or its name on the Hugging Face hub.")
    revision: str | None = key(None, "Hub revision (branch, tag or commit); ignored for folders.")
    precision: Precision = key(Precision.bf16, "Type in which the target runs.")
    attention: str = key("sdpa", "Attention of transformers: sdpa, eager, flash_attention_2.")
    tap_layers: list[int] = key(
        [], "Target layers whose outputs the draft reads, 0-based. Empty: five, evenly spaced."
    )
    mask_token_id: int = key(
        -1, "Id that fills the unknown slots of a block: inside the embedding, unused by data."
    )
    thinking: bool | None = key(
        None, "Thinking mode of the chat template (enable_thinking). None: the template's default."
    )
    trust_remote_code: bool = key(False, "Run Python code that ships with the target. Off is safe.")


@dataclass
class CorpusConfig:
    """What is read: prompts for regenerate, rows for cache."""

    prompts: str = key(
        "", "JSON Lines of prompts: 'turns' or 'prompt' or 'messages', optional 'class'."
    )
    rows: str | None = key(
        None,
        "What to cache: a .jsonl, .parquet or .arrow file, a folder of them, or hub:owner/name. "
        "None: rows.jsonl of the run folder.",
    )
    sources: list[str] = key(
        [], "Several such sources instead of rows, each as PATH or PATH@WEIGHT (drawn in ratio)."
    )
    limit: int | None = key(None, "Use only the first this many prompts or rows. None: all.")
    max_length: int = key(2048, "Longest row in tokens; longer completions are cut at their end.")
    min_supervised: int = key(2, "Rows with fewer supervised tokens are dropped and counted.")
    max_quarantined: float = key(
        0.05, "Largest share of lines, in [0, 1], that may be unusable; above it the run stops."
    )
    keep_truncated: bool = key(
        True, "Keep answers that were cut at max_new_tokens (finish_reason 'length')."
    )


@dataclass
class RegenerateConfig:
    """How the target answers the prompts."""

    max_new_tokens: int = key(512, "Longest answer, in tokens.")
    temperature: float = key(0.7, "Sampling temperature; 0 is greedy.")
    top_p: float = key(0.9, "Nucleus: smallest set of tokens with this probability, in (0, 1].")
    top_k: int = key(0, "Keep only this many likeliest tokens; 0 keeps all.")
    samples_per_prompt: int = key(1, "Answers drawn for each prompt.")
    seed: int = key(0, "Seed of the sampling.")
    truncated: Truncated = key(
        Truncated.keep,
        "Answers cut at max_new_tokens: keep them as rows (finish_reason 'length'), or drop them "
        "into the quarantine. Both are counted.",
    )
    batch_size: int = key(64, "Prompts answered together in process (without servers).")
    servers: list[str] = key(
        [],
        "Base URLs of OpenAI-compatible servers that run the target, which share the load, e.g. "
        "[http://localhost:8000/v1]. The environment variable OPENAI_API_KEY has their key, if "
        "they want one. Empty: the target answers in this process.",
    )
    server_model: str | None = key(
        None, "Name under which the servers run the target. None: the only model that they list."
    )
    concurrency: int = key(32, "Requests in flight at each server, at most.")
    timeout_s: float = key(600.0, "Longest wait for one answer of a server, in seconds.")
    max_retries: int = key(
        4,
        "Repetitions of a request that met a time-out, a lost connection, or status 429 or 5xx, "
        "with exponential back-off. After them the next server is asked.",
    )
    max_failures: int = key(
        20, "Requests that fail in a row, each after its repetitions, until the run stops."
    )


@dataclass
class CacheConfig:
    """The store of target states."""

    path: str | None = key(None, "Folder of the cache. None: cache/ of the run folder.")
    codec: Codec = key(Codec.bf16, "How tapped states and last state are stored; bf16 is exact.")
    part_bytes: int = key(1 << 30, "Largest size of one shard of tapped states, in bytes.")
    chunk_bytes: int = key(2 << 20, "Largest size of one checksummed chunk, in bytes.")
    batch_tokens: int = key(4096, "Tokens (padding included) of one pass of the target.")
    explain_rows: int = key(3, "Rows that mode=explain shows.")
    self_check_tokens: int = key(256, "Tokens on which stored state and target are compared.")
    self_check_tv: float = key(
        0.01, "Largest mean total variation, in [0, 1], that the self-check lets pass."
    )
