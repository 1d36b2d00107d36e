"""Leases: one holder, dead ones found without comparing clocks, nothing lost by a race."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.cache import claims as module
from data.cache.claims import CLAIMS, Claims, claim_key, part_work
from data.cache.store import PARTIAL, LocalStore
from tests.support.caches import ignore_fsync
from tests.support.processes import ROOT, environment

WORK = part_work(7)
TIMEOUT_S = 100.0


class Clock:
    """The observer's own clock, which the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    ignore_fsync(monkeypatch)
    return LocalStore(tmp_path)


def claims_of(store: LocalStore, timeout_s: float = TIMEOUT_S) -> Claims:
    return Claims(store, timeout_s)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def content_of_another(**changes: Any) -> bytes:
    """A claim of a process on a machine that cannot be seen from here."""
    value = {"token": "t", "host": "far", "machine": "elsewhere", "pid": 1, "started": "5"}
    return json.dumps({**value, "beat": 1, **changes}).encode()


def test_one_takes_and_others_wait_until_it_is_given_back(store: LocalStore) -> None:
    mine, other = claims_of(store), claims_of(store)
    assert mine.take(WORK)
    assert mine.is_held(WORK)
    assert not other.take(WORK)
    assert not mine.take(WORK)  # not even twice by itself
    assert not other.is_held(WORK)
    assert mine.holder(WORK) == other.holder(WORK)
    assert other.holder(WORK).endswith(f":{os.getpid()}")
    assert other.take("finish")  # each piece of work for itself
    mine.release(WORK)
    assert not mine.is_held(WORK)
    assert mine.holder(WORK) == "nobody"
    assert other.take(WORK)


def test_release_of_what_is_not_held_changes_nothing(store: LocalStore) -> None:
    mine, other = claims_of(store), claims_of(store)
    mine.release(WORK)
    assert mine.take(WORK)
    other.release(WORK)
    assert mine.is_held(WORK)


def test_end_of_the_block_gives_everything_back(store: LocalStore) -> None:
    def fail() -> None:
        with claims_of(store) as mine:
            assert mine.take(WORK)
            assert mine.take("finish")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert store.list(CLAIMS) == {}


def in_process(store: LocalStore, *, reap: bool) -> subprocess.Popen[bytes]:
    """A process that takes the work and is killed."""
    code = (
        "import sys, time; from pathlib import Path; from data.cache.claims import Claims;"
        "from data.cache.store import LocalStore;"
        f"print(Claims(LocalStore(Path(sys.argv[1])), 600.0).take({WORK!r}), flush=True);"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(store.folder)],
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"True\n"
    mine = claims_of(store)
    assert not mine.take(WORK)
    assert mine.holder(WORK).endswith(f":{process.pid}")
    process.send_signal(signal.SIGKILL)
    if reap:
        process.wait()
    else:  # a zombie: its parent has not looked after it
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
    return process


@pytest.mark.parametrize("reap", [True, False])
def test_claim_of_a_killed_process_of_this_machine_is_free_at_once(
    store: LocalStore, clock: Clock, reap: bool
) -> None:
    process = in_process(store, reap=reap)
    mine = claims_of(store)
    assert mine.take(WORK)  # the clock stands still
    assert mine.is_held(WORK)
    process.wait()
    assert clock.now == 1000.0


def test_process_id_that_another_process_has_now_is_not_its_holder(
    store: LocalStore, clock: Clock
) -> None:
    mine, other = claims_of(store), claims_of(store)
    assert mine.take(WORK)
    value = json.loads(store.read(claim_key(WORK)))
    store.write(claim_key(WORK), json.dumps({**value, "started": "1"}).encode())
    assert other.take(WORK)
    assert not mine.is_held(WORK)
    assert clock.now == 1000.0


def test_silent_claim_from_elsewhere_dies_by_the_observers_clock(
    store: LocalStore, clock: Clock
) -> None:
    store.create(claim_key(WORK), content_of_another())
    mine = claims_of(store)
    clock.now += 10 * TIMEOUT_S  # nobody had looked
    assert not mine.take(WORK)
    clock.now += TIMEOUT_S
    assert not mine.take(WORK)
    clock.now += 0.01
    assert mine.take(WORK)
    assert mine.is_held(WORK)
    assert json.loads(store.read(claim_key(WORK)))["token"] == mine.token


def test_every_change_of_a_claim_starts_the_wait_again(store: LocalStore, clock: Clock) -> None:
    key, mine = claim_key(WORK), claims_of(store)
    store.create(key, content_of_another())
    for beat in range(2, 6):
        assert not mine.take(WORK)
        clock.now += 0.9 * TIMEOUT_S
        assert not mine.take(WORK)
        assert store.swap(key, store.read(key), content_of_another(beat=beat))
        clock.now += 0.9 * TIMEOUT_S
    assert not mine.take(WORK)
    clock.now += 1.1 * TIMEOUT_S
    assert mine.take(WORK)


