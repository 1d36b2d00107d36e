"""The order of rows: a function of (seed, epoch, position), so that nothing needs to be resumed."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class RowSampler:
    """An endless sequence of rows; every epoch is a permutation of its own."""

    num_rows: int
    seed: int

    def at(self, position: int) -> tuple[int, int]:
        """(row, epoch) at a position counted over all epochs."""
        epoch, index = divmod(position, self.num_rows)
        return int(_permutation(self.num_rows, self.seed, epoch)[index]), epoch

    def step(self, step: int, rows_per_step: int) -> list[tuple[int, int]]:
        """(row, epoch) of every row of one optimizer step, over all ranks."""
        start = step * rows_per_step
        return [self.at(position) for position in range(start, start + rows_per_step)]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)
