"""Mends a cache: what `mode=verify` finds bad is removed, and what can be made again is."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from data.batch import Row
from data.cache.format import DATA, HEADER_KEY, Header, array_specs, load_header
from data.cache.labels import Labels, labels_key
from data.cache.metadata import HEADER_ATTRIBUTE
from data.cache.plan import Plan, Plans, plan_key
from data.cache.records import (
    FINGERPRINT_KEY,
    MANIFEST_KEY,
    Manifest,
    commit_key,
    committed_parts,
    digest,
)
from data.cache.start import RowIndex, make_plan
from data.cache.store import Store
from data.cache.verify import verify_cache
from data.config import CacheConfig
from data.errors import CacheError
from data.fingerprint import Fingerprint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mended:
    """What was removed or made again.

    Attributes:
        parts: that must be built again.
        files: control files that were written again, or removed to be written at the end.
    """

    parts: tuple[int, ...]
    files: tuple[str, ...]


def mend_cache(
    store: Store,
    rows: Sequence[Row],
    config: CacheConfig,
    fingerprint: Fingerprint,
) -> Mended:
    """Makes a damaged cache an unfinished one, which `build_cache` then completes.

    Args:
        store: where the cache lies.
        rows: all rows of the cache; damaged plans are made again from them.
        config: as the cache was built.
        fingerprint: of the target, with its tapped layers.

    Raises:
        CacheError: what is lost cannot be made again.
    """
    files = _mend_header(store) + _mend_manifest(store)
    header = load_header(store)
    if not store.exists(MANIFEST_KEY):  # unfinished: records alone say what is there
        return Mended((), tuple(files + _mend_plans(store, header, rows, config, None)))
    manifest = Manifest.load(store)
    files += _mend_fingerprint(store, manifest, fingerprint)
    files += _mend_plans(store, header, rows, config, manifest)
    report = verify_cache(store, config.verify_processes)
    parts = sorted({p.part for p in report.problems if p.part is not None})
    for problem in report.problems:
        log.warning("repair: %s", problem)
        if problem.part is None:
            files.append(problem.where)
    for part in parts:
        store.delete(commit_key(part))  # from here on the part does not exist
        for spec in array_specs(header):
            store.delete(spec.object_key(part))
    if report.problems:
        store.delete(MANIFEST_KEY)
        # Documents are written again at the end of every build; whole ones are needed before.
        store.delete(f"{DATA}/zarr.json")
    return Mended(tuple(parts), tuple(dict.fromkeys(files)))


def _mend_header(store: Store) -> list[str]:
    """Restores the header from the copy that the Zarr group keeps."""
    try:
        manifest = Manifest.load(store)
    except CacheError:
        manifest = None
    content = store.read(HEADER_KEY) if store.exists(HEADER_KEY) else b""
    if manifest is not None and manifest.digests.get(HEADER_KEY) == digest([content]):
        return []
    if manifest is None:
        try:
            load_header(store)
            return []
        except CacheError:
            log.warning("repair: the header cannot be read")
    try:
        group = json.loads(store.read(f"{DATA}/zarr.json"))
        value = group["attributes"][HEADER_ATTRIBUTE]
        header = Header.parse(json.dumps(value).encode(), store.locate(f"{DATA}/zarr.json"))
    except (OSError, ValueError, KeyError, TypeError, CacheError) as error:
        raise _lost(store, HEADER_KEY) from error
    if manifest is not None and manifest.digests.get(HEADER_KEY) != digest([header.to_bytes()]):
        raise _lost(store, HEADER_KEY)
    store.write(HEADER_KEY, header.to_bytes())
    return [store.locate(HEADER_KEY)]


def _mend_manifest(store: Store) -> list[str]:
    """Removes a manifest that cannot be read: the end of the build writes it again."""
    if not store.exists(MANIFEST_KEY):
        return []
    try:
        Manifest.load(store)
        return []
    except CacheError as error:
        log.warning("repair: %s", error)
        store.delete(MANIFEST_KEY)
        return [store.locate(MANIFEST_KEY)]


def _mend_fingerprint(store: Store, manifest: Manifest, own: Fingerprint) -> list[str]:
    content = store.read(FINGERPRINT_KEY) if store.exists(FINGERPRINT_KEY) else b""
    if manifest.digests.get(FINGERPRINT_KEY) == digest([content]):
        return []
    if manifest.digests.get(FINGERPRINT_KEY) != digest([own.to_bytes()]):
        raise CacheError(
            f"{store.locate(FINGERPRINT_KEY)}: damaged, and this target is not the one that the "
            "cache was built from\n  fix: give the target of the build, or build the cache anew"
        )
    store.write(FINGERPRINT_KEY, own.to_bytes())
    return [store.locate(FINGERPRINT_KEY)]


def _mend_plans(
    store: Store,
    header: Header,
    rows: Sequence[Row],
    config: CacheConfig,
    manifest: Manifest | None,
) -> list[str]:
    """Makes damaged plans and labels again from the rows; they are functions of them."""
    names = sorted(_plan_numbers(store, manifest))
    plans: dict[int, Plan] = {}
    for i in names:
        if (plan := _sound_plan(store, i, manifest)) is not None:
            plans[i] = plan
    bad = [i for i in names if i not in plans]
    bad_labels = [i for i in plans if not _is_sound(store, labels_key(i), manifest)]
    if len(bad) > 1:
        raise _lost(store, plan_key(bad[0]))
    if not bad and not bad_labels:
        return []
    index = RowIndex(rows)
    written = []
    if bad and manifest is None:  # nothing says what the plan was
        raise _lost(store, plan_key(bad[0]))
    for i in bad:
        others = Plans(tuple(plans[k] for k in sorted(plans)))
        first = plans[i - 1].end_part if i - 1 in plans else 0
        plans[i] = make_plan(header, index, index.beyond(others.row_ids), config, first)
        written.append(_rewrite(store, plan_key(i), plans[i].to_bytes(), manifest))
    for i in [*bad, *bad_labels]:
        places = [index.place(identity) for identity in plans[i].row_ids]
        found = [rows[p] for p in places if p is not None]
        if len(found) < len(places):
            raise _lost(store, labels_key(i))
        prefixes = plans[i].offsets[: plans[i].num_samples].tolist()
        content = Labels.of(found, prefixes).to_bytes()
        written.append(_rewrite(store, labels_key(i), content, manifest))
    return written


def _plan_numbers(store: Store, manifest: Manifest | None) -> set[int]:
    keys = set(store.list("plans/")) | set(manifest.digests if manifest else ())
    names = [k for k in keys if k.startswith("plans/plan-")]
    found = {int(k.rsplit("-", 1)[1].removesuffix(".npy")) for k in names}
    return found or ({0} if committed_parts(store) else set())


def _sound_plan(store: Store, i: int, manifest: Manifest | None) -> Plan | None:
    key = plan_key(i)
    try:
        if manifest is None or key not in manifest.digests:  # it has a digest of its own
            return Plan.from_bytes(store.read(key), store.locate(key))
        return Plan.from_bytes(manifest.read(store, key), store.locate(key))
    except (CacheError, OSError):
        return None


def _is_sound(store: Store, key: str, manifest: Manifest | None) -> bool:
    try:
        if manifest is None or key not in manifest.digests:
            Labels.load(store, int(key.rsplit("-", 1)[1].removesuffix(".json")))
        else:
            manifest.read(store, key)
    except (CacheError, OSError):
        return False
    return True


def _rewrite(store: Store, key: str, content: bytes, manifest: Manifest | None) -> str:
    if manifest is not None and manifest.digests.get(key) != digest([content]):
        raise _lost(store, key)
    store.write(key, content)
    return store.locate(key)


def _lost(store: Store, key: str) -> CacheError:
    return CacheError(
        f"{store.locate(key)}: damaged, and cannot be made again from what was given\n"
        "  fix: give the same rows (corpus.*) and sizes (cache.*) as the build, or build the "
        "cache anew"
    )
