"""Stages, prefetch and the buffer pool: order, bounds in bytes, errors, and nothing that hangs."""

import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data.pipeline import Stage
from data.pool import BufferPool
from data.prefetch import Task, WaitStats, prefetch

LIMIT_S = 10.0
MAIN = threading.main_thread()


class OutOfPaperError(Exception):
    """Nothing else raises this."""


class HangError(BaseException):
    """No `Exception`, or hypothesis would run into the same hang again to shrink it."""


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A process that a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """A test that hangs is interrupted, again and again; none leaves a thread behind."""

    def give_up(_signal: int, _frame: FrameType | None) -> None:
        raise HangError

    before = set(threading.enumerate())
    old = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 0.5)
    try:
        yield
        left = set(threading.enumerate()) - before
        assert not left
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


class Gate:
    """Holds whoever passes until it is opened; tells when somebody has arrived."""

    def __init__(self) -> None:
        self.arrived, self._opened = threading.Event(), threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wait(self, _item: object = None) -> None:
        self.arrived.set()
        assert self._opened.wait(LIMIT_S)


# Where threads sleep in a condition or a join, up to Python 3.12 and later.
_SLEEPING = {"wait", "_wait_for_tstate_lock", "join"}


def until_blocked(thread: threading.Thread, function: str) -> None:
    """Waits until a thread sleeps in a condition or a join, called from ``function``."""
    while True:
        frame = sys._current_frames().get(thread.ident or 0)
        names = [f.name for f in traceback.extract_stack(frame)] if frame else []
        if names and names[-1] in _SLEEPING and function in names:
            return
        threading.Event().wait(0.001)


