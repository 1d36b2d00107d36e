"""Host memory for big arrays, used again and again.

Above 32 MiB malloc takes fresh memory from the kernel each time, with a page fault every 4 KiB:
filling 64 MiB takes 10 ms that way, and 3 ms in memory that was used before (measured on 2 cores).
Smaller arrays gain little.
"""

import contextlib
import itertools
import os
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

# A cache line, and enough for any vector instruction.
_ALIGN = 64
# Sizes are rounded up to 1/8 of their power of two: at most 1/8 is lost, and few sizes are left.
_STEPS = 8


class _Blocks:
    """The blocks of one size: those that lie unused, with the time they came back, and the others.

    Both are deques because `append` and `pop` are atomic: see `BufferPool`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.free: deque[tuple[int, memoryview]] = deque()
        self.leased: deque[None] = deque()


class BufferPool:
    """Leases arrays whose memory comes back by itself when nobody can reach it any more.

    There is no lock. An array can die anywhere, in any thread, in the middle of a call to the pool
    (garbage collection) or of a `fork`: a lock would be waited for by the thread that holds it, be
    taken in the wrong order with locks that the pool knows nothing of, or stay taken in the child.

    Attributes:
        max_free_bytes: bound of what lies unused; what came back first is freed first.
        reuses: leases that needed no fresh memory.
    """

    def __init__(self, max_free_bytes: int, *, pinned: bool = False) -> None:
        if max_free_bytes < 0:
            raise ValueError(f"max_free_bytes is {max_free_bytes}, must not be negative")
        self.max_free_bytes = max_free_bytes
        self.reuses = 0
        self._pinned = pinned and torch.cuda.is_available()
        self._process = os.getpid()
        self._blocks: dict[int, _Blocks] = {}
        self._clock = itertools.count()

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks that somebody can still reach."""
        # A copy, which is one step for other threads: they may add a size meanwhile.
        return sum(b.num_bytes * len(b.leased) for b in self._blocks.copy().values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that lie unused."""
        return sum(b.num_bytes * len(b.free) for b in self._blocks.copy().values())

    def lease(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array with arbitrary content, aligned to 64 bytes.

        Its memory is used again once the array and every view of it, of numpy or torch, are gone.
        What does not keep it: a bare address (``.ctypes.data``, ``.data_ptr()``), and a copy to a
        device that is still under way (``non_blocking=True``): hold the array until its event.

        Raises:
            MemoryError: there is no memory left.
            ValueError: ``num_bytes`` is negative.
        """
        blocks = self._blocks_for(num_bytes)
        try:
            _, block = blocks.free.pop()  # the newest, which caches may still hold
            self.reuses += 1  # a figure to show: when threads race, one may be lost
        except IndexError:
            block = self._allocate(blocks.num_bytes)
        # numpy points the base of a view at the array that owns the memory, past all views between.
        # This one stays in the chain because what is behind it is no array but a memoryview. The
        # garbage collector does not track arrays: it never takes this one for a part of a cycle,
        # whose weak references it would call before a `__del__` that can still read the memory.
        whole = np.frombuffer(block, np.uint8)
        blocks.leased.append(None)
        # Not at exit: arrays that threads still use would be free to be leased.
        weakref.finalize(whole, self._give_back, blocks, block).atexit = False
        return whole[:num_bytes]

    def _give_back(self, blocks: _Blocks, block: memoryview) -> None:
        """Runs when no array can reach the block."""
        blocks.leased.pop()
        if blocks.num_bytes > self.max_free_bytes:
            return  # it would push out all others first, and then itself
        blocks.free.append((next(self._clock), block))
        # Everyone who appended looks afterwards: whatever the threads' order, the last one trims.
        while self.free_bytes > self.max_free_bytes:
            self._free_oldest()

    def _free_oldest(self) -> None:
        oldest: tuple[int, _Blocks] | None = None
        for blocks in self._blocks.copy().values():
            with contextlib.suppress(IndexError):  # empty, or another thread was faster
                came_back = blocks.free[0][0]
                if oldest is None or came_back < oldest[0]:
                    oldest = came_back, blocks
        if oldest is not None:
            with contextlib.suppress(IndexError):
                oldest[1].free.popleft()

    def _blocks_for(self, num_bytes: int) -> _Blocks:
        if num_bytes < 0:
            raise ValueError(f"cannot lease {num_bytes} bytes")
        if self._pinned and os.getpid() != self._process:
            # CUDA, and with it pinned memory, does not survive a fork.
            self._pinned, self._blocks = False, {}
        # torch rounds pinned memory up to a power of two: no finer steps, so that bytes are true.
        size = _round_up(num_bytes, 1 if self._pinned else _STEPS)
        found = self._blocks.get(size)
        return self._blocks.setdefault(size, _Blocks(size)) if found is None else found

    def _allocate(self, num_bytes: int) -> memoryview:
        if self._pinned:  # in whole pages
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
        memory = np.empty(num_bytes + _ALIGN, np.uint8)
        start = -memory.ctypes.data % _ALIGN
        return memory.data[start : start + num_bytes]


def _round_up(num_bytes: int, steps: int) -> int:
    """The next size that is in use, with ``steps`` sizes between powers of two."""
    octave = 1 << max(num_bytes - 1, 0).bit_length()
    step = max(octave // 2 // steps, _ALIGN)
    return max(-(-num_bytes // step), 1) * step
