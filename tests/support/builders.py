"""Builders of caches in processes of their own, forked from a warm one: a test can kill, stop and
start a hundred of them in seconds. `Builders` is the tests' side; `main` is the server that forks.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.batch import Row
from data.cache import build as build_module
from data.cache.build import build_cache
from data.cache.repair import mend_cache
from data.cache.store import PARTIAL, LocalStore
from data.config import CacheConfig
from data.errors import UserError
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.processes import ROOT, environment
from tests.support.tiny import random_rows, tiny_target

PATIENCE_S = 120.0
# Many small parts, and little else that takes time.
MANY_PARTS = {"part_bytes": 1 << 16, "chunk_bytes": 1 << 13, "batch_tokens": 128}
QUICK = {"fidelity_tokens": 16, "self_check_tokens": 1}


def many_rows(count: int, seed: int = 0) -> list[Row]:
    """Random rows of 3 to 48 tokens."""
    lengths = np.random.default_rng(seed).integers((1, 2), (20, 30), (count, 2))
    return random_rows([(int(a), int(b)) for a, b in lengths], seed=seed)


def quick_config(**options: Any) -> CacheConfig:
    """Many small parts, a short preparation."""
    return CacheConfig(**{**MANY_PARTS, **QUICK, **options})


@dataclass(frozen=True)
class Order:
    """What a builder is to do, and what is to befall it.

    Attributes:
        rows: (count, seed) of `many_rows`, joined.
        options: of `quick_config`.
        tap_layers: of another target.
        strikes_at: number of the change to the store (a link, a rename, a removal) before which
            ``signal`` strikes; -1 for none. Between any two changes lies one such moment.
        strikes_on: instead, the start of a change's name, e.g. "link commits/": the first one.
        strikes_in: instead, number of the pass of the target.
        signal: SIGKILL or SIGSTOP, which the builder sends to itself.
        delay_s: how much later it strikes, wherever the builder is then.
        mend: whether damage is mended before.
        pass_s: seconds that every pass of the target takes longer.
    """

    rows: Sequence[tuple[int, int]]
    options: dict[str, Any] = field(default_factory=dict)
    tap_layers: Sequence[int] | None = None
    strikes_at: int = -1
    strikes_on: str = ""
    strikes_in: int = -1
    signal: int = signal.SIGKILL
    delay_s: float = 0.0
    mend: bool = False
    pass_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a builder ended.

    Attributes:
        status: exit status; minus the signal that ended it.
        built: parts that this process added.
        parts: of the finished cache.
        error: type and text of its error; empty when there was none.
        changes: to the store, in order.
    """

    status: int
    built: int = 0
    parts: int = 0
    error: str = ""
    changes: tuple[str, ...] = ()


class Builder:
    """A builder that runs, or has ended."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int, result: Path) -> None:
        self.pid = pid
        self._ask, self._result = ask, result

    def send(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    @property
    def state(self) -> str:
        """The kernel's letter for what the process does: T for stopped, Z when it has ended."""
        text = Path(f"/proc/{self.pid}/stat").read_text()
        return text.rsplit(")", 1)[1].split()[0]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, while the builder lives."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline or self.state == "Z":
                raise AssertionError(f"did not happen (state {self.state}): {self._text()}")
            time.sleep(0.002)

    def wait(self, patience_s: float = PATIENCE_S) -> Outcome:
        """Waits for the end."""
        deadline = time.monotonic() + patience_s
        while (status := self._ask({"poll": self.pid})) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"a builder did not end within {patience_s} s")
            time.sleep(0.002)
        return Outcome(status, **(json.loads(self._text()) if status >= 0 else {}))

    def kill(self) -> Outcome:
        """SIGKILL."""
        self.send(signal.SIGKILL)
        return self.wait()

    def _text(self) -> str:
        return self._result.read_text() if self._result.exists() else ""


