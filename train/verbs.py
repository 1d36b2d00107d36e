"""The verbs: each loads what it reads, builds objects and calls the stage."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from data.batch import Row
from data.cache.build import build_cache, storage_errors
from data.cache.estimate import estimate_cache, estimate_table
from data.cache.read import CacheReader
from data.cache.remote import open_store
from data.cache.repair import mend_cache
from data.cache.store import Store
from data.cache.verify import describe_cache, verify_cache
from data.chat import encode_prompt
from data.config import CacheMode, Precision
from data.corpus import locate, parse_sources, read_prompts
from data.errors import CacheError, ConfigError
from data.explain import cached_row, explain_rows
from data.files import file_digest
from data.fingerprint import Fingerprint, check_mask_token, hash_weights, tokenizer_fields
from data.pool import BufferPool
from data.progress import is_main_rank
from data.regenerate import fingerprint_path, regenerate
from data.rows import Encoder, read_rows, usable_prompts
from data.target import (
    DTYPES,
    FrozenHead,
    Target,
    TargetFiles,
    load_model_config,
    load_stop_ids,
    load_tokenizer,
    read_frozen_head,
    read_layer,
    resolve_folder,
    text_config,
)
from train.config import PipelineConfig
from train.decode.drafters import Drafter, LookupDrafter, ModelDrafter
from train.decode.verify import Sampling
from train.evaluate.report import print_evaluation
from train.evaluate.run import evaluate
from train.export.check import CheckReport, check_portable
from train.export.portable import engine_warnings, write_portable
from train.launch import compute_device, make_accelerator
from train.loop.checkpoint import find_checkpoint, load_draft, load_shape
from train.loop.fit import fit
from train.loop.provenance import record_run
from train.models.draft import Draft, DraftShape

log = logging.getLogger(__name__)
# Tables need room; a pipe has no width of its own.
console = Console(width=max(Console().width, 110), soft_wrap=True, quiet=not is_main_rank())


def run_regenerate(config: PipelineConfig) -> None:
    """Prompts to rows of the target's own answers."""
    target: Target | TargetFiles
    if config.regenerate.servers:  # the weights are there, not here
        target = TargetFiles(config.target)
    else:
        target = Target(config.target, compute_device(config))
    bad = config.run_dir / "prompts.quarantine.jsonl"
    prompts = usable_prompts(config.corpus.prompts, config.corpus, target.tokenizer, bad)
    summary = regenerate(
        target,
        prompts,
        config.regenerate,
        config.rows_path,
        Fingerprint.of_target(target),
        config.run.allow_mismatch,
        lambda: record_run(config, "regenerate"),
    )
    console.print(
        f"{config.rows_path}: {summary.rows} rows ({summary.written} new with "
        f"{summary.new_tokens:,} tokens), finish reasons {summary.finish_reasons}"
    )
    if summary.failures:
        console.print(
            f"{summary.quarantine}: {sum(summary.failures.values())} requests without a row "
            f"{summary.failures}, {summary.unasked} later turns not asked; the next start asks "
            "again (not for answers that were cut and dropped)"
        )


def run_cache(config: PipelineConfig) -> None:
    """Rows to the cache of target states; or an estimate, a check, a repair, a summary of it."""
    store = _cache_store(config)
    with storage_errors(store):
        if config.mode is CacheMode.verify:
            _verify(config, store)
        elif config.mode is CacheMode.info:
            _print_cache(store)
        elif config.mode is CacheMode.explain:
            _explain(config, store)
        else:
            _build(config, store)


def _cache_store(config: PipelineConfig) -> Store:
    copy = config.cache.local_copy
    return open_store(
        config.cache_location, Path(copy) if copy else None, config.cache.local_copy_bytes
    )


def _verify(config: PipelineConfig, store: Store) -> None:
    report = verify_cache(store, config.cache.verify_processes)
    if report.problems:
        raise CacheError(
            f"{store.url}: {len(report.problems)} problems:\n"
            + "\n".join(map(str, report.problems))
            + "\n  fix: run 'dspark cache mode=repair' with the build's settings"
        )
    console.print(f"{store.url}: all {report.objects} objects are sound")


def _build(config: PipelineConfig, store: Store) -> None:
    target = Target(config.target, compute_device(config))
    fingerprint = Fingerprint.of_target(target)
    sources = [path for path, _ in parse_sources(config.corpus.sources)] or [str(config.rows_path)]
    for source in sources:
        _require_rows_of_target(fingerprint, source, config.run.allow_mismatch)
    encoder = Encoder(target.tokenizer, target.stop_ids, target.text_config.vocab_size)
    rows = read_rows(config.corpus, config.rows_path, encoder, _quarantine(config))
    mask = config.target.mask_token_id
    check_mask_token(mask, target.text_config.vocab_size, target.stop_ids)
    used = next((row for row in rows if mask in row.token_ids), None)
    if used is not None:
        raise ConfigError(
            f"target.mask_token_id={mask}", f"the data uses it ({used.source})", "take another id"
        )
    if config.mode is CacheMode.estimate:
        _estimate(config, target, rows, store)
        return
    if config.mode is CacheMode.repair:
        taps = json.dumps(list(target.tap_layers))
        mended = mend_cache(store, rows, config.cache, fingerprint.extended(tap_layers=taps))
        console.print(
            f"repair: {len(mended.parts)} parts are built again, "
            f"{len(mended.files)} control files written again"
        )
    build_cache(
        target,
        rows,
        config.cache,
        store,
        fingerprint,
        config.run.allow_mismatch,
        lambda: record_run(config, "cache") if is_main_rank() else None,
    )
    _print_cache(store)


