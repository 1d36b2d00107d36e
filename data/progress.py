"""One progress line for long work: count, rate, time left; plain log lines when not a terminal."""

import logging
import os
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)
_LOG_EVERY_S = 15.0


def is_main_rank() -> bool:
    """Whether this process is the one of its launch that talks."""
    return os.environ.get("RANK", "0") == "0"


class Meter:
    """Counts units of work, e.g. ``with Meter("cache", 100, "rows") as meter: meter.add(3)``.

    Rates are of this process only, so that resumed work does not look fast.
    """

    def __init__(self, title: str, total: int, unit: str, done: int = 0) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self._resumed_at = done, done
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or not is_main_rank(),
        )
        self._task = self._bar.add_task(title, total=total, completed=done, note="")
        self._start = self._logged = time.monotonic()

    def __enter__(self) -> "Meter":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if kind is None:
            log.info("%s: %s", self.title, self._line(""))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def add(self, count: int, note: str = "") -> None:
        """Records finished units; ``note`` is shown beside the bar (rates, loss, ...)."""
        self.done += count
        self._bar.update(self._task, completed=self.done, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._logged > _LOG_EVERY_S:
            self._logged = now
            log.info("%s: %s", self.title, self._line(note))

    def _line(self, note: str) -> str:
        elapsed = self.elapsed_s
        rate = (self.done - self._resumed_at) / elapsed if elapsed else 0.0
        left = (self.total - self.done) / rate if rate else float("nan")
        eta = f", ETA {left:.0f} s" if self.done < self.total and rate else ""
        note = f", {note}" if note else ""
        return (
            f"{self.done}/{self.total} {self.unit} in {elapsed:.0f} s "
            f"({rate:.2f} {self.unit}/s{note}{eta})"
        )
