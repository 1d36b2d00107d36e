"""From what Hydra composed to typed objects that can work: unknown keys and bad values are refused.

After `load_config` nothing reads a DictConfig.
"""

from dataclasses import fields, is_dataclass
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf

from data.config import FINGERPRINT_FIELDS, CacheMode, Codec
from data.errors import ConfigError
from train.config import VERBS, PipelineConfig

MAX_CONNECTIONS = 1000  # of the openai client


def load_config(cfg: DictConfig, verb: str) -> PipelineConfig:
    """Turns a composed configuration into typed objects.

    Raises:
        ConfigError: an unknown key (also one added with ``+``), or values that contradict.
    """
    reject_unknown(cfg, PipelineConfig)
    config = OmegaConf.to_object(cfg)
    if not isinstance(config, PipelineConfig):
        raise ConfigError("(root)", "the configuration has no schema", "start from configs/*.yaml")
    validate(config, verb)
    return config


def reject_unknown(cfg: DictConfig, schema: type, prefix: str = "") -> None:
    """Refuses keys that the schema does not declare: Hydra accepts ``+key=`` and then drops it."""
    declared = {f.name: f for f in fields(schema)}
    for name in cfg:
        path = f"{prefix}{name!s}"
        if name not in declared:
            raise ConfigError(path, "unknown key", f"known here: {', '.join(sorted(declared))}")
        inner = declared[str(name)].type
        if isinstance(inner, type) and is_dataclass(inner):
            reject_unknown(cfg[name], inner, f"{path}.")


def validate(config: PipelineConfig, verb: str) -> None:
    """Checks values and their combinations for the keys that the verb reads."""
    _check_missing(config, verb)
    for check in _CHECKS:
        if VERBS[verb].reads_key(check.path):
            check(config)


def _check_missing(config: PipelineConfig, verb: str) -> None:
    if verb == "cache" and config.mode in (CacheMode.verify, CacheMode.info):
        return
    if verb == "cache" and config.cache.path and config.cache.path.startswith("http"):
        writing = (CacheMode.build, CacheMode.repair)
        if config.mode in writing:
            raise ConfigError(
                "cache.path", "http addresses can be read only", "give a folder or a bucket"
            )
    required = {
        "regenerate": ("target.path", "corpus.prompts"),
        "cache": ("target.path", "target.mask_token_id"),
        "train": ("target.path", "target.mask_token_id"),
        "evaluate": ("target.path", "evaluate.prompts"),
        "export": ("target.path", "evaluate.prompts"),
    }
    for path in required[verb]:
        group, name = path.split(".")
        if getattr(getattr(config, group), name) in ("", -1):
            raise ConfigError(
                path, f"'dspark {verb}' needs it", f"give {path}=..., or a preset {group}=..."
            )


class _Check:
    """One rule over the configuration, applied when the verb reads its group."""

    def __init__(  # a secret value is not repeated in the message
        self,
        path: str,
        ok: Any,  # noqa: ANN401
        problem: str,
        fix: str,
        *,
        secret: bool = False,
    ) -> None:
        self.path, self.ok, self.problem, self.fix = path, ok, problem, fix
        self.secret = secret

    def __call__(self, config: PipelineConfig) -> None:
        value: Any = config
        for part in self.path.split("."):
            value = getattr(value, part)
        if not self.ok(value, config):
            shown = "..." if self.secret else value
            raise ConfigError(f"{self.path}={shown}", self.problem, self.fix)


def _at_least(path: str, low: float) -> _Check:
    return _Check(path, lambda v, _: v is None or v >= low, f"must be at least {low}", "raise it")


def _is_plain_url(url: str) -> bool:
    """Whether an address may be recorded: a key in it would end up in the run's config."""
    parts = urlsplit(url)
    plain = not (parts.query or parts.fragment or "@" in parts.netloc)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


def _codec(path: str) -> _Check:
    known = [codec.value for codec in Codec]
    return _Check(
        path, lambda v, _: v is None or v in known, "no such codec", f"one of {', '.join(known)}"
    )


def _share(path: str) -> _Check:
    return _Check(path, lambda v, _: 0 < v <= 1, "must lie in (0, 1]", "1 switches it off")