def _estimate(config: PipelineConfig, target: Target, rows: Sequence[Row], store: Store) -> None:
    found = estimate_cache(target, rows, config.cache, store)
    console.print(estimate_table(found))
    free = "unknown" if found.free_bytes is None else f"{found.free_bytes / 1e9:,.1f} GB"
    console.print(
        f"{found.rows:,} rows, {found.tokens:,} tokens; {found.hours:,.2f} h at "
        f"{found.tokens_per_s:,.0f} tokens/s of one process like this one; free: {free}"
    )
    console.print(
        "tap err: mean relative error of a token's tapped states, and without their 4 largest "
        "channels; law TV, top-1: the target's law from the stored against the exact last state"
    )
    saved = 1 - found.stored_tokens / found.tokens
    console.print(
        f"cache.share_prefix=true would leave {found.stored_tokens:,} tokens to store and about "
        f"as many to compute ({saved:.1%} less)"
    )


def _require_rows_of_target(fingerprint: Fingerprint, source: str, allow: list[str]) -> None:
    """Rows that carry a fingerprint must come from the target; of others nothing is known.

    Raises:
        FingerprintMismatchError: they come from another target, tokenizer or template.
    """
    beside = fingerprint_path(Path(source))
    if beside.exists():
        fingerprint.require_match(Fingerprint.load(beside), "the target", source, allow)
    else:
        log.warning("%s: rows without a fingerprint are not compared", source)


def _explain(config: PipelineConfig, store: Store) -> None:
    """Encodes rows and shows them, or shows what a cache holds; no weights are needed."""
    folder = resolve_folder(config.target)
    trust = config.target.trust_remote_code
    tokenizer = load_tokenizer(folder, trust, config.target.thinking)
    stops = load_stop_ids(folder, tokenizer)
    vocab_size = text_config(load_model_config(folder, trust)).vocab_size
    if config.cache.explain_cached:
        reader = CacheReader(store)
        total = len(reader)
        shown = [cached_row(reader[i], i) for i in range(min(config.cache.explain_rows, total))]
    else:
        encoder = Encoder(tokenizer, stops, vocab_size)
        rows = read_rows(config.corpus, config.rows_path, encoder, _quarantine(config))
        shown, total = rows[: config.cache.explain_rows], len(rows)
    html = Path(config.html) if config.html else None
    explain_rows(shown, tokenizer, stops, html)
    console.print(f"{len(shown)} of {total} rows shown" + (f"; written to {html}" if html else ""))


def _quarantine(config: PipelineConfig) -> Path:
    return config.run_dir / "quarantine.jsonl"


def run_train(config: PipelineConfig) -> None:
    """The cache to a trained draft."""
    accelerator = make_accelerator(config)
    # Memory of the batches is used again: a step's pages need not be cleared for the next one.
    pool = BufferPool(config.cache.prefetch_bytes)
    reader = CacheReader(_cache_store(config), config.cache.check, pool, config.cache.max_length)
    folder = resolve_folder(config.target)
    _require_cache_of_target(config, reader, folder)
    frozen = _frozen(folder, config, accelerator.device, config.run.precision)
    shape = DraftShape.of_target(
        text_config(load_model_config(folder, config.target.trust_remote_code)),
        reader.header.tap_layers,
        config.target.mask_token_id,
        config.draft,
    )
    check_mask_token(shape.mask_token_id, shape.vocab_size, ())
    torch.manual_seed(config.run.seed)
    draft = Draft(shape, frozen)
    _init_draft(draft, config, folder)
    fingerprint = _draft_fingerprint(reader.fingerprint, shape)
    fingerprint = fingerprint.extended(rows=reader.manifest.dataset_hash)
    summary = fit(
        draft, reader, config, fingerprint, accelerator, lambda: record_run(config, "train")
    )
    if accelerator.is_main_process:
        parameters = sum(p.numel() for p in draft.parameters())
        console.print(
            f"{summary.checkpoint}: {summary.steps} steps ({summary.steps_done_now} now, "
            f"{summary.skipped} skipped, {summary.seconds:.0f} s), {parameters / 1e6:.1f} M "
            f"trained parameters"
        )
        for name in ("loss", "ce", "l1", "tau_teacher_forced", "accept_rate_by_slot"):
            if name in summary.figures:
                console.print(f"  {name}: {_short(summary.figures[name])}")


def _init_draft(draft: Draft, config: PipelineConfig, folder: Path) -> None:
    """Where training starts, besides random weights."""
    options = config.draft
    if options.init_layers:
        trust = config.target.trust_remote_code
        draft.init_layers([read_layer(folder, i, trust) for i in options.init_layers])
    if options.init_fc_as_average:
        draft.init_fc_as_average()
    if options.init_norm_from_target:
        draft.init_norm_from_target()


