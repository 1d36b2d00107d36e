"""The last act of a build: every part there, sample table written, manifest created."""

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zarr
from zarr.errors import ZarrUserWarning

from data.batch import Row
from data.cache.format import SAMPLE_COLUMNS, Header, Plan
from data.cache.records import (
    CommitRecord,
    Manifest,
    commit_path,
    commits_digest,
    file_digest,
    samples_digest,
)
from data.errors import ShardError
from data.files import fsync_dir, write_atomic

log = logging.getLogger(__name__)


def finalize(folder: Path, header: Header, plan: Plan, rows: Sequence[Row]) -> Manifest:
    """Checks that every object is as long as its record says and completes the cache.

    A cache that is complete already is only checked.

    Raises:
        ShardError: a part or one of its files is missing or short.
    """
    records = [CommitRecord.load(folder, part) for part in range(header.num_parts)]
    for part, record in enumerate(records):
        if record.cache_uuid != header.cache_uuid:
            raise ShardError(commit_path(folder, part), "belongs to another cache")
    total_bytes = sum(_require_objects(folder, record) for record in records)
    if (folder / "manifest.json").exists():
        return Manifest.load(folder)
    skipped = tuple(entry for record in records for entry in record.skipped)
    bad = {sample for sample, _ in skipped}
    keep = np.array([i for i in range(len(rows)) if i not in bad], dtype=np.int64)
    _write_samples(folder, header, plan, rows, keep)
    if skipped:
        lines = [json.dumps({"source": rows[i].source, "reason": r}) + "\n" for i, r in skipped]
        write_atomic(folder / "quarantine.jsonl", "".join(lines))
        log.warning("%d rows with non-finite states are listed in quarantine.jsonl", len(skipped))
    manifest = Manifest(
        cache_uuid=header.cache_uuid,
        num_parts=header.num_parts,
        num_samples=len(keep),
        num_tokens=int(plan.lengths[keep].sum()),
        total_bytes=total_bytes,
        header_sha256=file_digest(folder / "cache.json"),
        commits_sha256=commits_digest(folder, header.num_parts),
        samples_sha256=samples_digest(folder),
        skipped=skipped,
    )
    manifest.save(folder)
    return manifest


def _write_samples(
    folder: Path, header: Header, plan: Plan, rows: Sequence[Row], keep: np.ndarray
) -> None:
    classes = {name: i for i, name in enumerate(header.class_names)}
    languages = {name: i for i, name in enumerate(header.languages)}
    kept = [(r.row_key, r.class_name, r.language) for r in (rows[int(i)] for i in keep)]
    columns = {
        "start": plan.starts[keep],
        "length": plan.lengths[keep],
        "sample_id": keep,
        "part": plan.parts[keep],
        "row_key": [row_key for row_key, _, _ in kept],
        "class_id": [classes[name] for _, name, _ in kept],
        "language_id": [languages[language] for _, _, language in kept],
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


def _require_objects(folder: Path, record: CommitRecord) -> int:
    for name, size in record.objects.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise ShardError(path, problem)
    return sum(record.objects.values())