_CHECKS = (
    _Check(
        "target.tap_layers",
        lambda v, _: all(i >= 0 for i in v) and list(v) == sorted(set(v)),
        "layers must be 0-based and strictly increasing (engines capture in layer order)",
        "sort them and drop repetitions",
    ),
    _at_least("target.mask_token_id", -1),
    _at_least("corpus.max_length", 2),
    _at_least("corpus.min_supervised", 1),
    _at_least("corpus.limit", 1),
    _Check(
        "corpus.max_quarantined",
        lambda v, _: 0 <= v <= 1,
        "is a share",
        "take a number between 0 and 1",
    ),
    _Check(
        "corpus.sources",
        lambda v, c: not v or c.corpus.rows is None,
        "contradicts corpus.rows",
        "give one of the two",
    ),
    _at_least("regenerate.max_new_tokens", 1),
    _at_least("regenerate.temperature", 0),
    _share("regenerate.top_p"),
    _at_least("regenerate.top_k", 0),
    _at_least("regenerate.batch_size", 1),
    _at_least("regenerate.samples_per_prompt", 1),
    _Check(
        "regenerate.samples_per_prompt",
        lambda v, c: v == 1 or c.regenerate.temperature > 0,
        "several samples at temperature 0 are all the same answer",
        "set regenerate.temperature above 0, or samples_per_prompt=1",
    ),
    _Check(
        "regenerate.servers",
        lambda v, _: all(_is_plain_url(url) for url in v),
        "each is http:// or https:// with a host, without user, password or query",
        "write [http://localhost:8000/v1]; a key belongs into the variable OPENAI_API_KEY",
        secret=True,
    ),
    _Check(
        "regenerate.servers",
        lambda v, _: len(set(v)) == len(v),
        "an address occurs twice",
        "name each once; regenerate.concurrency says how many requests it gets",
    ),
    _Check(
        "regenerate.server_model",
        lambda v, c: v is None or bool(c.regenerate.servers),
        "has no effect without servers",
        "give regenerate.servers=[...], or leave it out",
    ),
    _at_least("regenerate.concurrency", 1),
    _Check(
        "regenerate.concurrency",
        lambda v, _: v <= MAX_CONNECTIONS,
        f"the client opens {MAX_CONNECTIONS} connections to a server, at most",
        "lower it, or name more servers",
    ),
    _Check("regenerate.timeout_s", lambda v, _: v > 0, "must be positive", "600 is usual"),
    _at_least("regenerate.max_retries", 0),
    _at_least("regenerate.max_failures", 1),
    _codec("cache.taps"),
    _codec("cache.last"),
    _at_least("cache.topk", 0),
    _Check(
        "cache.last",
        lambda v, c: v is not None or c.cache.topk > 0,
        "nothing would be left of the target's law",
        "give cache.topk=128, or keep the last state",
    ),
    _at_least("cache.share_prefix_min", 1),
    _at_least("cache.part_bytes", 1 << 16),
    _at_least("cache.chunk_bytes", 1 << 10),
    _at_least("cache.batch_tokens", 1),
    _at_least("cache.queue_bytes", 1),
    _at_least("cache.claim_timeout_s", 1),
    _at_least("cache.fidelity_tokens", 1),
    _at_least("cache.max_tap_error", 0),
    _at_least("cache.max_last_tv", 0),
    _at_least("cache.verify_processes", 1),
    _at_least("cache.self_check_tokens", 1),
    _at_least("cache.max_length", 2),
    _at_least("cache.prefetch_bytes", 1),
    _at_least("cache.prefetch_threads", 1),
    _at_least("cache.local_copy_bytes", 1 << 20),
    _at_least("draft.num_layers", 1),
    _at_least("draft.block_size", 2),
    _Check(
        "draft.init_layers",
        lambda v, c: not v or len(v) == c.draft.num_layers,
        "names another number of layers than the draft has",
        "name one target layer for each of draft.num_layers, or none",
    ),
    _at_least("draft.head_rank", 0),
    _at_least("objective.num_anchors", 1),
    _at_least("objective.ce_weight", 0),
    _at_least("objective.l1_weight", 0),
    _at_least("objective.confidence_weight", 0),
    _Check(
        "objective.decay_scale",
        lambda v, _: v is None or v > 0,
        "must be positive",
        "null gives all slots the same weight",
    ),
    _Check(
        "objective.confidence_weight",
        lambda v, c: v == 0 or c.draft.confidence,
        "there is no confidence head to train",
        "set draft.confidence=true, or objective.confidence_weight=0",
    ),
    _Check(
        "objective.confidence_weight",
        lambda v, c: v > 0 or not c.draft.confidence,
        "the confidence head would never be trained, and be exported as it is",
        "set draft.confidence=false",
    ),
    _Check(
        "objective.ce_weight",
        lambda v, c: v > 0 or c.objective.l1_weight > 0,
        "with l1_weight=0 nothing trains the draft's tokens",
        "give ce_weight or l1_weight a positive value",
    ),
    _Check("optim.lr", lambda v, _: v > 0, "must be positive", "6e-4 is the paper's"),
    _Check("optim.warmup_ratio", lambda v, _: 0 <= v < 1, "must lie in [0, 1)", "0.04 is usual"),
    _Check("optim.clip", lambda v, _: v > 0, "must be positive", "1.0 is usual"),
    _at_least("optim.rows_per_step", 1),
    _at_least("optim.rows_per_micro_batch", 1),
    _at_least("optim.steps", 1),
    _at_least("optim.epochs", 1),
    _at_least("evaluate.max_prompts_per_class", 1),
    _at_least("evaluate.max_new_tokens", 1),
    _at_least("evaluate.temperature", 0),
    _share("evaluate.top_p"),
    _at_least("evaluate.top_k", 0),
    _Check("export.formats", lambda v, _: bool(v), "nothing to write", "export.formats=[portable]"),
    _at_least("export.check_prompts", 1),
    _at_least("run.seed", 0),
    _at_least("run.log_every", 1),
    _at_least("run.checkpoint_every", 1),
    _at_least("run.keep_checkpoints", 1),
    _Check(
        "run.allow_mismatch",
        lambda v, _: set(v) <= set(FINGERPRINT_FIELDS),
        "no such field",
        f"the fields are {', '.join(FINGERPRINT_FIELDS)}",
    ),
    _Check(
        "run.name",
        lambda v, _: bool(v) and v not in (".", "..") and not set(v) & set("/\\"),
        "is the name of one folder",
        "use letters, digits, '-' and '_'",
    ),
)
