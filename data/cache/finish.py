"""The last act of a build: every part there, sample table and manifest written."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data.batch import content_hash
from data.cache.claims import CLAIMS, claim_key, part_work
from data.cache.format import HEADER_KEY, Header
from data.cache.labels import Labels, labels_key
from data.cache.metadata import write_documents, zarr_documents
from data.cache.plan import Plan, Plans, plan_key
from data.cache.records import (
    COMMITS,
    FINGERPRINT_KEY,
    MANIFEST_KEY,
    CommitRecord,
    Manifest,
    commit_key,
    digest,
)
from data.cache.store import Store
from data.cache.table import PREFIX_MASKS, PREFIXES, SAMPLES, has_prefixes
from data.errors import CacheError, ShardError

log = logging.getLogger(__name__)
QUARANTINE_KEY = "quarantine.jsonl"


def finalize(store: Store, header: Header, plans: Plans) -> Manifest:
    """Checks that every object is as long as its record says, and completes the cache.

    A cache that is complete already is only checked.

    Raises:
        ShardError: a part or one of its objects is missing or short.
    """
    records = [CommitRecord.load(store, part) for part in range(plans.num_parts)]
    total_bytes = _require_objects(store, header, records)
    _sweep(store, plans)
    if (found := finished(store, plans)) is not None:
        return found
    labels = [Labels.load(store, i) for i in range(len(plans))]
    kept, skipped = _usable(plans, labels, records)
    tables, class_names, languages = _tables(header, plans, labels, kept)
    store.delete(MANIFEST_KEY)  # the tables that it describes are replaced now
    documents = zarr_documents(header, plans.num_parts, tables)
    write_documents(store, documents)
    store.delete(QUARANTINE_KEY)  # parts that were built again may have no unusable rows now
    if skipped:
        lines = [json.dumps({"source": source, "reason": r}) + "\n" for _, source, r in skipped]
        store.write(QUARANTINE_KEY, "".join(lines).encode())
        log.warning("%d rows with unusable states are listed in quarantine.jsonl", len(skipped))
    lengths = np.concatenate([plan.row_lengths for plan in plans])
    manifest = Manifest(
        cache_uuid=header.cache_uuid,
        num_parts=plans.num_parts,
        num_samples=int(kept.sum()),
        num_tokens=int(lengths[kept].sum()),
        stored_tokens=plans.stored_tokens,
        computed_tokens=sum(record.computed_tokens for record in records),
        total_bytes=total_bytes,
        class_names=class_names,
        languages=languages,
        dataset_hash=content_hash(plans.row_ids.tolist()),
        digests=_digests(store, plans, documents),
        skipped=skipped,
    )
    manifest.save(store)
    return manifest


def finished(store: Store, plans: Plans) -> Manifest | None:
    """The manifest when it speaks of all parts and can be read."""
    try:
        manifest = Manifest.load(store)
    except CacheError:
        return None
    return manifest if manifest.num_parts == plans.num_parts else None


def _sweep(store: Store, plans: Plans) -> None:
    """Removes what killed builders left; all parts are committed, so nobody writes."""
    store.remove_partials()
    done = {claim_key(part_work(part)) for part in range(plans.num_parts)}
    for key in done.intersection(store.list(CLAIMS)):
        store.delete(key)  # killed between a commit and the claim's release


def _digests(store: Store, plans: Plans, documents: Mapping[str, bytes]) -> dict[str, str]:
    """`Manifest.digests`: of the documents as they were meant, of the rest as it lies there."""
    own = [key for i in range(len(plans)) for key in (plan_key(i), labels_key(i))]
    found = {key: digest([store.read(key)]) for key in (HEADER_KEY, FINGERPRINT_KEY, *own)}
    records = (store.read(commit_key(part)) for part in range(plans.num_parts))
    return {
        **found,
        **{key: digest([content]) for key, content in documents.items()},
        COMMITS: digest(records),
    }


def _require_objects(store: Store, header: Header, records: list[CommitRecord]) -> int:
    sizes = store.list("data.zarr/")
    total = 0
    for part, record in enumerate(records):
        if record.cache_uuid != header.cache_uuid:
            raise ShardError(store.locate(commit_key(part)), "belongs to another cache")
        for key, (size, _) in record.objects.items():
            found = sizes.get(key)
            if found != size:
                problem = "is missing" if found is None else f"has {found} bytes, not {size}"
                raise ShardError(store.locate(key), problem)
            total += size
    return total


def _usable(
    plans: Plans, labels: Sequence[Labels], records: list[CommitRecord]
) -> tuple[np.ndarray, tuple[tuple[str, str, str], ...]]:
    """Which rows may be used, bool over all; and (row id, source, reason) of the others."""
    kept, skipped = [], []
    for plan, found in zip(plans, labels, strict=True):
        reasons: dict[int, str] = {}
        for record in records[plan.first_part : plan.end_part]:
            reasons |= {entry: reason for entry, _, reason in record.skipped}
        usable = np.ones(plan.num_samples, np.bool_)
        for sample in _rows_through(plan, set(reasons)):
            usable[sample] = False
            entry = next(e for e in plan.path(sample) if e in reasons)
            high, low = (int(word) for word in plan.row_ids[sample])
            skipped.append((f"{high:016x}{low:016x}", found.sources[sample], reasons[entry]))
        kept.append(usable)
    return np.concatenate(kept), tuple(skipped)


def _rows_through(plan: Plan, entries: set[int]) -> Iterator[int]:
    if entries:
        yield from (s for s in range(plan.num_samples) if entries.intersection(plan.path(s)))


def _tables(
    header: Header, plans: Plans, labels: Sequence[Labels], kept: np.ndarray
) -> tuple[dict[str, dict[str, np.ndarray]], tuple[str, ...], tuple[str, ...]]:
    """Columns of every table, and the names that class and language ids mean."""
    names = tuple(sorted({name for found in labels for name in found.classes}))
    languages = tuple(sorted({name for found in labels for name in found.languages}))
    samples, prefixes, masks = [], [], [np.zeros(0, np.uint8)]
    first = _First()
    for plan, found in zip(plans, labels, strict=True):
        n = plan.num_samples
        # Prefixes of all plans are numbered through; the rows' own pieces are left out.
        up = np.where(plan.parents < 0, -1, plan.parents - n + first.prefix)
        places = {"part": plan.parts, "start": plan.starts, "length": plan.lengths, "prefix": up}
        before = plan.offsets[:n]
        samples.append(
            {name: column[:n] for name, column in places.items()}
            | {
                "sample_id": np.arange(first.sample, first.sample + n),
                "row_key": plan.row_ids[:, 0] >> np.uint64(1),
                "class_id": _ids(names, found.classes),
                "language_id": _ids(languages, found.languages),
                "prefix_mask_start": first.mask + np.cumsum(before) - before,
            }
        )
        prefixes.append({name: column[n:] for name, column in places.items()})
        masks += [found.prefix_mask(i, int(length)) for i, length in enumerate(before)]
        first = _First(
            first.sample + n, first.prefix + len(plan.parts) - n, first.mask + int(before.sum())
        )
    tables = {"samples": {k: v[kept] for k, v in _join(samples, SAMPLES).items()}}
    if has_prefixes(header):
        tables["prefixes"] = _join(prefixes, PREFIXES)
        tables["prefix_masks"] = _join([{"loss_mask": m} for m in masks], PREFIX_MASKS)
    return tables, names, languages


@dataclass(frozen=True)
class _First:
    """Where the entries of the next plan begin in the tables."""

    sample: int = 0
    prefix: int = 0
    mask: int = 0


def _ids(names: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[text] for text in texts])


def _join(
    pieces: Sequence[Mapping[str, np.ndarray]], columns: Mapping[str, str]
) -> dict[str, np.ndarray]:
    return {n: np.concatenate([p[n] for p in pieces]).astype(t) for n, t in columns.items()}