@contextlib.contextmanager
def beside(function: Callable[[], None]) -> Iterator[threading.Thread]:
    """Runs a function in a thread, for the time of the block."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def interrupt_main_when_blocked(function: str) -> None:
    """What Ctrl-C does; `_thread.interrupt_main` would not wake a sleeping thread."""
    until_blocked(MAIN, function)
    signal.pthread_kill(MAIN.ident or 0, signal.SIGINT)


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# --- Stage ---


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(0, 20))
def test_stage_keeps_the_order_and_the_bound(sizes: list[int], max_bytes: int) -> None:
    done: list[int] = []
    entered = left = 0
    seen: list[tuple[int, int]] = []

    def work(item: int) -> None:
        nonlocal left
        done.append(item)
        left += sizes[item]

    with Stage("work", work, max_bytes) as stage:
        for item, size in enumerate(sizes):
            stage.put(item, size)
            entered += size
            seen.append((entered - left, size))
        stage.drain()
        assert stage.queued_bytes == 0
        assert done == list(range(len(sizes)))
    assert all(inside <= max(max_bytes, size) for inside, size in seen)


def test_put_blocks_when_the_bound_would_be_passed_and_not_before() -> None:
    gate = Gate()
    with Stage("work", gate.wait, 10) as stage:
        stage.put(0, 4)
        assert gate.arrived.wait(LIMIT_S)
        stage.put(1, 6)  # what is in work counts, and exactly full is allowed
        assert stage.queued_bytes == 10
        assert stage.blocked_s == 0
        with beside(lambda: stage.put(2, 1)) as putter:
            until_blocked(putter, "put")
            assert stage.queued_bytes == 10
            gate.open()
    assert stage.blocked_s > 0


def test_item_above_the_bound_passes_alone() -> None:
    gates = [Gate(), Gate(), Gate()]
    with Stage[Gate]("work", Gate.wait, 10) as stage:
        stage.put(gates[0], 1)
        with beside(lambda: stage.put(gates[1], 99)) as putter:
            until_blocked(putter, "put")
            gates[0].open()
        assert gates[1].arrived.wait(LIMIT_S)
        with beside(lambda: stage.put(gates[2], 1)) as putter:
            until_blocked(putter, "put")
            assert stage.queued_bytes == 99
            gates[1].open()
        gates[2].open()


def fail_on(bad: int, done: list[int]) -> Callable[[int], None]:
    def work_that_fails(item: int) -> None:
        if item == bad:
            raise OutOfPaperError(item)
        done.append(item)

    return work_that_fails


def test_error_is_raised_by_every_later_call_and_drops_the_queue() -> None:
    gate, done = Gate(), list[int]()
    fail = fail_on(1, done)

    def work(item: int) -> None:
        gate.wait()
        fail(item)

    stage = Stage("work", work, 100)
    for item in range(5):
        stage.put(item, 1)
    gate.open()
    calls = [stage.drain, lambda: stage.put(9, 1), stage.drain, stage.close, stage.close]
    errors = []
    for call in calls:
        with pytest.raises(OutOfPaperError, match="1") as caught:
            call()
        errors.append(caught.value)
        assert functions(caught.value)[-1] == "work_that_fails"
    assert len({id(error) for error in errors}) == 1
    # Raising the same exception again and again must not pile up its traceback.
    assert len(functions(errors[0])) < 10
    assert done == [0]
    assert stage.queued_bytes == 0


def test_error_reaches_a_put_that_is_blocked() -> None:
    gate = Gate()

    def work(_item: int) -> None:
        gate.wait()
        raise OutOfPaperError

    def open_when_blocked() -> None:
        until_blocked(MAIN, "put")
        gate.open()

    def fill() -> None:
        with Stage("work", work, 1) as stage:
            for item in itertools.count():
                stage.put(item, 1)

    with beside(open_when_blocked), pytest.raises(OutOfPaperError):
        fill()


def test_error_of_the_last_stage_unwinds_the_whole_chain() -> None:
    gate, encoders = Gate(), list[threading.Thread]()

    def write(_item: int) -> None:
        gate.wait()
        raise OutOfPaperError

    def fill() -> None:
        with Stage("write", write, 1) as writer:

            def encode(item: int) -> None:
                encoders.append(threading.current_thread())
                writer.put(item, 1)

            with Stage("encode", encode, 1) as encoder:
                for item in itertools.count():
                    encoder.put(item, 1)

    def open_when_all_are_blocked() -> None:
        assert gate.arrived.wait(LIMIT_S)
        until_blocked(MAIN, "put")
        until_blocked(encoders[0], "put")
        gate.open()

    with beside(open_when_all_are_blocked), pytest.raises(OutOfPaperError) as caught:
        fill()
    assert {"encode", "write"} <= set(functions(caught.value))


def test_error_after_the_last_put_is_not_lost() -> None:
    gate = Gate()

    def write(_item: int) -> None:
        gate.wait()
        raise OutOfPaperError

    def fill() -> None:
        with Stage("write", write, 9) as writer:
            with Stage[int]("encode", lambda item: writer.put(item, 1), 9) as encoder:
                encoder.put(0, 1)
            gate.open()

    with pytest.raises(OutOfPaperError):
        fill()


@pytest.mark.parametrize("worker_fails", [False, True])
def test_error_of_the_block_goes_on_and_drops_the_queue(worker_fails: bool) -> None:
    gate, done = Gate(), list[int]()

    def work(item: int) -> None:
        gate.wait()
        done.append(item)
        if worker_fails:
            raise OutOfPaperError

    def open_when_leaving() -> None:
        until_blocked(MAIN, "__exit__")
        gate.open()

    def fill() -> None:
        with Stage("work", work, 100) as stage:
            for item in range(5):
                stage.put(item, 1)
            assert gate.arrived.wait(LIMIT_S)
            raise KeyError("block")

    with beside(open_when_leaving), pytest.raises(KeyError, match="block"):
        fill()
    assert done == [0]


@pytest.mark.parametrize("last_is_left_first", [False, True])
def test_block_that_fails_while_a_stage_waits_for_the_next(last_is_left_first: bool) -> None:
    gate, refused, encoders = Gate(), threading.Event(), list[threading.Thread]()
    writer = Stage[int]("write", gate.wait, 1)

    def encode(item: int) -> None:
        encoders.append(threading.current_thread())
        try:
            writer.put(item, 1)
        except RuntimeError:
            refused.set()
            raise

    encoder = Stage("encode", encode, 100)
    order = (encoder, writer) if last_is_left_first else (writer, encoder)

    def open_when_leaving() -> None:
        until_blocked(MAIN, "__exit__")
        if last_is_left_first:  # the put that is blocked need not wait for the item in work
            assert refused.wait(LIMIT_S)
        gate.open()

    def fill() -> None:
        with order[0], order[1]:
            for item in range(9):
                encoder.put(item, 1)
            assert gate.arrived.wait(LIMIT_S)
            until_blocked(encoders[0], "put")
            raise KeyError("block")

    with beside(open_when_leaving), pytest.raises(KeyError, match="block"):
        fill()
    assert refused.is_set() is last_is_left_first


def test_interrupt_while_put_is_blocked() -> None:
    gate, done = Gate(), list[int]()

    def work(item: int) -> None:
        gate.wait()
        done.append(item)

    def interrupt() -> None:
        interrupt_main_when_blocked("put")
        until_blocked(MAIN, "__exit__")
        gate.open()

    def fill() -> None:
        with Stage("work", work, 2) as stage:
            for item in itertools.count():
                stage.put(item, 1)

    with beside(interrupt), pytest.raises(KeyboardInterrupt):
        fill()
    assert done == [0]


def test_interrupt_while_close_drains() -> None:
    gate, done = Gate(), list[int]()

    def work(item: int) -> None:
        gate.wait()
        done.append(item)

    def interrupt() -> None:
        interrupt_main_when_blocked("drain")
        until_blocked(MAIN, "_stop")
        gate.open()

    def fill() -> None:
        with Stage("work", work, 9) as stage:
            for item in range(5):
                stage.put(item, 1)
            assert gate.arrived.wait(LIMIT_S)

    with beside(interrupt), pytest.raises(KeyboardInterrupt):
        fill()
    assert done == [0]


def test_close_finishes_everything_and_refuses_more() -> None:
    done = list[int]()
    stage = Stage("work", done.append, 3)
    for item in range(50):
        stage.put(item, 1)
    stage.close()
    assert done == list(range(50))
    stage.close()
    stage.drain()
    with pytest.raises(RuntimeError, match="'work' is closed"):
        stage.put(0, 1)


def test_stage_lets_go_of_an_item_before_its_bytes_count_as_free() -> None:
    counted = list[int]()
    with Stage[Gate]("work", Gate.wait, 9) as stage:
        item = Gate()
        item.open()
        weakref.finalize(item, lambda: counted.append(stage.queued_bytes))
        stage.put(item, 5)
        del item
    assert counted == [5]


def test_waiting_stage_keeps_no_item() -> None:
    with Stage[Gate]("work", Gate.wait, 1) as stage:
        item = Gate()
        item.open()
        stage.put(item, 1)
        stage.drain()
        alive = weakref.ref(item)
        del item
        assert alive() is None


@pytest.mark.parametrize("who_fails", ["worker", "block"])
def test_finalizers_of_dropped_items_may_use_the_stage(who_fails: str) -> None:
    gate, refused = Gate(), list[str]()

    def work(_item: object) -> None:
        gate.wait()
        if who_fails == "worker":
            raise OutOfPaperError

    def finalizer() -> None:
        try:
            stage.put(0, 1)
        except (OutOfPaperError, RuntimeError) as error:
            refused.append(type(error).__name__)
        gate.open()

    def fill() -> None:
        with stage:
            stage.put(0, 1)
            assert gate.arrived.wait(LIMIT_S)
            item = Gate()
            weakref.finalize(item, finalizer)
            stage.put(item, 1)
            del item
            if who_fails == "block":
                raise KeyError
            gate.open()

    stage = Stage[object]("work", work, 9)
    with pytest.raises((OutOfPaperError, KeyError)):
        fill()
    assert refused == ["OutOfPaperError" if who_fails == "worker" else "RuntimeError"]


# --- prefetch ---


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 4), st.integers(0, 30))
def test_prefetch_keeps_the_order_and_the_bound(
    sizes: list[int], threads: int, max_bytes: int
) -> None:
    lock, inside, crowds = threading.Lock(), set[int](), list[set[int]]()

    def load(item: int) -> int:
        with lock:
            inside.add(item)
            crowds.append(set(inside))
        return item

    def tasks() -> Iterator[Task[int]]:
        for item, size in enumerate(sizes):
            yield Task(size, partial(load, item))

    stats, taken = WaitStats(), list[int]()
    for result in prefetch(tasks(), threads, max_bytes, stats):
        taken.append(result)
        with lock:
            inside.discard(result)  # the consumer is done with it when it asks for the next
    assert taken == list(range(len(sizes)))
    assert (stats.items, stats.bytes) == (len(sizes), sum(sizes))
    assert 0 <= stats.waits <= stats.items
    for crowd in crowds:
        assert sum(sizes[item] for item in crowd) <= max_bytes or len(crowd) <= 2


class Loads:
    """Tasks whose loads can be held one by one; notes what was asked of it."""

    def __init__(self, sizes: Iterator[int]) -> None:
        self._sizes = sizes
        self.pulled = 0
        self.begun: dict[int, threading.Event] = {i: threading.Event() for i in range(40)}
        self.gates: dict[int, Gate] = {}
        self.errors: dict[int, Exception] = {}

    def _load(self, item: int) -> int:
        self.begun[item].set()
        if item in self.gates:
            self.gates[item].wait()
        if item in self.errors:
            raise self.errors[item]
        return item

    def __iter__(self) -> Iterator[Task[int]]:
        for item, size in enumerate(self._sizes):
            self.pulled += 1
            yield Task(size, partial(self._load, item))

    def began(self) -> list[int]:
        return [item for item, event in self.begun.items() if event.is_set()]


def test_threads_load_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def load() -> int:
        return together.wait(LIMIT_S)

    results = list(prefetch([Task(1, load)] * 6, threads=3, max_bytes=6))
    assert sorted(results) == [0, 0, 1, 1, 2, 2]


def test_prefetch_uses_its_room_and_no_more() -> None:
    loads = Loads(itertools.repeat(10))
    with contextlib.closing(prefetch(loads, threads=4, max_bytes=40)) as results:
        assert next(results) == 0
        for item in range(1, 4):
            assert loads.begun[item].wait(LIMIT_S)
        # Four inside with the one in use, and one that is known but has no room.
        assert loads.pulled == 5
        assert next(results) == 1
        assert loads.begun[4].wait(LIMIT_S)
        assert loads.pulled == 6
    assert loads.began() == [0, 1, 2, 3, 4]


def test_one_task_is_in_flight_even_above_the_bound() -> None:
    loads = Loads(itertools.repeat(99))
    with contextlib.closing(prefetch(loads, threads=4, max_bytes=10)) as results:
        assert next(results) == 0
        assert loads.begun[1].wait(LIMIT_S)  # while 0 is in use
        assert next(results) == 1
        assert loads.begun[2].wait(LIMIT_S)
    assert loads.began() == [0, 1, 2]


def test_endless_tasks_without_bytes() -> None:
    loads = Loads(itertools.repeat(0))
    loads.begun = {i: threading.Event() for i in range(5000)}
    with contextlib.closing(prefetch(loads, threads=2, max_bytes=10)) as results:
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        assert loads.pulled < 2000


def test_error_of_a_load_comes_at_its_place() -> None:
    loads = Loads(itertools.repeat(1))
    loads.gates[0] = Gate()
    loads.errors = {2: OutOfPaperError("load"), 3: OutOfPaperError("later")}
    results = prefetch(loads, threads=4, max_bytes=6)

    def open_when_failed() -> None:
        assert loads.begun[3].wait(LIMIT_S)
        loads.gates[0].open()

    with beside(open_when_failed):
        assert next(results) == 0
    assert next(results) == 1
    with pytest.raises(OutOfPaperError, match="load") as caught:
        next(results)
    assert caught.value is loads.errors[2]
    assert functions(caught.value)[-1] == "_load"
    assert list(results) == []


def test_error_of_the_tasks_comes_after_all_earlier_results() -> None:
    def tasks() -> Iterator[Task[int]]:
        for item in range(3):
            yield Task(1, partial(int, item))
        raise OutOfPaperError

    results, stats = list[int](), WaitStats()
    with pytest.raises(OutOfPaperError) as caught:
        results.extend(prefetch(tasks(), threads=2, max_bytes=99, stats=stats))
    assert functions(caught.value)[-1] == "tasks"
    assert stats.items == 3


def test_close_cancels_what_has_not_begun_and_waits_for_what_has() -> None:
    loads = Loads(itertools.repeat(1))
    loads.gates = {1: Gate()}
    results = prefetch(loads, threads=1, max_bytes=10)
    assert next(results) == 0
    assert loads.begun[1].wait(LIMIT_S)

    def open_when_closing() -> None:
        until_blocked(MAIN, "shutdown")
        loads.gates[1].open()

    with beside(open_when_closing):
        results.close()
    assert loads.began() == [0, 1]
    assert list(results) == []


def test_break_joins() -> None:
    before = threading.active_count()
    for _ in prefetch(Loads(itertools.repeat(1)), threads=3, max_bytes=10):
        break
    assert threading.active_count() == before


def test_error_of_the_consumer_joins() -> None:
    def consume() -> None:
        loads = Loads(itertools.repeat(1))
        with contextlib.closing(prefetch(loads, threads=3, max_bytes=10)) as results:
            for _ in results:
                raise OutOfPaperError

    before = threading.active_count()
    with pytest.raises(OutOfPaperError):
        consume()
    assert threading.active_count() == before


def test_interrupt_while_waiting_for_a_result() -> None:
    loads = Loads(itertools.repeat(1))
    loads.gates[0] = Gate()

    def interrupt() -> None:
        interrupt_main_when_blocked("exception")
        until_blocked(MAIN, "shutdown")
        loads.gates[0].open()

    results = prefetch(loads, threads=1, max_bytes=10)
    with beside(interrupt), pytest.raises(KeyboardInterrupt):
        next(results)
    assert loads.began() == [0]


def test_waits_are_counted_when_the_consumer_really_waits() -> None:
    loads, stats = Loads(itertools.repeat(5)), WaitStats()
    loads.gates[0] = Gate()

    def open_when_waiting() -> None:
        until_blocked(MAIN, "exception")
        loads.gates[0].open()

    with contextlib.closing(prefetch(loads, threads=1, max_bytes=100, stats=stats)) as results:
        with beside(open_when_waiting):
            next(results)
        assert (stats.items, stats.waits, stats.bytes) == (1, 1, 5)
        assert stats.wait_s > 0
        waited_s = stats.wait_s
        assert loads.begun[2].wait(LIMIT_S)  # so 1 is ready: there is one thread
        next(results)
        assert (stats.items, stats.waits, stats.wait_s) == (2, 1, waited_s)


def test_prefetch_does_not_keep_the_result_in_use() -> None:
    with contextlib.closing(prefetch([Task(1, Gate)] * 3, 1, 9)) as results:
        result = next(results)
        alive = weakref.ref(result)
        del result
        assert alive() is None


def test_prefetch_closed_by_garbage_collection_in_its_own_thread() -> None:
    go, gone = threading.Event(), threading.Event()

    def load() -> None:
        assert go.wait(LIMIT_S)
        gc.collect()

    def drop() -> weakref.ref[object]:
        results = prefetch(itertools.chain([Task(1, lambda: None)], [Task(1, load)] * 5), 1, 10)
        next(results)
        cycle: list[object] = [results]
        cycle.append(cycle)
        weakref.finalize(results, gone.set)
        return weakref.ref(results)

    gc.disable()
    try:
        alive = drop()
        threads = [t for t in threading.enumerate() if t.name.startswith("prefetch")]
        assert alive() is not None
        go.set()
        assert gone.wait(LIMIT_S)
        for thread in threads:
            thread.join(LIMIT_S)
    finally:
        gc.enable()


# --- BufferPool ---

Derive = Callable[[NDArray[np.uint8]], object]


def as_bf16(array: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(array[64:256]).view(torch.bfloat16)[3:]


DERIVED: dict[str, Derive] = {
    "slice": lambda a: a[3:77][1:],
    "reshape": lambda a: a[:256].reshape(16, 16).T,
    "ravel": lambda a: a[:256].reshape(16, 16).ravel(),
    "dtype": lambda a: a[64:128].view(np.float32)[2:],
    "broadcast": lambda a: np.broadcast_to(a[:1], (4,)),
    "strided": lambda a: np.lib.stride_tricks.as_strided(a[8:], (4,), (2,)),
    "subclass": lambda a: a[:64].view(np.recarray),
    "frombuffer": lambda a: np.frombuffer(a[8:], np.uint8),
    "memoryview": lambda a: a[8:].data,
    "iterator": lambda a: a[8:].flat,
    "torch": as_bf16,
    "torch numpy": lambda a: as_bf16(a).view(torch.int16).numpy()[1:],
    "torch detach": lambda a: as_bf16(a).detach().reshape(-1, 3),
    "torch storage": lambda a: as_bf16(a).untyped_storage(),
    "torch frombuffer": lambda a: torch.frombuffer(a[64:].data, dtype=torch.float32),
    "dlpack": lambda a: torch.utils.dlpack.from_dlpack(a[8:])[1:],
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_memory_stays_leased_as_long_as_anything_reaches_it(derive: Derive) -> None:
    pool = BufferPool(1 << 20)
    derived: list[object] = [derive(pool.lease(1000))]
    assert pool.leased_bytes == 1024
    other = pool.lease(1000)
    assert pool.reuses == 0
    del other
    assert (pool.leased_bytes, pool.free_bytes) == (1024, 1024)
    derived.clear()
    assert (pool.leased_bytes, pool.free_bytes) == (0, 2048)


def test_lease_is_writable_aligned_and_as_long_as_asked() -> None:
    pool = BufferPool(1 << 20)
    leased = [pool.lease(num_bytes) for num_bytes in (0, 1, 63, 64, 65, 4097, 100_001)]
    for array, num_bytes in zip(leased, (0, 1, 63, 64, 65, 4097, 100_001), strict=True):
        assert array.shape == (num_bytes,)
        assert array.dtype == np.uint8
        assert array.ctypes.data % 64 == 0 or not num_bytes
        array[:] = 7
    with pytest.raises(ValueError, match="-1"):
        pool.lease(-1)
    with pytest.raises(ValueError, match="negative"):
        BufferPool(-1)


@given(st.integers(1, 1 << 40))
def test_at_most_an_eighth_is_lost_by_rounding(num_bytes: int) -> None:
    from data.pool import _round_up

    size = _round_up(num_bytes, 8)
    assert num_bytes <= size < num_bytes + max(64, num_bytes / 8)
    assert _round_up(size, 8) == size
    assert size % 64 == 0
    whole = _round_up(num_bytes, 1)
    assert whole == max(64, 1 << (num_bytes - 1).bit_length())


def test_similar_sizes_share_memory() -> None:
    pool = BufferPool(1 << 20)
    address = pool.lease(1000).ctypes.data
    assert pool.lease(1024).ctypes.data == address
    assert pool.lease(990).ctypes.data == address
    assert pool.reuses == 2
    pool.lease(4000)
    assert pool.reuses == 2


def test_what_came_back_first_is_freed_first() -> None:
    pool = BufferPool(4096)
    old, new = pool.lease(1024), pool.lease(2048)
    del old, new
    assert pool.free_bytes == 3072
    pool.lease(1500)  # 1536
    assert pool.free_bytes == 2048 + 1536
    pool.lease(8192)  # more than may ever lie unused: must not push out the others
    assert pool.free_bytes == 2048 + 1536
    assert pool.leased_bytes == 0
    assert BufferPool(0).lease(100).shape == (100,)


# Each step leases so many bytes, or lets go of one of the arrays that are held.
steps = st.lists(st.one_of(st.integers(1, 5000), st.just(0)), max_size=60)


@given(steps, st.integers(0, 8192), st.randoms(use_true_random=False))
def test_leased_memory_is_never_shared(sizes: list[int], limit: int, random: Random) -> None:
    pool = BufferPool(limit)
    held: list[tuple[int, NDArray[np.uint8] | torch.Tensor]] = []
    for mark, num_bytes in enumerate(sizes):
        if num_bytes:
            array = pool.lease(num_bytes)
            array[:] = mark
            view = array[num_bytes // 3 :]
            held.append((mark, torch.from_numpy(view) if mark % 2 else view))
            del array, view
        elif held:
            held.pop(random.randrange(len(held)))
        assert all(bool((array == mark).all()) for mark, array in held)
        assert pool.free_bytes <= limit
        assert pool.leased_bytes >= sum(len(array) for _, array in held)
    held.clear()
    assert pool.leased_bytes == 0


def test_threads_never_share_leased_memory() -> None:
    pool, start = BufferPool(20_000), threading.Barrier(4)
    wrong, passed_on = list[int](), list[torch.Tensor]()

    def hammer(mark: int) -> None:
        sizes = np.random.default_rng(mark).integers(1, 6000, 400)
        held: list[torch.Tensor] = []
        start.wait(LIMIT_S)
        for num_bytes in sizes:
            tensor = torch.from_numpy(pool.lease(int(num_bytes)))
            held.append(tensor.fill_(mark))
            if len(held) > 3:
                passed_on.append(held.pop(0))  # dies in whichever thread clears the list
                passed_on.clear()
            wrong.extend(mark for tensor in held if not bool((tensor == mark).all()))

    threads = [threading.Thread(target=hammer, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []
    passed_on.clear()
    assert pool.leased_bytes == 0
    assert pool.free_bytes <= 20_000
    assert pool.reuses > 0


@pytest.mark.parametrize("during", ["lease", "give back"])
def test_arrays_that_die_in_the_middle_of_a_call_to_the_pool(during: str) -> None:
    sizes = itertools.cycle([3000, 700, 90, 5000])

    class Cycle:
        def __init__(self, pool: BufferPool) -> None:
            self.pool, self.array, self.itself = pool, pool.lease(1000), self

        def __del__(self) -> None:
            self.pool.lease(next(sizes))

    def collect_after(num_allocations: int) -> None:
        gc.set_threshold(gc.get_count()[0] + num_allocations)
        gc.enable()

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what torch left behind, or each collection takes 0.2 s
    try:
        for delay in range(40):  # a collection at each allocation in turn
            pool = BufferPool(2048)
            gc.collect()
            gc.disable()
            for _ in range(3):
                Cycle(pool)
            held = []
            if during == "lease":
                collect_after(delay)
                held += [pool.lease(num_bytes) for num_bytes in (500, 1000, 1000, 2000)]
            else:
                held += [pool.lease(num_bytes) for num_bytes in (500, 1000, 1000, 2000)]
                collect_after(delay)
            held.clear()
            gc.set_threshold(*thresholds)
            gc.collect()
            assert pool.leased_bytes == 0
            assert 0 < pool.free_bytes <= 2048
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        gc.enable()


def test_memory_is_leased_while_a_finalizer_can_still_read_it() -> None:
    pool, seen = BufferPool(1 << 20), list[tuple[int, int]]()

    class Cycle:
        def __init__(self) -> None:
            self.array = pool.lease(1000)
            self.array[:] = 5
            self.itself = self

        def __del__(self) -> None:
            pool.lease(1000)[:] = 6
            seen.append((int(self.array.min()), int(self.array.max())))

    Cycle()
    gc.collect()
    assert seen == [(5, 5)]
    assert pool.leased_bytes == 0


def test_statistics_may_be_read_while_sizes_are_added() -> None:
    pools, stop, errors = [BufferPool(0)], threading.Event(), list[RuntimeError]()

    def read() -> None:
        while not stop.is_set():
            try:
                assert pools[-1].free_bytes + pools[-1].leased_bytes >= 0
            except RuntimeError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with beside(read):
            for _ in range(60):
                pools.append(BufferPool(1 << 20))
                for num_bytes in range(0, 6400, 64):
                    pools[-1].lease(num_bytes)
            stop.set()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_pool_may_go_before_its_arrays() -> None:
    pool = BufferPool(1 << 20)
    gone = weakref.ref(pool)
    array = pool.lease(100)
    array[:] = 3
    del pool
    assert bool((array == 3).all())
    del array
    assert gone() is None


def child_can_lease(pool: BufferPool, held: NDArray[np.uint8]) -> bool:
    """In a forked child, which must be able to end whatever happens."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(5)
    for num_bytes in (100, 1000, 5000):
        arrays = [pool.lease(num_bytes) for _ in range(3)]
        for mark, array in enumerate(arrays):
            array[:] = mark
        if any((array != mark).any() for mark, array in enumerate(arrays)):
            return False
    return bool((held == 9).all())


