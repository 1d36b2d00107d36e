"""From the cache to the batches of each optimizer step, read ahead by one thread.

Threads, not DataLoader processes: shipping tensors between processes costs several times what
reading them does. An error in the thread ends the run: `Future.result` raises it again.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from data.batch import Batch, collate
from data.cache.read import CacheReader
from data.sampler import RowSampler

# Bounds host memory: one step in use, one read, one waiting.
_STEPS_AHEAD = 1


@dataclass(frozen=True)
class StepLoader:
    """The micro-batches of one rank, optimizer step by optimizer step.

    Rows of a step are sorted by length, dealt to the ranks in turn and cut into micro-batches:
    little padding, equal work, and the same rows in a step whatever the number of ranks.
    """

    reader: CacheReader
    sampler: RowSampler
    rows_per_step: int
    rows_per_micro_batch: int
    rank: int = 0
    num_ranks: int = 1

    def rows_of(self, step: int) -> list[list[tuple[int, int]]]:
        """(row, epoch) of each micro-batch of this rank."""
        rows = self.sampler.step(step, self.rows_per_step)
        lengths = self.reader.samples.lengths
        rows.sort(key=lambda item: (-int(lengths[item[0]]), item))
        mine = rows[self.rank :: self.num_ranks]
        size = self.rows_per_micro_batch
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    def load(self, step: int) -> list[Batch]:
        """Reads one step."""
        return [
            collate([self.reader[row] for row, _ in rows], [epoch for _, epoch in rows])
            for rows in self.rows_of(step)
        ]

    def steps(self, first: int, end: int) -> Iterator[list[Batch]]:
        """Steps ``first .. end``, read ahead in a thread.

        Raises:
            ShardError: whatever reading raised, at the step that needed the row.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            pending: deque[Future[list[Batch]]] = deque()
            for step in range(first, end):
                pending.append(pool.submit(self.load, step))
                if len(pending) > _STEPS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
