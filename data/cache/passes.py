"""The target's passes over one part: rows of similar length together, shared prefixes once.

A piece with a parent continues the key/value cache of its parent. Only caches of the pieces above
the one in hand are kept. Parents that lie in another part are computed again, and not stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.batch import Row
from data.cache.plan import Plan
from data.target import KVCache, Target, TargetOutput


@dataclass(frozen=True)
class PieceInput:
    """A stored piece as the target reads it.

    Attributes:
        entry: of the plan.
        token_ids: int32.
        loss_mask: uint8; zeros in a shared prefix, whose rows have masks of their own.
        source: where its row, or the first of its rows, came from.
    """

    entry: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PassOutput:
    """States of some pieces.

    Attributes:
        pieces: one a batch row; behind its tokens the batch row is padding.
        computed_tokens: tokens that the target ran over, padding apart.
    """

    pieces: tuple[PieceInput, ...]
    output: TargetOutput
    computed_tokens: int

    @property
    def num_bytes(self) -> int:
        """Memory of the states."""
        return sum(t.numel() * t.element_size() for t in (self.output.taps, self.output.last))


class PartPasses:
    """Runs the target over parts of a plan.

    Args:
        target: the target.
        plan: where pieces lie.
        row_of: the row of a sample of the plan.
        batch_tokens: tokens (padding included) of one pass.
    """

    def __init__(
        self, target: Target, plan: Plan, row_of: Callable[[int], Row], batch_tokens: int
    ) -> None:
        self._target, self._plan, self._row_of = target, plan, row_of
        self._batch_tokens = batch_tokens
        self._has_children = np.zeros(len(plan.parts), np.bool_)
        self._has_children[plan.parents[plan.parents >= 0]] = True
        self._offsets, self._witnesses = plan.offsets, plan.witnesses
        self._caches: dict[int, KVCache] = {}

    def run(self, part: int) -> Iterator[PassOutput]:
        """The pieces of a part, in the order in which they lie in it."""
        self._caches.clear()
        for group in self.groups(self._plan.entries_of(part)):
            yield self._pass(group)
        self._caches.clear()

    def groups(self, entries: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive pieces that can share a pass: the same parent, and none below them."""
        run: list[int] = []
        for entry in entries:
            alone = bool(self._has_children[entry])
            parent = self._plan.parents[entry]
            if run and (alone or parent != self._plan.parents[run[-1]]):
                yield from length_batches(run, self._plan.lengths, self._batch_tokens)
                run = []
            if alone:
                yield [entry]
            else:
                run.append(entry)
        if run:
            yield from length_batches(run, self._plan.lengths, self._batch_tokens)

    def piece(self, entry: int) -> PieceInput:
        """The tokens of a piece."""
        start, length = int(self._offsets[entry]), int(self._plan.lengths[entry])
        row = self._row_of(int(self._witnesses[entry]))
        mask = np.zeros(length, np.uint8)
        if entry < self._plan.num_samples:
            mask[:] = row.loss_mask[start : start + length]
        ids = np.array(row.token_ids[start : start + length], dtype=np.int32)
        return PieceInput(entry, ids, mask, row.source)

    def _pass(self, group: list[int]) -> PassOutput:
        pieces = tuple(self.piece(entry) for entry in group)
        ids = torch.zeros((len(group), max(map(len, pieces))), dtype=torch.long)
        for b, piece in enumerate(pieces):
            ids[b, : len(piece)] = torch.from_numpy(piece.token_ids)
        computed = sum(map(len, pieces))
        parent = int(self._plan.parents[group[0]])
        cache = None
        if parent >= 0:
            before, extra = self._cache_of(parent)
            cache = self._target.branch(before, len(group))
            computed += extra
        if self._has_children[group[0]]:
            cache = cache or self._target.new_cache()
            above = set(self._plan.path(group[0]))
            self._caches = {k: v for k, v in self._caches.items() if k in above}
            self._caches[group[0]] = cache
        return PassOutput(pieces, self._target.forward(ids, cache), computed)

    def _cache_of(self, entry: int) -> tuple[KVCache, int]:
        """Keys and values up to the end of a piece, and the tokens that were computed for it."""
        if entry in self._caches:
            return self._caches[entry], 0
        ids = np.concatenate([self.piece(e).token_ids for e in self._plan.path(entry)])
        cache = self._target.new_cache()
        self._target.forward(torch.from_numpy(ids).long().unsqueeze(0), cache)
        self._caches[entry] = cache
        return cache, len(ids)


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