def test_pool_works_in_a_forked_child_whatever_other_threads_did() -> None:
    pool, stop = BufferPool(20_000), threading.Event()
    held = pool.lease(1000)
    held[:] = 9

    def hammer() -> None:
        for num_bytes in itertools.cycle((100, 1000, 5000)):
            pool.lease(num_bytes)[:] = 1
            if stop.is_set():
                return

    codes = []
    with beside(hammer):
        for _ in range(5):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads, 3.12
                child = os.fork()
            if child == 0:
                try:
                    os._exit(0 if child_can_lease(pool, held) else 3)
                finally:
                    os._exit(4)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
    assert codes == [0] * 5


def test_pinned_is_ordinary_memory_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a device")
    assert not torch.from_numpy(BufferPool(0, pinned=True).lease(100)).is_pinned()


@pytest.mark.gpu
def test_pinned_memory_is_reused_and_not_in_a_child() -> None:
    pool = BufferPool(1 << 20, pinned=True)
    array = pool.lease(1500)
    assert torch.from_numpy(array)[3:].is_pinned()
    assert pool.leased_bytes == 2048
    torch.from_numpy(array).to("cuda")
    del array
    held = pool.lease(2000)
    assert pool.reuses == 1
    held[:] = 9
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if len(pool.lease(2000)) == 2000 and pool.reuses == 1 else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
