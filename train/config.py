"""Configuration of the whole pipeline: declared once, composed by Hydra, checked here.

Nothing has a second default. `train.rules` has what values must fulfil.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from data.config import (
    CacheConfig,
    CacheMode,
    CorpusConfig,
    Device,
    Precision,
    RegenerateConfig,
    TargetConfig,
    key,
)


class HeadKind(Enum):
    """Sequential head of the draft (DSpark Eq. 4-6)."""

    vanilla = "vanilla"


class ExportFormat(Enum):
    """Layouts that `dspark export` writes."""

    portable = "portable"


class WandbMode(Enum):
    """How Weights & Biases is used."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class DraftConfig:
    """The draft model; its width, heads and rotary table come from the target."""

    num_layers: int = key(5, "Transformer layers of the draft.")
    block_size: int = key(7, "Tokens drafted per round (slots of a block).")
    head: HeadKind = key(HeadKind.vanilla, "Sequential head that repairs the block.")
    head_rank: int = key(256, "Rank of the sequential head; 0 leaves it out (DFlash).")
    confidence: bool = key(True, "Train a confidence head (when to stop speculating).")
    rope_theta: float | None = key(
        None, "Base frequency of plain rotary embedding. None: the target's, if it is plain too."
    )
    intermediate_size: int | None = key(None, "Width of the draft's MLP. None: the target's.")
    init_layers: list[int] = key(
        [],
        "Target layers from whose weights the draft's layers start, one each. Empty: random "
        "(see docs/benchmarks.md).",
    )
    init_fc_as_average: bool = key(
        False, "Start the projection of the tapped states as their average instead of at random."
    )
    init_norm_from_target: bool = key(
        False, "Start the final norm from the target's instead of 1 (see docs/benchmarks.md)."
    )


@dataclass
class ObjectiveConfig:
    """What training minimises (DSpark Eq. 9-12)."""

    num_anchors: int = key(512, "Blocks drawn per row and epoch, at most.")
    ce_weight: float = key(0.1, "Weight of the cross-entropy on the row's own tokens (Eq. 9).")
    l1_weight: float = key(0.9, "Weight of sum |p_draft - p_target|, twice the TV (Eq. 10).")
    confidence_weight: float = key(1.0, "Weight of the confidence head's BCE (Eq. 11).")
    decay_scale: float | None = key(
        4.0, "Slot k weighs exp(-k/decay_scale). None: all slots weigh the same."
    )


@dataclass
class OptimConfig:
    """Optimizer, schedule and batch."""

    lr: float = key(6e-4, "Peak learning rate of AdamW.")
    warmup_ratio: float = key(0.04, "Share of the steps in which the rate rises linearly.")
    weight_decay: float = key(0.0, "Decoupled weight decay of AdamW.")
    beta1: float = key(0.9, "First moment decay of AdamW.")
    beta2: float = key(0.999, "Second moment decay of AdamW.")
    clip: float = key(1.0, "Largest gradient norm; larger ones are scaled down to it.")
    rows_per_step: int = key(512, "Rows of one optimizer step, over all ranks.")
    rows_per_micro_batch: int = key(
        1, "Rows of one forward and backward pass on one rank: memory, not the result."
    )
    epochs: int = key(10, "Passes over the rows, when 'steps' is not given.")
    steps: int | None = key(None, "Optimizer steps; overrides 'epochs'.")


@dataclass
class EvaluateConfig:
    """Decoding with the draft, beside plain decoding and prompt lookup."""

    prompts: str = key("", "JSON Lines of prompts that the draft never saw.")
    max_prompts_per_class: int | None = key(None, "Prompts per class. None: all.")
    max_new_tokens: int = key(128, "Tokens generated per prompt.")
    temperature: float = key(0.0, "Temperature of target and draft; 0 is greedy.")
    top_p: float = key(1.0, "Nucleus of the target's law, in (0, 1].")
    top_k: int = key(0, "Top-k of the target's law; 0 keeps all.")
    precision: Precision = key(
        Precision.fp32, "Type of target and draft; greedy output is identical in fp32 only."
    )
    checkpoint: str = key("last", "Checkpoint of the run: 'last', or a folder.")
    lookup: bool = key(True, "Also decode with prompt lookup (n-grams), which needs no training.")
    seed: int = key(0, "Seed of the sampling at temperature > 0.")


@dataclass
class ExportConfig:
    """What is written for the serving engines."""

    formats: list[ExportFormat] = key([ExportFormat.portable], "Layouts to write.")
    checkpoint: str = key("last", "Checkpoint of the run: 'last', or a folder.")
    check_prompts: int = key(3, "Prompts on which the reloaded export must draft the same tokens.")


