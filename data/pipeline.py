"""A step of a pipeline: one thread that works on items in order, behind a queue bounded in bytes.

Steps are chained by letting the work of one `put` into the next, the last step opened first:

    with Stage("write", write, room) as writer:
        with Stage("encode", encode_into(writer), room) as encoder:
            for batch in batches:
                encoder.put(batch, batch.nbytes)
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Stage(Generic[T]):
    """Applies ``work`` to items in the order of `put`, in a thread of its own.

    The bound counts what is queued and what is being worked on: rows differ in length by orders of
    magnitude, so a bound on their number would bound nothing. The first error of ``work`` ends the
    stage: what is queued is dropped, and `put`, `drain` and `close` raise that very exception.
    As a context manager it closes at the end of the block; when the block fails, what is queued is
    dropped and the block's error goes on.

    Attributes:
        name: of the thread, and in messages.
        blocked_s: seconds that `put` has waited for room; if it grows, this stage is the slow one.
    """

    def __init__(self, name: str, work: Callable[[T], None], max_bytes: int) -> None:
        self.name = name
        self.blocked_s = 0.0
        self._work, self._max_bytes = work, max_bytes
        self._queue: deque[tuple[T, int]] = deque()
        self._num_inside = self._inside_bytes = 0  # queued, or being worked on
        self._open = True
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        # `with` takes this lock itself, never the condition: `Condition.__enter__` is Python code,
        # in which Ctrl-C can strike when the lock is already taken, and nothing would release it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # A daemon: a stage that nobody closed must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that are queued or being worked on."""
        return self._inside_bytes

    def put(self, item: T, num_bytes: int) -> None:
        """Queues an item; waits for room. An item above the bound passes when it is alone.

        Raises:
            RuntimeError: the stage is closed.
            BaseException: whatever ``work`` raised for an earlier item.
        """
        with self._lock:
            if not self._is_over(num_bytes):
                start = time.perf_counter()
                try:
                    self._changed.wait_for(lambda: self._is_over(num_bytes))
                finally:
                    self.blocked_s += time.perf_counter() - start
            self._raise_error()
            if not self._open:
                raise RuntimeError(f"stage {self.name!r} is closed")
            self._queue.append((item, num_bytes))
            self._num_inside += 1
            self._inside_bytes += num_bytes
            self._changed.notify_all()

    def drain(self) -> None:
        """Waits until every item is done.

        Raises:
            BaseException: whatever ``work`` raised.
        """
        with self._lock:
            self._changed.wait_for(lambda: not self._num_inside)
            self._raise_error()

    def close(self) -> None:
        """Drains and ends the thread. Nobody may `put` any more.

        Raises:
            BaseException: whatever ``work`` raised.
        """
        try:
            self.drain()
        finally:
            self._stop()

    def __enter__(self) -> "Stage[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def _is_over(self, num_bytes: int) -> bool:
        """Whether `put` need not wait: there is room, or there never will be."""
        inside = self._inside_bytes
        return not self._open or not inside or inside + num_bytes <= self._max_bytes

    def _raise_error(self) -> None:
        if self._error is not None:
            # Raising appends to the traceback of the exception: each time starts from the original.
            raise self._error.with_traceback(self._trace)

    def _stop(self) -> None:
        """Drops what is queued and ends the thread, after the item that is being worked on."""
        with self._lock:
            dropped = self._end()
        # Not under the lock: the finalizers of items are somebody else's code.
        del dropped
        self._thread.join()

    def _end(self) -> deque[tuple[T, int]]:
        """Takes no more items; returns what was queued. Under the lock."""
        dropped, self._queue = self._queue, deque()
        self._num_inside -= len(dropped)
        self._inside_bytes -= sum(num_bytes for _, num_bytes in dropped)
        self._open = False
        self._changed.notify_all()
        return dropped

    def _run(self) -> None:
        try:
            while self._work_on_next():
                pass
        except BaseException as error:  # noqa: BLE001 - raised again by whoever uses the stage
            with self._lock:
                self._error, self._trace = error, error.__traceback__
                dropped = self._end()
                self._num_inside = self._inside_bytes = 0
            del dropped

    def _work_on_next(self) -> bool:
        """Does one item; False at the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._queue or not self._open)
            if not self._queue:
                return False
            entry = self._queue.popleft()
        num_bytes = entry[1]
        self._work(entry[0])
        # Its memory must be free before its bytes count as free.
        del entry
        with self._lock:
            self._num_inside -= 1
            self._inside_bytes -= num_bytes
            self._changed.notify_all()
        return True
