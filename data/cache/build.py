"""Builds a cache: plan, self-check, one pass of the target over the rows, part by part.

A process that is killed loses at most the part in hand. Started again, it keeps committed parts
and redoes the rest; the plan makes the result the same bit for bit.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.batch import Row, content_hash
from data.cache.codecs import encode_bf16
from data.cache.finish import finalize
from data.cache.format import (
    Header,
    Layout,
    Plan,
    array_specs,
    create_store,
    plan_parts,
)
from data.cache.records import Manifest, commit_path
from data.cache.selfcheck import SelfCheck, self_check
from data.cache.write import PartWriter
from data.config import CacheConfig
from data.errors import CacheError
from data.files import sole_writer
from data.fingerprint import Fingerprint
from data.progress import Meter
from data.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildSummary:
    """What is in the finished cache, how many parts this process added, and the self-check
    (None when nothing was left to build).
    """

    manifest: Manifest
    parts_built: int
    check: SelfCheck | None


def build_cache(
    target: Target,
    rows: Sequence[Row],
    config: CacheConfig,
    folder: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str] = (),
    accepted: Callable[[], None] = lambda: None,
) -> BuildSummary:
    """Builds or resumes the cache of ``rows`` in ``folder``.

    ``accepted`` is called once the folder and the inputs are found to fit.

    Raises:
        CacheError: the folder holds another cache, the disk is too small or full, or the target's
            own logits cannot be recomputed from what would be stored.
        FingerprintMismatchError: the folder's parts were built from another target or template.
    """
    with sole_writer(folder):
        return _build(target, rows, config, folder, fingerprint, allow_mismatch, accepted)


def _build(
    target: Target,
    rows: Sequence[Row],
    config: CacheConfig,
    folder: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str],
    accepted: Callable[[], None],
) -> BuildSummary:
    header, plan = plan_cache(target, rows, config)
    fingerprint = fingerprint.extended(tap_layers=json.dumps(list(target.tap_layers)))
    if (folder / "cache.json").exists():
        header.require_same(Header.load(folder / "cache.json"), folder)
        fingerprint.require_match(
            Fingerprint.load(folder / "fingerprint.json"), "this run", str(folder), allow_mismatch
        )
    else:
        with _full_disk_named(folder):
            fingerprint.save(folder / "fingerprint.json")
            create_store(folder, header, plan)
    header = Header.load(folder / "cache.json")
    if not plan.equals(Plan.load(folder / "plan.npy")):
        raise CacheError(f"{folder / 'plan.npy'}: damaged\n  fix: delete {folder} and build anew")
    accepted()
    _remove_leftovers(folder)
    todo = [p for p in range(plan.num_parts) if not commit_path(folder, p).exists()]
    check = None
    if todo:
        # A part that is built again may have other rows skipped: the cache is unfinished till then.
        (folder / "manifest.json").unlink(missing_ok=True)
        _require_space(folder, header, len(todo))
        check = self_check(target, rows, config)
        with _full_disk_named(folder):
            _build_parts(target, rows, plan, header, config, folder, todo)
    with _full_disk_named(folder):
        manifest = finalize(folder, header, plan, rows)
    return BuildSummary(manifest, len(todo), check)


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Says what to do when the disk refuses a write, and removes what was half written."""
    try:
        yield
    except OSError as error:
        _remove_leftovers(folder)
        free = shutil.disk_usage(folder).free
        raise CacheError(
            f"{folder}: could not be written ({error}); {free / 1e9:.2f} GB free\n"
            "  fix: make room and run the same command again; finished parts stay"
        ) from error


