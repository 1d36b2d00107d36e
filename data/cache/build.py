"""Builds a cache: plan, self-check, one pass of the target over the rows, part by part.

A process that is killed loses at most the part in hand. Started again, it keeps committed parts
and redoes the rest; the plan makes the result the same bit for bit.
"""

import hashlib
import json
import logging
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zarr
from zarr.errors import ZarrUserWarning

from data.batch import Row, content_hash
from data.cache.codecs import encode_bf16
from data.cache.format import (
    Header,
    Layout,
    Plan,
    array_specs,
    commit_path,
    create_store,
    plan_parts,
)
from data.cache.read import SAMPLE_COLUMNS, samples_digest
from data.cache.selfcheck import SelfCheck, self_check
from data.cache.write import PartWriter
from data.config import CacheConfig
from data.errors import CacheError, ShardError
from data.files import create_exclusive, fsync_dir, write_atomic
from data.fingerprint import Fingerprint
from data.progress import Meter
from data.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildSummary:
    """What is in the finished cache, and what this process added."""

    rows: int
    tokens: int
    parts: int
    parts_built: int
    total_bytes: int
    skipped: int
    check: SelfCheck | None

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk of one token, padding and indexes included."""
        return self.total_bytes / max(self.tokens, 1)


def build_cache(
    target: Target,
    rows: Sequence[Row],
    config: CacheConfig,
    folder: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str] = (),
) -> BuildSummary:
    """Builds or resumes the cache of ``rows`` in ``folder``.

    Raises:
        CacheError: the folder holds another cache, the disk is too small or full, or the target's
            own logits cannot be recomputed from what would be stored.
        FingerprintMismatchError: the folder's parts were built from another target or template.
    """
    header, plan = plan_cache(target, rows, config)
    fingerprint = fingerprint.extended(tap_layers=json.dumps(list(target.tap_layers)))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "cache.json").exists():
        header.require_same(Header.load(folder / "cache.json"), folder)
        fingerprint.require_match(
            Fingerprint.load(folder / "fingerprint.json"), "this run", str(folder), allow_mismatch
        )
    else:
        fingerprint.save(folder / "fingerprint.json")
        create_store(folder, header, plan)
    header = Header.load(folder / "cache.json")
    _remove_leftovers(folder)
    todo = [p for p in range(plan.num_parts) if not commit_path(folder, p).exists()]
    check = None
    if todo:
        _require_space(folder, header, len(todo))
        check = self_check(target, rows, config)
        _build_parts(target, rows, plan, header, config, folder, todo)
    total_bytes, skipped = _finalize(folder, header, plan, rows)
    return BuildSummary(
        len(rows) - skipped,
        int(plan.lengths.sum()),
        plan.num_parts,
        len(todo),
        total_bytes,
        skipped,
        check,
    )


def plan_cache(target: Target, rows: Sequence[Row], config: CacheConfig) -> tuple[Header, Plan]:
    """Header and plan; both depend on rows and configuration alone."""
    lengths = [len(row) for row in rows]
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
        dataset_hash=content_hash([row.row_id for row in rows]),
        class_names=tuple(sorted({row.class_name for row in rows})),
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
                    skipped += _write_batch(target, rows, batch, writer)
                    note = f"{written / meter.elapsed_s / 1e6:.1f} MB/s"
                    meter.add(sum(len(rows[i]) for i in batch), note)
                written += writer.commit(
                    {
                        "cache_uuid": header.cache_uuid,
                        "writer": {"host": socket.gethostname(), "pid": os.getpid()},
                        "samples": [[i, int(plan.starts[i]), len(rows[i])] for i in samples],
                        "skipped": skipped,
                        "time": time.time(),
                    }
                )
            except OSError as error:
                writer.discard()
                free = shutil.disk_usage(folder).free
                raise CacheError(
                    f"{folder}: part {part} could not be written ({error}); {free / 1e9:.2f} GB "
                    "free\n  fix: make room and run the same command again; finished parts stay"
                ) from error
            except BaseException:
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
    target: Target, rows: Sequence[Row], batch: Sequence[int], writer: PartWriter
) -> list[list[object]]:
    """Runs one batch and writes its rows; returns [sample, reason] of rows with NaN or Inf."""
    longest = max(len(rows[i]) for i in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    for b, i in enumerate(batch):
        ids[b, : len(rows[i])] = torch.tensor(rows[i].token_ids)
    output = target.forward(ids)
    skipped: list[list[object]] = []
    for b, i in enumerate(batch):
        n = len(rows[i])
        taps, last = output.taps[b, :n], output.last[b, :n]
        if not (bool(taps.isfinite().all()) and bool(last.isfinite().all())):
            skipped.append([i, "non-finite states"])
        writer.append(
            {
                "hidden": encode_bf16(taps),
                "last_hidden": encode_bf16(last),
                "input_ids": np.asarray(rows[i].token_ids, dtype=np.int32),
                "loss_mask": np.asarray(rows[i].loss_mask, dtype=np.uint8),
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
        path.unlink()


def _finalize(folder: Path, header: Header, plan: Plan, rows: Sequence[Row]) -> tuple[int, int]:
    """Checks that every part is there, writes the sample table and the manifest."""
    manifest_path = folder / "manifest.json"
    if manifest_path.exists():
        manifest = json.loads(manifest_path.read_text())
        _require_objects(folder, header)
        return int(manifest["bytes"]), len(manifest["skipped"])
    total_bytes, skipped, digest = _require_objects(folder, header)
    keep = np.array([i for i in range(len(rows)) if i not in {int(s[0]) for s in skipped}], int)
    classes = {name: i for i, name in enumerate(header.class_names)}
    columns = {
        "start": plan.starts[keep],
        "length": plan.lengths[keep],
        "sample_id": keep,
        "part": plan.parts[keep],
        "row_key": [rows[i].row_key for i in keep],
        "class_id": [classes[rows[i].class_name] for i in keep],
    }
    group = zarr.open_group(folder / "data.zarr", mode="a").require_group("samples")
    for name, dtype in SAMPLE_COLUMNS.items():
        values = np.asarray(columns[name], dtype=dtype)
        group.create_array(name, data=values, dimension_names=("sample",), overwrite=True)
    with warnings.catch_warnings():
        # Readers without consolidated metadata ignore it; those with it open with one request.
        warnings.simplefilter("ignore", ZarrUserWarning)
        zarr.consolidate_metadata(folder / "data.zarr")
    fsync_dir(folder / "data.zarr")
    if skipped:
        lines = [json.dumps({"source": rows[int(i)].source, "reason": r}) for i, r in skipped]
        write_atomic(folder / "quarantine.jsonl", "\n".join(lines) + "\n")
        log.warning("%d rows with non-finite states are listed in quarantine.jsonl", len(skipped))
    manifest = {
        "cache_uuid": header.cache_uuid,
        "num_parts": header.num_parts,
        "num_samples": len(keep),
        "num_tokens": int(plan.lengths[keep].sum()),
        "bytes": total_bytes,
        "commits_sha256": digest,
        "samples_sha256": samples_digest(folder),
        "skipped": skipped,
    }
    create_exclusive(manifest_path, json.dumps(manifest, indent=1) + "\n")
    return total_bytes, len(skipped)


def _require_objects(folder: Path, header: Header) -> tuple[int, list[list[int | str]], str]:
    """Every part committed and every object as long as its record says."""
    total, skipped = 0, []
    digest = hashlib.sha256()
    for part in range(header.num_parts):
        path = commit_path(folder, part)
        if not path.exists():
            raise CacheError(f"{path}: part {part} is missing\n  fix: run 'dspark cache' again")
        record = json.loads(path.read_text())
        digest.update(json.dumps(record["objects"], sort_keys=True).encode())
        skipped += record["skipped"]
        for name, entry in record["objects"].items():
            size = (folder / name).stat().st_size if (folder / name).exists() else -1
            if size != entry["bytes"]:
                problem = "is missing" if size < 0 else f"has {size} bytes, not {entry['bytes']}"
                raise ShardError(folder / name, problem)
            total += size
    return total, skipped, digest.hexdigest()
