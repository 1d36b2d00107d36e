"""Finished caches of made-up states: everything but the target is real."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from data.batch import ASSISTANT, CONTEXT, Row, Segment
from data.cache.codecs import StateCodec, needs_outliers
from data.cache.encode import StateEncoder
from data.cache.finish import finalize
from data.cache.format import HEADER_KEY, LAST, TAPS, Header, array_specs
from data.cache.labels import Labels, labels_key
from data.cache.metadata import write_documents, zarr_documents
from data.cache.plan import Plan, Plans, pack_row_ids, plan_rows, plan_shared, save_plan
from data.cache.read import CacheReader
from data.cache.records import FINGERPRINT_KEY
from data.cache.store import LocalStore
from data.cache.write import PartWriter
from data.config import Codec
from data.fingerprint import Fingerprint
from data.target import Target

_STATES = 4093
MIN_PREFIX = 2
Arrays = dict[str, np.ndarray]


def masked_row(token_ids: Sequence[int], loss_mask: Sequence[bool], **rest: str) -> Row:
    """A row of any tokens and any mask."""
    segments, at = [], 0
    for on, run in groupby(loss_mask):
        end = at + len(list(run))
        ids = tuple(token_ids[at:end])
        segments.append(Segment(ids, bool(on), ASSISTANT if on else CONTEXT))
        at = end
    return Row(tuple(segments), **rest)


def header_of(taps: Codec, last: Codec | None, width: int, **rest: Any) -> Header:
    """Two layers, parts of 32 tokens in chunks of 4, no top-k, unless told otherwise."""
    fixed = {"share_prefix": False, "target_precision": "float32", "cache_uuid": "mine"}
    sizes = {"tap_layers": (0, 2), "vocab_size": 259, "topk": 0}
    chunks = {"chunk_tokens": 4, "part_tokens": 32}
    names = {"taps": taps.value, "last": last.value if last else None, "hidden_size": width}
    return Header(**{**sizes, **chunks, **names, **fixed, **rest})


@lru_cache(maxsize=8)
def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True)
class Head:
    """The only part of a target that an encoder asks."""

    width: int
    vocab: int

    def logits(self, last: Tensor) -> Tensor:
        logits: Tensor = last.float() @ _random(self.vocab, self.width).T / self.width**0.5
        return logits


@dataclass(frozen=True)
class Case:
    """Rows, and the header of a cache for them. The states of a token are a function of it and of
    the tokens before it, as a target's are.
    """

    header: Header
    rows: tuple[Row, ...]

    @cached_property
    def plan(self) -> Plan:
        header, ids = self.header, pack_row_ids(row.row_id for row in self.rows)
        if header.share_prefix:
            tokens = [row.token_ids for row in self.rows]
            return plan_shared(tokens, ids, header.part_tokens, MIN_PREFIX)
        return plan_rows([len(row) for row in self.rows], ids, header.part_tokens)

    def taps(self, row: int) -> Tensor:
        states = self._states(row, len(self.header.tap_layers), self.header.hidden_size)
        states[..., 1:2] *= 50  # a massive channel, as targets have them
        return states

    def last(self, row: int) -> Tensor:
        return self._states(row, self.header.hidden_size)

    def logits(self, row: int) -> Tensor:
        return Head(self.header.hidden_size, self.header.vocab_size).logits(self.last(row))

    @cached_property
    def arrays(self) -> list[Arrays]:
        """What reading every row must give, as it is stored."""
        found = []
        for i, row in enumerate(self.rows):
            pieces = [self.piece(entry) for entry in self.plan.path(i)]
            whole = {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}
            found.append({**whole, "loss_mask": np.array(row.loss_mask)})
        return found

    def piece(self, entry: int) -> Arrays:
        """What is stored of one entry of the plan."""
        plan = self.plan
        low, row = int(plan.offsets[entry]), int(plan.witnesses[entry])
        end = low + int(plan.lengths[entry])
        found = {name: array[low:end] for name, array in self._encoded[row].items()}
        if entry >= plan.num_samples:
            found["loss_mask"] = np.zeros_like(found["loss_mask"])
        return found

    @cached_property
    def _encoded(self) -> list[Arrays]:
        """Every row, encoded alone. In the last bit, laws can depend on what is encoded with them:
        what rows share is taken from one of them.
        """
        stub = cast("Target", Head(self.header.hidden_size, self.header.vocab_size))
        encoder, found = StateEncoder(stub, self.header), []
        for i, row in enumerate(self.rows):
            states, finite = encoder.encode(self.taps(i), self.last(i))
            if not finite:
                raise AssertionError("made-up states must be finite")
            ids = np.array(row.token_ids, np.int32)
            found.append({**states, "input_ids": ids, "loss_mask": np.array(row.loss_mask)})
        return found

    def _states(self, row: int, *shape: int) -> Tensor:
        numbers, at = [], 0
        for token in self.rows[row].token_ids:
            at = (31 * at + token + 1) % _STATES
            numbers.append(at)
        return 2 * _random(_STATES, *shape)[numbers]


def make_case(header: Header, rows: Sequence[Row]) -> Case:
    """Channels that a codec keeps exactly are chosen on the rows' own states."""
    case, outliers = Case(header, tuple(rows)), {}
    for name, kind, states_of in (
        (TAPS, header.taps, case.taps),
        (LAST, header.last, case.last),
    ):
        if kind is not None and (count := needs_outliers(Codec(kind))):
            states = torch.cat([states_of(i) for i in range(len(rows))])
            outliers[name] = StateCodec.choose_outliers(states, count).tolist()
    return Case(replace(header, outliers=outliers), tuple(rows))