def plan_cache(target: Target, rows: Sequence[Row], config: CacheConfig) -> tuple[Header, Plan]:
    """Header and plan; both depend on rows and configuration alone."""
    lengths, row_ids, class_names, languages = [], [], set(), set()
    for row in rows:  # once: they may lie on disk
        lengths.append(len(row))
        row_ids.append(row.row_id)
        class_names.add(row.class_name)
        languages.add(row.language)
    layout = Layout.choose(
        len(target.tap_layers),
        target.text_config.hidden_size,
        max(lengths),
        config.part_bytes,
        config.chunk_bytes,
    )
    plan = plan_parts(lengths, layout.part_tokens)
    header = Header(
        tap_layers=target.tap_layers,
        hidden_size=layout.hidden_size,
        vocab_size=target.text_config.vocab_size,
        chunk_tokens=layout.chunk_tokens,
        part_tokens=layout.part_tokens,
        num_parts=plan.num_parts,
        num_samples=len(rows),
        codec=config.codec.value,
        dataset_hash=content_hash(row_ids),
        class_names=tuple(sorted(class_names)),
        languages=tuple(sorted(languages)),
        target_precision=str(target.model.dtype).removeprefix("torch."),
    )
    return header, plan


def _build_parts(
    target: Target,
    rows: Sequence[Row],
    plan: Plan,
    header: Header,
    config: CacheConfig,
    folder: Path,
    todo: Sequence[int],
) -> None:
    total = int(plan.lengths.sum())
    left = sum(int(plan.lengths[plan.samples_of(p)].sum()) for p in todo)
    written = 0
    with Meter("cache", total, "tokens", done=total - left) as meter:
        for part in todo:
            samples = plan.samples_of(part)
            writer = PartWriter(folder, part, array_specs(header.layout), header.layout)
            try:
                skipped = []
                for batch in length_batches(samples, plan.lengths, config.batch_tokens):
                    skipped += _write_batch(target, {i: rows[i] for i in batch}, writer)
                    note = f"{written / meter.elapsed_s / 1e6:.1f} MB/s"
                    meter.add(int(plan.lengths[batch].sum()), note)
                written += writer.commit(
                    {
                        "cache_uuid": header.cache_uuid,
                        "writer": {"host": socket.gethostname(), "pid": os.getpid()},
                        "samples": [
                            [i, int(plan.starts[i]), int(plan.lengths[i])] for i in samples
                        ],
                        "skipped": skipped,
                        "time": time.time(),
                    }
                )
            except BaseException:  # also Ctrl-C: nothing half written stays
                writer.discard()
                raise


def length_batches(
    samples: Sequence[int], lengths: np.ndarray, batch_tokens: int
) -> Iterator[list[int]]:
    """Consecutive samples whose padded size stays within a token budget (at least one sample)."""
    batch: list[int] = []
    longest = 0
    for sample in samples:
        longest_with = max(longest, int(lengths[sample]))
        if batch and longest_with * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest_with = [], int(lengths[sample])
        batch.append(sample)
        longest = longest_with
    if batch:
        yield batch


def _write_batch(
    target: Target, batch: Mapping[int, Row], writer: PartWriter
) -> list[list[object]]:
    """Runs one batch, a row by its sample number, and writes it in the order of the batch;
    returns [sample, reason] of rows with NaN or Inf.
    """
    longest = max(map(len, batch.values()))
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    for b, row in enumerate(batch.values()):
        ids[b, : len(row)] = torch.tensor(row.token_ids)
    output = target.forward(ids)
    skipped: list[list[object]] = []
    for b, (i, row) in enumerate(batch.items()):
        n = len(row)
        taps, last = output.taps[b, :n], output.last[b, :n]
        if not (bool(taps.isfinite().all()) and bool(last.isfinite().all())):
            skipped.append([i, "non-finite states"])
        writer.append(
            {
                "hidden": encode_bf16(taps),
                "last_hidden": encode_bf16(last),
                "input_ids": np.asarray(row.token_ids, dtype=np.int32),
                "loss_mask": np.asarray(row.loss_mask, dtype=np.uint8),
            }
        )
    return skipped


def _require_space(folder: Path, header: Header, parts: int) -> None:
    per_token = sum(spec.token_bytes for spec in array_specs(header.layout))
    need = parts * header.part_tokens * per_token
    free = shutil.disk_usage(folder).free
    if need > free:
        raise CacheError(
            f"{folder}: needs up to {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free\n"
            "  fix: give cache.path on a larger disk, or fewer rows (corpus.limit)"
        )


def _remove_leftovers(folder: Path) -> None:
    for path in folder.rglob("*.partial"):
        path.unlink(missing_ok=True)  # zarr may still be removing its own