@dataclass
class RunConfig:
    """The run folder, and what holds for every verb."""

    name: str = key("default", "Name of the run; the run folder is named after it.")
    dir: str = key("outputs/${run.name}", "Run folder: all that belongs to a run is in it.")
    seed: int = key(0, "Seed of initialisation, row order and anchors.")
    device: Device = key(Device.auto, "Where to compute.")
    precision: Precision = key(
        Precision.bf16, "Compute type of training; masters and losses are always fp32."
    )
    wandb: WandbMode = key(WandbMode.disabled, "Weights & Biases: disabled, offline, online.")
    log_every: int = key(10, "Steps between two lines of metrics.")
    checkpoint_every: int = key(100, "Steps between two checkpoints.")
    keep_checkpoints: int = key(2, "Newest checkpoints that are kept.")
    allow_mismatch: list[str] = key([], "Fingerprint fields that may differ between stages.")
    allow_change: list[str] = key([], "Configuration keys that may differ when a run is resumed.")


@dataclass
class PipelineConfig:
    """All groups. A verb reads some of them; overriding another one is an error."""

    target: TargetConfig = field(default_factory=TargetConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    run: RunConfig = field(default_factory=RunConfig)
    mode: CacheMode = key(
        CacheMode.build,
        "What 'dspark cache' does. build: run the target over the rows (several processes may). "
        "estimate: bytes, hours and the price of each codec. verify: read everything and check. "
        "repair: build again what is bad. info: summary. explain: show rows token by token.",
    )
    html: str | None = key(None, "File for mode=explain: the same as a page.")

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.run.dir)

    @property
    def rows_path(self) -> Path:
        """The rows that `cache` reads and `regenerate` writes."""
        return Path(self.corpus.rows) if self.corpus.rows else self.run_dir / "rows.jsonl"

    @property
    def cache_location(self) -> str:
        """Folder or address of the cache that `cache` writes and `train` reads."""
        return self.cache.path or str(self.run_dir / "cache")


@dataclass(frozen=True)
class Verb:
    """One command of `dspark`: what it does and which groups or single keys it reads."""

    summary: str
    reads: tuple[str, ...]
    example: str

    def reads_key(self, path: str) -> bool:
        """Whether a key (or, given a group, any of its keys) changes what the verb does."""
        group = path.split(".")[0]
        if path == group:
            return any(r.split(".")[0] == group for r in self.reads)
        return group in self.reads or path in self.reads

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of which the verb reads at least one key."""
        return tuple(dict.fromkeys(r.split(".")[0] for r in self.reads))


_TARGET_FILES = (
    "target.path",
    "target.revision",
    "target.trust_remote_code",
    "target.thinking",
)
_TARGET = (*_TARGET_FILES, "target.precision", "target.attention")
_PROMPTS = ("corpus.prompts", "corpus.limit", "corpus.max_quarantined")
_ROWS = tuple(
    f"corpus.{k}"
    for k in (
        "rows",
        "sources",
        "limit",
        "max_length",
        "min_supervised",
        "max_quarantined",
        "keep_truncated",
    )
)
_READ_CACHE = ("path", "check", "local_copy", "local_copy_bytes")
_TRAIN_ONLY = ("check", "decode", "max_length", "prefetch_bytes", "prefetch_threads")
_BUILD_CACHE = tuple(f"cache.{f.name}" for f in fields(CacheConfig) if f.name not in _TRAIN_ONLY)
_CHECK = tuple(f"evaluate.{k}" for k in ("prompts", "precision", "max_new_tokens"))

VERBS: dict[str, Verb] = {
    "regenerate": Verb(
        "Lets the target answer prompts; keeps the token ids of prompt and completion.",
        (*_TARGET, *_PROMPTS, "regenerate", "run"),
        "dspark regenerate target.path=Qwen/Qwen3-4B corpus.prompts=prompts.jsonl run.name=mine",
    ),
    "cache": Verb(
        "Runs the target over the rows and stores its hidden states (Zarr, resumable).",
        ("target", *_ROWS, *_BUILD_CACHE, "run", "mode", "html"),
        "dspark cache target=qwen3_4b run.name=mine   (mode=verify reads it all and checks)",
    ),
    "train": Verb(
        "Distils a draft from the cache.",
        (
            *_TARGET_FILES,
            "target.mask_token_id",
            "target.tap_layers",
            *(f"cache.{k}" for k in dict.fromkeys((*_READ_CACHE, *_TRAIN_ONLY))),
            "draft",
            "objective",
            "optim",
            "run",
        ),
        "dspark train target=qwen3_4b run.name=mine draft.num_layers=3",
    ),
    "evaluate": Verb(
        "Decodes losslessly with the draft and reports accepted length and speed per class.",
        (*_TARGET, "evaluate", "run"),
        "dspark evaluate target=qwen3_4b run.name=mine evaluate.prompts=held_out.jsonl",
    ),
    "export": Verb(
        "Writes the draft for serving engines, reloads it and compares its drafts.",
        (*_TARGET, *_CHECK, "export", "run"),
        "dspark export target=qwen3_4b run.name=mine",
    ),
}


def to_plain(config: object) -> Any:  # noqa: ANN401 - JSON
    """The configuration as plain JSON values."""
    if isinstance(config, Enum):
        return config.value
    if is_dataclass(config):
        return {f.name: to_plain(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, list | tuple):
        return [to_plain(v) for v in config]
    return config
