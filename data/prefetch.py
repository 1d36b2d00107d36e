"""Reading ahead: results in the order of their tasks, loaded by threads, bounded in bytes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# Else the first result would wait until millions of tiny tasks were submitted, and for ever if they
# have no bytes. 1024 take 20 ms to submit, and are ahead of any jitter.
_MAX_PENDING = 1024


@dataclass(frozen=True)
class Task(Generic[T]):
    """One result to come: its size in host memory, and how to get it."""

    num_bytes: int
    load: Callable[[], T]


@dataclass
class WaitStats:
    """What the consumer of `prefetch` got, and how often it came too early.

    Attributes:
        items: results handed out.
        waits: how many of them were not ready when asked for.
        wait_s: seconds spent waiting for those.
        bytes: of the results handed out, as the tasks stated them.
    """

    items: int = 0
    waits: int = 0
    wait_s: float = 0.0
    bytes: int = 0


def prefetch(
    tasks: Iterable[Task[T]], threads: int, max_bytes: int, stats: WaitStats | None = None
) -> Generator[T, None, None]:
    """Loads ``tasks`` ahead in ``threads`` threads and yields their results in order.

    The bytes of all tasks that were submitted and whose result the consumer is not done with stay
    at most ``max_bytes``; it is done with a result when it asks for the next. One exception: beside
    the result in use one task is always in flight, whatever its size, or nothing would overlap. So
    give at least the two largest tasks in a row. ``tasks`` may be endless: it is read by the
    consumer's thread, one task further than what was submitted. Closing the generator cancels what
    has not begun and waits for what has.

    Raises:
        Exception: whatever a ``load``, or ``tasks`` itself, raised, after all earlier results.
    """
    stats = WaitStats() if stats is None else stats
    own: set[int] = set()
    pool = ThreadPoolExecutor(threads, "prefetch", lambda: own.add(threading.get_ident()))
    try:
        ahead = _Ahead(tasks, pool, max_bytes)
        while ahead.fill():
            ahead.wait(stats)
            # Straight from the call: a name for it here would keep it alive as long as the consumer
            # works, also when the consumer has let go of it.
            yield ahead.take(stats)
    finally:
        # A thread cannot wait for itself: the garbage collector may close us in one of our own.
        pool.shutdown(wait=threading.get_ident() not in own, cancel_futures=True)


class _Ahead(Generic[T]):
    """Tasks that were submitted and whose results are still needed."""

    def __init__(self, tasks: Iterable[Task[T]], pool: ThreadPoolExecutor, max_bytes: int) -> None:
        self._tasks = iter(tasks)
        self._pool, self._max_bytes = pool, max_bytes
        self._next: Task[T] | None = None
        self._pending: deque[tuple[int, Future[T]]] = deque()
        self._inside_bytes = 0

    def fill(self) -> bool:
        """Submits what there is room for; False when nothing is left."""
        while len(self._pending) < _MAX_PENDING and (task := self._peek()) and self._has_room(task):
            self._next = None
            self._pending.append((task.num_bytes, self._pool.submit(task.load)))
            self._inside_bytes += task.num_bytes
        return bool(self._pending)

    def wait(self, stats: WaitStats) -> None:
        """Waits for the oldest task."""
        future = self._pending[0][1]
        if not future.done():
            stats.waits += 1
            start = time.perf_counter()
            try:
                future.exception()
            finally:
                stats.wait_s += time.perf_counter() - start

    def take(self, stats: WaitStats) -> T:
        """The result of the oldest task; raises its error."""
        num_bytes, future = self._pending.popleft()
        # In effect later: nothing is submitted until the consumer asks for the next result.
        self._inside_bytes -= num_bytes
        if future.exception() is None:
            stats.items += 1
            stats.bytes += num_bytes
        return future.result()

    def _peek(self) -> Task[T] | None:
        if self._next is None:
            try:
                self._next = next(self._tasks, None)
            except Exception as error:  # noqa: BLE001 - raised at its place, after earlier results
                failed: Future[T] = Future()
                failed.set_exception(error)
                self._pending.append((0, failed))
                self._tasks = iter(())
        return self._next

    def _has_room(self, task: Task[T]) -> bool:
        # When only the oldest is pending, another one loads while the consumer works on that one.
        only_oldest = len(self._pending) <= 1
        return only_oldest or self._inside_bytes + task.num_bytes <= self._max_bytes