def cut_up(count: int, cuts: random.Random) -> Iterator[slice]:
    """The numbers 0..count-1, cut at random places."""
    edges = sorted({0, count, *(cuts.randrange(count) for _ in range(cuts.randrange(4)))})
    yield from (slice(low, high) for low, high in pairwise(edges))


def write_cache(folder: Path, case: Case, seed: int = 0) -> LocalStore:
    """Writes a finished cache; tokens arrive in pieces of any size."""
    header, plan, cuts = case.header, case.plan, random.Random(seed)
    store = LocalStore(folder)
    store.create(HEADER_KEY, header.to_bytes())
    store.write(FINGERPRINT_KEY, Fingerprint({}).to_bytes())
    labels = Labels.of(case.rows, plan.offsets[: plan.num_samples].tolist())
    store.write(labels_key(0), labels.to_bytes())
    save_plan(store, 0, plan)
    write_documents(store, zarr_documents(header, plan.end_part))
    for part in range(plan.end_part):
        writer = PartWriter(store, part, array_specs(header), header.layout, "token")
        for entry in plan.entries_of(part):
            arrays = case.piece(entry)
            for cut in cut_up(len(arrays["input_ids"]), cuts):
                writer.append({name: array[cut] for name, array in arrays.items()})
        writer.commit({"cache_uuid": header.cache_uuid, "skipped": [], "computed_tokens": 0})
    finalize(store, header, Plans((plan,)))
    return store


def mixed_rows() -> list[Row]:
    """Ten rows of 1 to 30 tokens: with a common beginning, prefixes of each other, the same tokens
    with another mask, and rows that have nothing in common.
    """
    numbers = random.Random(0)
    system = numbers.choices(range(200), k=9)
    texts = [[*system, 200 + i, *numbers.choices(range(256), k=3 * i)] for i in range(4)]
    texts += [texts[3][:12], texts[3][:12], [7], [255, *range(29)]]
    texts += [numbers.choices(range(256), k=n) for n in (17, 24)]
    return [masked_row(ids, [numbers.random() < 0.6 for _ in ids]) for ids in texts]


def digest_of(reader: CacheReader) -> str:
    """Hash of everything that reading all rows gives."""
    total = hashlib.sha256()
    for i in range(len(reader)):
        found = reader[i]
        tensors = [found.token_ids, found.loss_mask, found.taps]
        tensors += [] if found.last is None else [found.last]
        tensors += [] if found.topk is None else list(vars(found.topk).values())
        for tensor in tensors:
            total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
