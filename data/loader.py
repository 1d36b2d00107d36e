"""From the cache to the batches of each optimizer step, read ahead by threads.

Threads, not DataLoader processes: shipping tensors between processes costs several times what
reading them does. An error in a thread ends the run: it is raised again where the batch is due.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import cast

import torch

from data.batch import Batch, BatchHead
from data.cache.read import CacheReader
from data.cache.stored import StoredBatch
from data.prefetch import Task, WaitStats, prefetch
from data.sampler import RowSampler

_DEFAULT_BYTES = 1 << 30
# (row of the cache, epoch) of each row.
Rows = list[tuple[int, int]]
_Item = list[BatchHead] | Batch | StoredBatch


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank.

    Attributes:
        heads: of every micro-batch, known before the first one is read.
        batches: the micro-batches; they must be taken before the next step is.
    """

    heads: list[BatchHead]
    batches: Iterator[Batch | StoredBatch]


@dataclass(frozen=True)
class StepLoader:
    """The micro-batches of one rank, optimizer step by optimizer step.

    Rows of a step are sorted by length, dealt to the ranks in turn and cut into micro-batches:
    little padding, equal work, and the same rows in a step whatever the number of ranks.

    Attributes:
        max_bytes: memory of what is read ahead.
        threads: that read ahead.
        decode: whether these threads decode too; else `StoredBatch.to` does, on the device.
        stats: how often, and how long, training waited for data.
    """

    reader: CacheReader
    sampler: RowSampler
    rows_per_step: int
    rows_per_micro_batch: int
    rank: int = 0
    num_ranks: int = 1
    max_bytes: int = _DEFAULT_BYTES
    threads: int = 1
    decode: bool = True
    stats: WaitStats = field(default_factory=WaitStats)

    def rows_of(self, step: int) -> list[Rows]:
        """(row, epoch) of each micro-batch of this rank."""
        rows = self.sampler.step(step, self.rows_per_step)
        rows.sort(key=lambda item: (-self.reader.length(item[0]), item))
        mine = rows[self.rank :: self.num_ranks]
        size = self.rows_per_micro_batch
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def load(self, rows: Rows) -> Batch | StoredBatch:
        """Reads one micro-batch."""
        stored = self.reader.read_batch([r for r, _ in rows], [epoch for _, epoch in rows])
        return stored.to(torch.device("cpu")) if self.decode else stored

    def steps(self, first: int, end: int) -> Iterator[Step]:
        """Steps ``first .. end``.

        Raises:
            ShardError: whatever reading raised, at the batch that needed the row.
        """
        items = prefetch(self._tasks(first, end), self.threads, self.max_bytes, self.stats)
        try:
            for step in range(first, end):
                heads = next(items)
                count = len(self.rows_of(step))
                yield Step(cast("list[BatchHead]", heads), _batches(items, count))
        finally:
            items.close()

    def _tasks(self, first: int, end: int) -> Iterator[Task[_Item]]:
        """Of every step first the heads of its micro-batches, then the micro-batches."""
        for step in range(first, end):
            groups = self.rows_of(step)
            yield Task(sum(map(self._head_bytes, groups)), partial(self._heads, groups))
            for rows in groups:
                size = self.reader.batch_bytes([row for row, _ in rows])
                yield Task(size, partial(self.load, rows))

    def _heads(self, groups: list[Rows]) -> list[BatchHead]:
        return [self.reader.read_head([r for r, _ in g], [e for _, e in g]) for g in groups]

    def _head_bytes(self, rows: Rows) -> int:
        return sum(self.reader.length(row) for row, _ in rows)


def _batches(items: Iterator[_Item], count: int) -> Iterator[Batch | StoredBatch]:
    for item in islice(items, count):
        yield cast("Batch | StoredBatch", item)