class Builders:
    """Starts builders.

    Args:
        target: folder of the target.
        results: folder for their results and output.
    """

    def __init__(self, target: Path, results: Path) -> None:
        self._results, self._started = results, 0
        with (results / "log").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.builders", str(target)],
                cwd=ROOT,
                env=environment(PYTHONPATH=str(ROOT)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def start(self, cache: Path, order: Order) -> Builder:
        """Starts one."""
        self._started += 1
        result = self._results / f"{self._started}.json"
        values = {**vars(order), "cache": str(cache), "result": str(result)}
        return Builder(self._ask, self._ask(values), result)

    def run(self, cache: Path, order: Order) -> Outcome:
        """Starts one and waits for its end."""
        return self.start(cache, order).wait()

    def close(self) -> None:
        """Ends the server, which ends all builders."""
        self._server.communicate(timeout=PATIENCE_S)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(question).encode() + b"\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise AssertionError((self._results / "log").read_text()[-3000:])
        return json.loads(answer)


@contextlib.contextmanager
def running(target: Path, results: Path) -> Iterator[Builders]:
    """A server of builders, for a block."""
    builders = Builders(target, results)
    try:
        yield builders
    finally:
        builders.close()


def main(folder: str) -> None:
    """Forks a builder for every order read from stdin, until it ends."""
    setattr(os, "fsync", lambda _: None)  # noqa: B010 - SIGKILL loses nothing that was written
    target = tiny_target(Path(folder))
    fingerprint = Fingerprint.of_target(target)
    with tempfile.TemporaryDirectory() as name:  # whatever is loaded on first use is loaded now
        build_cache(target, many_rows(2), quick_config(), Path(name), fingerprint)
    living: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        answer = _poll(living, order["poll"]) if "poll" in order else _fork(order, target, living)
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _poll(living: set[int], pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return None
    living.remove(pid)
    return os.waitstatus_to_exitcode(status)


def _fork(order: dict[str, Any], target: Target, living: set[int]) -> int:
    pid = os.fork()
    if pid:
        living.add(pid)
        return pid
    status = 1
    try:
        os.dup2(2, 1)  # stdout belongs to the server
        _build(order, target)
        status = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on in the server's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _build(order: dict[str, Any], target: Target) -> None:
    build_module._POLL_S = 0.02
    changes = _Changes(Path(order["cache"]), order)
    target.decoder.register_forward_pre_hook(changes.begin_pass)
    if order["tap_layers"] is not None:
        target.tap_layers = tuple(order["tap_layers"])
    rows = [row for count, seed in order["rows"] for row in many_rows(count, seed)]
    config, fingerprint = quick_config(**order["options"]), Fingerprint.of_target(target)
    store = LocalStore(Path(order["cache"]))
    value: dict[str, Any] = {}
    try:
        if order["mend"]:
            taps = json.dumps(list(target.tap_layers))
            mend_cache(store, rows, config, fingerprint.extended(tap_layers=taps))
        summary = build_cache(target, rows, config, store.folder, fingerprint)
        value = {"built": summary.parts_built, "parts": summary.manifest.num_parts}
    except UserError as error:
        value = {"error": f"{type(error).__name__}: {error}"}
    Path(order["result"]).write_text(json.dumps({**value, "changes": changes.names}))


class _Changes:
    """Sees every change that others can see, before it is made; strikes where it was told to."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        self.names: list[str] = []
        self._folder, self._order = folder, order
        self._struck, self._passes = False, 0
        # Held while a claim is beaten, under a lock of the whole store: a process that stops there
        # stops all others too, which is not what is tested.
        self._beating = threading.RLock()
        link, replace, unlink, swap = os.link, Path.replace, Path.unlink, LocalStore.swap

        def watched_link(source: Path, to: Path) -> None:
            self._before("link", to)
            link(source, to)

        def watched_replace(path: Path, to: Path) -> Path:
            self._before("replace", to)
            return replace(path, to)

        def watched_unlink(path: Path, missing_ok: bool = False) -> None:
            self._before("unlink", path)
            unlink(path, missing_ok)

        def watched_swap(store: LocalStore, key: str, old: bytes, new: bytes) -> bool:
            with self._beating:
                return swap(store, key, old, new)

        setattr(os, "link", watched_link)  # noqa: B010 - mypy knows that it is a function
        setattr(Path, "replace", watched_replace)  # noqa: B010
        setattr(Path, "unlink", watched_unlink)  # noqa: B010
        setattr(LocalStore, "swap", watched_swap)  # noqa: B010

    def begin_pass(self, *_: object) -> None:
        """Sees a pass of the target."""
        if self._passes == self._order["strikes_in"]:
            self._strike()
        self._passes += 1
        time.sleep(self._order["pass_s"])

    def _before(self, kind: str, path: Path) -> None:
        if not path.is_relative_to(self._folder):
            return
        key = path.relative_to(self._folder).as_posix()
        name = f"{kind} {key.split('.')[0] + PARTIAL if key.endswith(PARTIAL) else key}"
        number, on = len(self.names), self._order["strikes_on"]
        self.names.append(name)
        if not self._struck and (number == self._order["strikes_at"] or (on and on in name)):
            self._struck = True
            if self._order["delay_s"]:
                threading.Timer(self._order["delay_s"], self._strike).start()
            else:
                self._strike()

    def _strike(self) -> None:
        with self._beating:
            # To this thread, which then is not a step further when the process stops.
            signal.pthread_kill(threading.get_ident(), self._order["signal"])


if __name__ == "__main__":
    main(sys.argv[1])
