"""Who does which work (a part, the end of a build): leases in small files, for processes and
nodes that come and go.

A claim is an object that one process creates exclusively and rewrites while it lives. Nobody's
clock is compared with another's: a claim is dead when its content has not changed for
``timeout_s`` of the observer's own time, or at once when its process ran on this machine and is
gone. That two processes build one part, after a long pause of one, costs work and nothing else:
what a part holds is a function of the plan, and its commit record is created exclusively.
"""

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from data.cache.store import Store

CLAIMS = "claims/"
_BEATS_PER_TIMEOUT = 6


def claim_key(work: str) -> str:
    """Where a claim lies."""
    return f"{CLAIMS}{work}.json"


def part_work(part: int) -> str:
    """The name of a part as a piece of work."""
    return f"part-{part:08d}"


@dataclass
class Claims:
    """The claims of this process, kept alive by a thread.

    Attributes:
        token: names this process among all builders.
        timeout_s: after which a claim that does not change is dead.
    """

    store: Store
    timeout_s: float
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._beat = 0
        self._held: dict[str, bytes] = {}
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="claims", daemon=True)

    def __enter__(self) -> "Claims":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for work in list(self._held):
            self.release(work)

    def take(self, work: str) -> bool:
        """Claims work that nobody alive holds; says whether it is ours now."""
        key, mine = claim_key(work), self._content()
        try:
            self.store.create(key, mine)
        except FileExistsError:
            try:
                theirs = self.store.read(key)
            except FileNotFoundError:  # released meanwhile: it is committed, or free next time
                return False
            if not self._is_dead(work, theirs) or not self.store.swap(key, theirs, mine):
                return False
        with self._lock:
            self._held[work] = mine
        return True

    def release(self, work: str) -> None:
        """Gives work back, done or not."""
        with self._lock:
            mine = self._held.pop(work, None)
            if mine is not None and self._still_ours(work, mine):
                self.store.delete(claim_key(work))

    def is_held(self, work: str) -> bool:
        """Whether work is ours still: a process that slept too long may have lost it."""
        with self._lock:
            mine = self._held.get(work)
            return mine is not None and self._still_ours(work, mine)

    def holder(self, work: str) -> str:
        """Who holds work, for messages."""
        try:
            value = json.loads(self.store.read(claim_key(work)))
            return f"{value['host']}:{value['pid']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "nobody"

    def _still_ours(self, work: str, mine: bytes) -> bool:
        try:
            return self.store.read(claim_key(work)) == mine
        except FileNotFoundError:
            return False

    def _content(self) -> bytes:
        self._beat += 1
        value = {
            "token": self.token,
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "beat": self._beat,
        }
        return json.dumps(value).encode()

    def _is_dead(self, work: str, content: bytes) -> bool:
        try:
            value = json.loads(content)
            if value["machine"] == _machine() and value["started"] != _started(value["pid"]):
                return True
        except (ValueError, KeyError, TypeError):
            pass  # a torn claim dies like any other, by not changing
        now = time.monotonic()
        seen, since = self._seen.get(work, (None, now))
        if seen != content:
            self._seen[work] = (content, now)
            return False
        return now - since > self.timeout_s

    def _keep_alive(self) -> None:
        while not self._stop.wait(self.timeout_s / _BEATS_PER_TIMEOUT):
            with self._lock:
                for work, old in list(self._held.items()):
                    new = self._content()
                    try:
                        if self.store.swap(claim_key(work), old, new):
                            self._held[work] = new
                    except OSError:
                        continue  # the store may be back at the next beat


def _machine() -> str:
    """One name for the processes that see each other's ids: this boot, this namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {uuid.uuid4().hex}"


def _started(pid: int) -> str:
    """When a process began, in clock ticks after boot; empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rsplit(")", 1)[1].split()
    return "" if fields[0] in "ZX" else fields[19]
