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
    """How hidden states are stored (`data.cache.codecs` has the schemes and their sizes)."""

    bf16 = "bf16"
    bf16_zstd = "bf16+zstd"
    int8_h64 = "int8-h64-g64"
    int8_h64_out8 = "int8-h64-g64-out8"
    int8_out32 = "int8-g64-out32"
    int6_h64 = "int6-h64-g64"
    int4_h64 = "int4-h64-g64"
    nf4_h64 = "nf4-h64-g64"


class Truncated(Enum):
    """What becomes of an answer that was cut at its token limit."""

    keep = "keep"
    drop = "drop"


class Decode(Enum):
    """Where stored states are decoded."""

    loader = "loader"
    device = "device"


class Check(Enum):
    """When the checksum of a chunk is verified."""

    first = "first"
    always = "always"
    never = "never"


class CacheMode(Enum):
    """What ``dspark cache`` does."""

    build = "build"
    estimate = "estimate"
    verify = "verify"
    repair = "repair"
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
    device_map: str | None = key(
        None, "Spread a target over the devices of this machine: auto, balanced, sequential."
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

    path: str | None = key(
        None,
        "Folder of the cache, or s3://, gs://, az:// (http:// to read). None: cache/ of the run "
        "folder. Credentials come from the environment only.",
    )
    # Strings, because OmegaConf knows an enum by the names of its members, not by their values.
    taps: str = key(
        "bf16",
        "How tapped states are stored: bf16 (exact), bf16+zstd (exact), int8-h64-g64, "
        "int6-h64-g64, nf4-h64-g64, int4-h64-g64. 'mode=estimate' shows what each costs.",
    )
    last: str | None = key(
        "bf16",
        "How the last state is stored, from which the target's law is computed again: as 'taps', "
        "or with exact outlier channels (int8-g64-out32, int8-h64-g64-out8). null: not at all "
        "(then topk is needed).",
    )
    topk: int = key(0, "Log-probabilities that are kept of every law, likeliest first; 0: none.")
    share_prefix: bool = key(
        False, "Compute and store once what rows have in common at their beginning."
    )
    share_prefix_min: int = key(32, "Shortest prefix that is shared, in tokens.")
    add_rows: bool = key(False, "Add the rows that the cache lacks; what it holds stays.")
    part_bytes: int = key(1 << 30, "Largest size of one shard of tapped states, in bytes.")
    chunk_bytes: int = key(2 << 20, "Largest size of one checksummed chunk, in bytes.")
    batch_tokens: int = key(4096, "Tokens (padding included) of one pass of the target.")
    queue_bytes: int = key(
        256 << 20, "States that may wait to be encoded, and to be written, in bytes each."
    )
    claim_timeout_s: float = key(
        120.0, "A builder that shows no life for so long loses its part to another, in seconds."
    )
    fidelity_tokens: int = key(2000, "Tokens on which a lossy choice is measured before the build.")
    max_tap_error: float = key(
        0.12, "Largest mean relative L2 error of any tapped layer that the build accepts."
    )
    max_last_tv: float = key(
        0.01, "Largest mean total variation, in [0, 1], that a lossy last state may cause."
    )
    explain_rows: int = key(3, "Rows that mode=explain shows.")
    explain_cached: bool = key(False, "mode=explain shows rows of the cache, not of the corpus.")
    verify_processes: int = key(2, "Processes of mode=verify.")
    self_check_tokens: int = key(256, "Tokens on which stored state and target are compared.")
    self_check_tv: float = key(
        0.01, "Largest mean total variation, in [0, 1], that the self-check lets pass."
    )
    decode: Decode = key(
        Decode.loader,
        "Where stored states become bf16 again for training: loader (the reading threads) or "
        "device (fewer bytes travel to it).",
    )
    check: Check = key(
        Check.first, "When the reader verifies a chunk's checksum: first touch, always, never."
    )
    max_length: int | None = key(
        None, "Rows are cut at their end to so many tokens when they are read. None: never."
    )
    prefetch_bytes: int = key(2 << 30, "Memory for batches that are read ahead, in bytes.")
    prefetch_threads: int = key(2, "Threads that read ahead.")
    local_copy: str | None = key(
        None, "Folder for what was fetched from an object store. None: a temporary one."
    )
    local_copy_bytes: int = key(64 << 30, "Largest size of that folder, in bytes.")

    @property
    def taps_codec(self) -> Codec:
        """Codec of the tapped states."""
        return Codec(self.taps)

    @property
    def last_codec(self) -> Codec | None:
        """Codec of the last state, if it is stored."""
        return None if self.last is None else Codec(self.last)