def test_claims_are_observed_one_by_one(store: LocalStore, clock: Clock) -> None:
    mine, other = claims_of(store), part_work(8)
    store.create(claim_key(WORK), content_of_another())
    assert not mine.take(WORK)
    clock.now += 1.1 * TIMEOUT_S
    store.create(claim_key(other), content_of_another())
    assert not mine.take(other)
    assert mine.take(WORK)
    assert not mine.take(other)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'"text"',
        b'{"machine": 1}',
        content_of_another()[:40],
    ],
)
def test_torn_claim_dies_like_any_other_by_not_changing(
    store: LocalStore, clock: Clock, content: bytes
) -> None:
    store.create(claim_key(WORK), content)
    mine = claims_of(store)
    assert not mine.take(WORK)
    assert mine.holder(WORK) == "nobody"
    clock.now += 1.1 * TIMEOUT_S
    assert mine.take(WORK)


def test_claim_of_this_machine_without_a_start_time_is_no_claim(store: LocalStore) -> None:
    mine, other = claims_of(store), claims_of(store)
    assert mine.take(WORK)
    value = json.loads(store.read(claim_key(WORK)))
    del value["started"]
    store.write(claim_key(WORK), json.dumps(value).encode())
    assert not other.take(WORK)


def test_heartbeat_shows_life(store: LocalStore, clock: Clock) -> None:
    other = claims_of(store)
    with claims_of(store, timeout_s=0.06) as mine:
        assert mine.take(WORK)
        for _ in range(3):
            assert not other.take(WORK)
            before = store.read(claim_key(WORK))
            wait_until(lambda b=before: store.read(claim_key(WORK)) != b)  # type: ignore[misc]
            clock.now += 2 * TIMEOUT_S
        assert mine.is_held(WORK)
    assert not store.exists(claim_key(WORK))


def test_heartbeat_leaves_a_claim_alone_that_went_to_another(store: LocalStore) -> None:
    beats: list[bool] = []

    class Watched(LocalStore):
        def swap(self, key: str, old: bytes, new: bytes) -> bool:
            beats.append(super().swap(key, old, new))
            return beats[-1]

    with Claims(Watched(store.folder), timeout_s=0.06) as mine:
        assert mine.take(WORK)
        store.write(claim_key(WORK), content_of_another())
        wait_until(lambda: beats[-2:] == [False, False])
        assert not mine.is_held(WORK)
    assert store.read(claim_key(WORK)) == content_of_another()


def test_heartbeat_goes_on_after_errors_of_the_storage(store: LocalStore) -> None:
    class Flaky(LocalStore):
        failures = 3

        def swap(self, key: str, old: bytes, new: bytes) -> bool:
            if self.failures:
                self.failures -= 1
                raise OSError(28, "No space left on device")
            return super().swap(key, old, new)

    flaky = Flaky(store.folder)
    with Claims(flaky, timeout_s=0.06) as mine:
        assert mine.take(WORK)
        before = store.read(claim_key(WORK))
        wait_until(lambda: store.read(claim_key(WORK)) != before)
        assert flaky.failures == 0
        assert mine.is_held(WORK)


def test_claim_that_is_given_back_while_it_is_looked_at_is_free_next_time(
    store: LocalStore,
) -> None:
    class Late(LocalStore):
        def read(self, key: str) -> bytes:
            other.release(WORK)
            return super().read(key)

    other = claims_of(store)
    assert other.take(WORK)
    mine = Claims(Late(store.folder), TIMEOUT_S)
    assert not mine.take(WORK)
    assert mine.take(WORK)


def test_only_one_of_many_takes_over_from_the_dead(store: LocalStore) -> None:
    for round_number in range(20):
        work = part_work(round_number)
        ours = {"machine": module._machine(), "pid": os.getpid(), "started": "1"}
        store.create(claim_key(work), content_of_another(**ours))
        crowd = [claims_of(store) for _ in range(6)]
        start = threading.Barrier(len(crowd))
        won: list[Claims] = []

        def run(mine: Claims, work: str = work) -> None:
            start.wait()  # noqa: B023 - joined below
            if mine.take(work):
                won.append(mine)  # noqa: B023

        threads = [threading.Thread(target=run, args=(mine,)) for mine in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [mine.is_held(work) for mine in won] == [True]
        assert sum(mine.is_held(work) for mine in crowd) == 1


def test_claim_is_taken_though_leftovers_are_swept_away_meanwhile(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, partials = os.link, []

    def swept_first(source: Path, to: Path) -> None:
        partials.append(source)
        if len(partials) == 1:
            store.remove_partials()  # another builder ends the build
        link(source, to)

    monkeypatch.setattr(os, "link", swept_first)
    assert claims_of(store).take(WORK)
    assert len(set(partials)) == 2
    assert not list(store.folder.rglob(f"*{PARTIAL}"))


def test_nodes_with_equal_process_ids_do_not_write_the_same_temporary_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, other = os.link, claims_of(store)
    taken: list[bool] = []

    def interrupted(source: Path, to: Path) -> None:
        if not taken:
            taken.append(False)
            taken.append(other.take(WORK))  # its container has the same process id
        link(source, to)

    monkeypatch.setattr(os, "link", interrupted)
    mine = claims_of(store)
    assert not mine.take(WORK)
    assert taken == [False, True]
    assert other.is_held(WORK)
