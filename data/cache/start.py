"""The beginning of a build: header, fingerprint and plans of a cache, or those that are there.

Every builder comes through here, one at a time; what one has written the others compare with
what they were asked for.
"""

import json
import logging
import uuid
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from data.batch import Row
from data.cache.fidelity import Probe, make_codec, measure_choice, require_fidelity, take_probe
from data.cache.format import (
    HEADER_KEY,
    LAST,
    TAPS,
    Header,
    load_header,
    make_header,
    raw_token_bytes,
    token_bytes,
)
from data.cache.labels import Labels, labels_key
from data.cache.metadata import document_keys, write_documents, zarr_documents
from data.cache.plan import (
    Plan,
    Plans,
    load_plans,
    pack_row_ids,
    plan_key,
    plan_rows,
    plan_shared,
    save_plan,
)
from data.cache.records import FINGERPRINT_KEY, committed_parts
from data.cache.store import Store
from data.config import CacheConfig, Codec
from data.errors import CacheError
from data.fingerprint import Fingerprint
from data.target import Target

log = logging.getLogger(__name__)
_SHOWN = 3
EXACT = (Codec.bf16.value, Codec.bf16_zstd.value)


class RowIndex:
    """The given rows by their identity: their order and their place in a file do not matter."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        lengths, names = [], []
        for row in rows:  # once: they may lie on disk
            lengths.append(len(row))
            names.append(row.row_id)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.ids = pack_row_ids(names)
        self._place = {identity.tobytes(): i for i, identity in enumerate(self.ids)}

    def place(self, identity: np.ndarray) -> int | None:
        """Index of a row; None when it was not given."""
        return self._place.get(identity.tobytes())

    def missing(self, ids: np.ndarray) -> int:
        """How many of some rows were not given."""
        return sum(self.place(i) is None for i in ids)

    def beyond(self, ids: np.ndarray) -> list[int]:
        """Given rows that are not among some others, in their order."""
        known = {identity.tobytes() for identity in ids}
        return [i for i, identity in enumerate(self.ids) if identity.tobytes() not in known]


def open_header(
    store: Store,
    target: Target,
    index: RowIndex,
    config: CacheConfig,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str],
) -> Header:
    """The header of the cache, compared with what is asked for; a new cache gets one.

    Raises:
        CacheError: the store holds another cache, or a codec costs too much on this target.
        FingerprintMismatchError: another target or template.
    """
    fingerprint = fingerprint.extended(tap_layers=json.dumps(list(target.tap_layers)))
    header = new_header(target, index, config)
    if store.exists(HEADER_KEY):
        stored = load_header(store)
        if int(index.lengths.max()) <= stored.part_tokens:
            # Sizes were chosen for the rows of the first build; they need not fit others' best.
            sizes = {"chunk_tokens": stored.chunk_tokens, "part_tokens": stored.part_tokens}
            header = Header(**{**vars(header), **sizes})
        header.require_same(stored, store.url)
        there = Fingerprint.parse(store.read(FINGERPRINT_KEY), store.locate(FINGERPRINT_KEY))
        fingerprint.require_match(there, "this run", store.url, allow_mismatch)
        return stored
    if committed_parts(store):
        raise CacheError(
            f"{store.locate(HEADER_KEY)}: missing header of parts that are built\n"
            "  fix: run 'dspark cache mode=repair' with the build's settings"
        )
    exact = not (_is_lossy(header) or config.topk)
    tokens = config.self_check_tokens if exact else config.fidelity_tokens
    probe = take_probe(target, index.rows, tokens)
    figures = measure_choice(target, probe, config)
    require_fidelity(figures, config)
    _announce(store, header, index, probe)
    for name, found in figures.items():
        log.info("%s on this target: %s", name, _plain(found))
    outliers = {}
    for name, kind, states in (
        (TAPS, config.taps_codec, probe.taps),
        (LAST, config.last_codec, probe.last),
    ):
        if kind is not None and (ids := make_codec(kind, states).outlier_ids) is not None:
            outliers[name] = ids.tolist()
    named = {
        "outliers": outliers,
        "fidelity": figures,
        "cache_uuid": uuid.uuid4().hex,
        "created_by": f"dspark-pipeline {version('dspark-pipeline')}",
    }
    header = Header(**{**vars(header), **named})
    store.write(FINGERPRINT_KEY, fingerprint.to_bytes())
    store.create(HEADER_KEY, header.to_bytes())
    return header


def new_header(target: Target, index: RowIndex, config: CacheConfig) -> Header:
    """What a cache of these rows would be, without what is measured on the target."""
    text = target.text_config
    shape = (target.tap_layers, text.hidden_size, text.vocab_size)
    precision = str(target.model.dtype).removeprefix("torch.")
    return make_header(shape, precision, int(index.lengths.max()), config)


def open_plans(store: Store, header: Header, index: RowIndex, config: CacheConfig) -> Plans:
    """The plans of the cache; a new one when there are rows that it lacks and may take.

    Raises:
        CacheError: the rows are not those of the cache; says how many differ.
    """
    plans = load_plans(store)
    known = Plans(tuple(plans))
    if max(committed_parts(store), default=-1) >= known.num_parts:
        raise CacheError(  # a new plan would give their states to other rows
            f"{store.locate(plan_key(len(plans)))}: missing plan of parts that are built\n"
            "  fix: run 'dspark cache mode=repair' with the build's settings"
        )
    new = index.beyond(known.row_ids)
    missing = index.missing(known.row_ids)
    if plans and not config.add_rows and (new or missing):
        shown = ", ".join(index.rows[i].source for i in new[:_SHOWN])
        raise CacheError(
            f"{store.url} holds other rows: {missing} of its {known.num_samples} are not among "
            f"those given, {len(new)} of those given are not in it"
            + (f" (the first: {shown})" if new else "")
            + "\n  fix: cache.add_rows=true adds them and keeps what is there; or give another "
            "run.name or cache.path"
        )
    if new:
        plan = make_plan(header, index, new, config, known.num_parts)
        prefix_lengths = plan.offsets[: plan.num_samples]
        labels = Labels.of((index.rows[i] for i in new), prefix_lengths.tolist())
        store.write(labels_key(len(plans)), labels.to_bytes())
        save_plan(store, len(plans), plan)
        known = Plans((*plans, plan))
    # They are written again at the end; a finished cache that grows keeps its own until then.
    if not all(store.exists(key) for key in document_keys(header)):
        write_documents(store, zarr_documents(header, known.num_parts))
    return known


def make_plan(
    header: Header, index: RowIndex, chosen: Sequence[int], config: CacheConfig, first_part: int
) -> Plan:
    """Places some of the given rows behind the parts that exist."""
    ids = index.ids[list(chosen)]
    if not header.share_prefix:
        lengths = index.lengths[list(chosen)]
        return plan_rows(lengths.tolist(), ids, header.part_tokens, first_part)
    tokens = (index.rows[i].token_ids for i in chosen)
    return plan_shared(tokens, ids, header.part_tokens, config.share_prefix_min, first_part)


def require_space(store: Store, header: Header, tokens: int) -> None:
    """Refuses a build that the disk has no room for.

    Raises:
        CacheError: names both sizes and the ways out.
    """
    need, free = tokens * token_bytes(header), store.free_bytes()
    if free is not None and need > free:
        raise CacheError(
            f"{store.url}: needs up to {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free\n"
            "  fix: a smaller codec ('dspark cache mode=estimate' lists them), cache.path on a "
            "larger disk, or fewer rows (corpus.limit)"
        )


def _is_lossy(header: Header) -> bool:
    kinds = (header.taps, header.last)
    return any(kind not in (None, *EXACT) for kind in kinds)


def _announce(store: Store, header: Header, index: RowIndex, probe: Probe) -> None:
    tokens, size = int(index.lengths.sum()), token_bytes(header)
    free = store.free_bytes()
    raw = raw_token_bytes(len(header.tap_layers), header.hidden_size)
    log.info(
        "cache: %d rows, %d tokens; up to %.2f GB (%d bytes a token, %.2f of raw bf16 states)%s; "
        "about %.2f h at %.0f tokens/s of this process",
        len(index.lengths),
        tokens,
        tokens * size / 1e9,
        size,
        size / raw,
        "" if free is None else f", {free / 1e9:.1f} GB free",
        tokens / probe.tokens_per_s / 3600,
        probe.tokens_per_s,
    )


def _plain(figures: dict[str, object]) -> str:
    def shown(value: object) -> str:
        if isinstance(value, list):
            return " ".join(f"{v:.4f}" for v in value)
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {shown(value)}" for name, value in figures.items())