def run_evaluate(config: PipelineConfig) -> None:
    """Real decoding with the draft, beside plain decoding and prompt lookup."""
    draft, target, identity = _load_for_decoding(config, config.evaluate.checkpoint)
    record_run(config, "evaluate")
    prompts = read_prompts(locate(config.evaluate.prompts))
    options = config.evaluate
    # The draft's law is tempered only; top-k and top-p are the target's.
    sampling = Sampling(options.temperature)
    drafters: dict[str, Drafter] = {
        "draft": ModelDrafter(draft.to(dtype=DTYPES[options.precision]), sampling)
    }
    if options.lookup:
        drafters["lookup"] = LookupDrafter(draft.shape.block_size)
    folder = config.run_dir / "evaluation"
    result = evaluate(target, drafters, prompts, options, folder, identity)
    print_evaluation(result, console)
    console.print(f"written to {folder}")


def run_export(config: PipelineConfig) -> None:
    """The draft as folders that engines load."""
    draft, target, _ = _load_for_decoding(config, config.export.checkpoint)
    record_run(config, "export")
    checkpoint = find_checkpoint(config.run_dir, config.export.checkpoint)
    for warning in engine_warnings(draft):
        log.warning("%s", warning)
    prompts = read_prompts(locate(config.evaluate.prompts), config.export.check_prompts)
    ids = [
        encode_prompt(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in prompts
    ]
    for layout in config.export.formats:
        folder = config.run_dir / "export" / layout.value
        reports: list[CheckReport] = []

        def check(written: Path) -> None:
            length = config.evaluate.max_new_tokens
            reports.append(check_portable(written, draft, draft.frozen, target, ids, length))  # noqa: B023 - called at once

        write_portable(draft, folder, Fingerprint.load(checkpoint / "fingerprint.json"), check)
        report = reports[0]
        console.print(
            f"{folder}: reloaded; {report.tensors} tensors fit the contract; all "
            f"{report.tokens} tokens of {report.blocks} drafted blocks are the trainer's "
            f"(fp32 masters draft {report.same_as_master:.1%} of the blocks identically)"
        )


def _load_for_decoding(config: PipelineConfig, name: str) -> tuple[Draft, Target, str]:
    """Draft and target of a checkpoint in the evaluation's type, and the draft's digest.

    Raises:
        FingerprintMismatchError: the target is not the one that the draft was trained for.
    """
    checkpoint = find_checkpoint(config.run_dir, name)
    shape = load_shape(checkpoint)
    device, precision = compute_device(config), config.evaluate.precision
    target = Target(config.target, device, precision, shape.tap_layers)
    own = _draft_fingerprint(Fingerprint.of_target(target), shape)
    stored = Fingerprint.load(checkpoint / "fingerprint.json")
    own.require_match(stored, "the target", str(checkpoint), config.run.allow_mismatch)
    frozen = _frozen(target.folder, config, device, precision)
    draft = load_draft(checkpoint, frozen).to(device)
    return draft, target, file_digest(checkpoint / "draft.safetensors")


def _draft_fingerprint(fingerprint: Fingerprint, shape: DraftShape) -> Fingerprint:
    return fingerprint.extended(
        tap_layers=str(list(shape.tap_layers)),
        block_layout=f"anchor-first, {shape.block_size} slots",
        mask_token_id=str(shape.mask_token_id),
    )


def _frozen(
    folder: Path, config: PipelineConfig, device: torch.device, precision: Precision
) -> FrozenHead:
    head = read_frozen_head(folder, config.target.trust_remote_code)
    return head.to(device, DTYPES[precision])


def _require_cache_of_target(config: PipelineConfig, reader: CacheReader, folder: Path) -> None:
    """The head that is read here must be the one whose states are cached.

    Raises:
        FingerprintMismatchError: another target, tokenizer or template.
        ConfigError: other taps than the cache holds.
    """
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code, config.target.thinking)
    own = Fingerprint({**tokenizer_fields(tokenizer), "target_weights": hash_weights(folder)})
    cache = reader.store.url
    own.require_match(reader.fingerprint, "the target", cache, config.run.allow_mismatch)
    taps = config.target.tap_layers
    if taps and tuple(taps) != reader.header.tap_layers:
        raise ConfigError(
            f"target.tap_layers={taps}",
            f"{cache} holds {list(reader.header.tap_layers)}",
            "build a cache of these taps under another run.name, or leave the key out",
        )


def _print_cache(store: Store) -> None:
    console.print(store.url)
    for name, text in describe_cache(store).items():
        console.print(f"  {name}: {text}")


def _short(value: float | list[float]) -> str:
    if isinstance(value, list):
        return " ".join(f"{v:.3f}" for v in value)
    return f"{value:.4f}"


RUN: dict[str, Callable[[PipelineConfig], None]] = {
    "regenerate": run_regenerate,
    "cache": run_cache,
    "train": run_train,
    "evaluate": run_evaluate,
    "export": run_export,
}
