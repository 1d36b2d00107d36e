"""Reads a whole cache, in several processes, and names every bad file and the rows that it takes;
prints what a cache holds.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from data.cache.format import array_specs, load_header, raw_token_bytes
from data.cache.read import CacheReader
from data.cache.records import COMMITS, CommitRecord, Manifest, commit_key, digest
from data.cache.store import Store
from data.config import Check
from data.errors import CacheError, FingerprintMismatchError, ShardError
from data.progress import Meter

# Less than this is read before another process has started.
_WORTH_PROCESSES = 1 << 28
_SHOWN_ROWS = 8


@dataclass(frozen=True)
class Problem:
    """One bad file.

    Attributes:
        where: its name.
        text: what is wrong with it.
        part: that must be built again; None for control files.
        rows: of the cache, that cannot be read because of it.
    """

    where: str
    text: str
    part: int | None = None
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        rows = ""
        if self.rows:
            shown = ", ".join(map(str, self.rows[:_SHOWN_ROWS]))
            more = ", ..." if len(self.rows) > _SHOWN_ROWS else ""
            rows = f" ({len(self.rows)} rows: {shown}{more})"
        return f"{self.where}: {self.text}{rows}"


@dataclass(frozen=True)
class VerifyReport:
    """Result of reading every object with every checksum."""

    objects: int
    problems: tuple[Problem, ...]


def verify_cache(store: Store, processes: int = 1) -> VerifyReport:
    """Reads every object of the cache; collects all problems instead of ending at the first.

    Raises:
        CacheError: there is no finished cache, or header or manifest cannot be read.
    """
    header, manifest = load_header(store), Manifest.load(store)
    problems = list(_control_problems(store, manifest))
    try:
        reader = CacheReader(store, Check.always)
    except (CacheError, FingerprintMismatchError) as error:
        problems = problems or [Problem(store.url, str(error))]
        return VerifyReport(len(problems), tuple(problems))
    end = header.part_tokens
    problems = [
        p if p.part is None else replace(p, rows=tuple(reader.samples.rows_in(p.part, 0, end)))
        for p in problems
    ]
    # Without its record nothing can be said of a part's objects.
    unknown = {p.part for p in problems}
    parts = [p for p in range(manifest.num_parts) if p not in unknown]
    objects = [(spec.name, part) for part in parts for spec in array_specs(header)]
    with Meter("verify", len(objects), "objects") as meter:
        for found in _all_problems(reader, objects, processes, manifest.total_bytes):
            problems += found
            meter.add(1, f"{len(problems)} bad")
    return VerifyReport(len(objects), tuple(problems))


def _control_problems(store: Store, manifest: Manifest) -> Iterator[Problem]:
    for key in manifest.digests:
        if key != COMMITS:
            try:
                manifest.read(store, key)
            except ShardError as error:
                yield Problem(store.locate(key), error.problem)
    records = []
    for part in range(manifest.num_parts):
        try:
            CommitRecord.load(store, part)
            records.append(store.read(commit_key(part)))
        except ShardError as error:
            yield Problem(store.locate(commit_key(part)), error.problem, part)
    if len(records) == manifest.num_parts and digest(records) != manifest.digests.get(COMMITS):
        yield Problem(store.locate(COMMITS), "a commit record was changed after the build")


def _all_problems(
    reader: CacheReader, objects: list[tuple[str, int]], processes: int, total_bytes: int
) -> Iterator[list[Problem]]:
    if processes == 1 or total_bytes < _WORTH_PROCESSES:
        yield from (object_problems(reader, name, part) for name, part in objects)
        return
    # Forked children of a process that has threads may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _start_worker, (reader,)) as pool:
        yield from pool.map(_work, objects, chunksize=4)


_worker_reader: list[CacheReader] = []


def _start_worker(reader: CacheReader) -> None:
    _worker_reader.append(reader)


def _work(item: tuple[str, int]) -> list[Problem]:
    return object_problems(_worker_reader[0], *item)


def object_problems(reader: CacheReader, name: str, part: int) -> list[Problem]:
    """Reads one object whole."""
    where = reader.store.locate(reader.specs[name].object_key(part))
    end = reader.header.part_tokens
    try:
        found = reader.open_object(name, part)
        problems = []
        for chunk, text in found.bad_chunks():
            start = chunk * found.chunk_tokens
            rows = reader.samples.rows_in(part, start, start + found.chunk_tokens)
            problems.append(Problem(where, text, part, tuple(rows)))
        return problems
    except ShardError as error:
        rows = reader.samples.rows_in(part, 0, end)
        return [Problem(where, error.problem, part, tuple(rows))]


def describe_cache(store: Store) -> dict[str, str]:
    """What a person wants to know of a cache, as label and text."""
    reader = CacheReader(store)
    header, manifest = reader.header, reader.manifest
    counts = np.bincount(reader.samples.class_ids, minlength=len(manifest.class_names))
    classes = ", ".join(
        f"{n or '(none)'} {c}" for n, c in zip(manifest.class_names, counts, strict=True)
    )
    tokens = max(manifest.num_tokens, 1)
    raw = raw_token_bytes(len(header.tap_layers), header.hidden_size)
    size = manifest.total_bytes / tokens
    found = {
        "rows": f"{manifest.num_samples:,} ({classes})",
        "tokens": f"{tokens:,}",
        "size": f"{manifest.total_bytes / 1e9:.3f} GB",
        "bytes per token": f"{size:,.0f}, {size / raw:.3f} of raw bf16 states ({raw:,})",
        "taps": f"layers {list(header.tap_layers)} of width {header.hidden_size}, {header.taps}",
        "last state": header.last or "not stored",
    }
    if header.topk:
        found["law"] = f"top {header.topk} log-probabilities"
    if header.share_prefix:
        found["shared prefixes"] = (
            f"{manifest.stored_tokens:,} tokens stored ({manifest.stored_tokens / tokens:.1%}), "
            f"{manifest.computed_tokens:,} computed ({manifest.computed_tokens / tokens:.1%})"
        )
    for name, figures in header.fidelity.items():
        found[f"fidelity of {name}"] = ", ".join(f"{k} {_short(v)}" for k, v in figures.items())
    return {
        **found,
        "parts": f"{manifest.num_parts} of {header.part_tokens:,} tokens",
        "skipped rows": str(len(manifest.skipped)),
        "id": header.cache_uuid,
    }


def _short(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{v:.4f}" for v in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
