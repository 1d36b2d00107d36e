"""The books of a regeneration: rows on disk, requests without an answer beside them, counts."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from data.config import Truncated
from data.corpus import read_jsonl
from data.errors import DataError
from data.files import write_atomic
from data.generate.base import Answer, Failure, FailureClass, Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """What is kept in memory of a row on disk."""

    completion: str
    finish_reason: str


class Ledger:
    """The file of rows, opened for appending, and its quarantine. A context manager.

    Rows are appended whole and synced group by group, so a kill costs no row that was recorded; a
    torn last line is removed on opening. The quarantine lists every request without a row; an
    entry stays until its request is answered. Only entries of class ``length`` count as settled,
    and only while truncated answers are dropped: the same question gets the same long answer.

    Attributes:
        rows: key -> row on disk.
        written: rows of this run.
        new_tokens: completion tokens of this run's rows.
    """

    def __init__(self, path: Path, truncated: Truncated) -> None:
        self.path = path
        self.rows: dict[str, Known] = {}
        self.written = self.new_tokens = 0
        self._drop = truncated is Truncated.drop
        self._quarantined: dict[str, dict[str, Any]] = {}
        self._new_failures: Counter[str] = Counter()
        cut_torn_line(path)
        for value in _known_rows(path):
            self._take_in(value)
        quarantine = quarantine_path(path)
        if quarantine.exists():
            entries = (value for _, value in read_jsonl(quarantine, skip_torn=True))
            self._quarantined = {e["key"]: e for e in entries if "key" in e and "error" in e}
        self._compact()

    def __enter__(self) -> "Ledger":
        self._file = self.path.open("a", encoding="utf-8")
        self._failed = quarantine_path(self.path).open("a", encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._failed.close()
        self._compact()

    def __contains__(self, key: object) -> bool:
        """Whether a key needs no answer: it has a row, or its answer was dropped."""
        if key in self.rows:
            return True
        entry = self._quarantined.get(str(key), {})
        return self._drop and entry.get("error") == FailureClass.length.value

    @property
    def failures(self) -> dict[str, int]:
        """Requests without a row, by error class: everything that the quarantine lists."""
        return dict(Counter(entry["error"] for entry in self._quarantined.values()))

    @property
    def new_failures(self) -> dict[str, int]:
        """Requests of this run that got no row, by error class."""
        return dict(self._new_failures)

    def record(self, outcomes: Sequence[Outcome]) -> set[str]:
        """Appends a group, synced to disk. Returns the keys of which there was news: what is done
        already is left as it is.
        """
        # A prompt that occurs twice has one answer.
        fresh = {o.job.key: o for o in outcomes if o.job.key not in self}
        rows, failures = [], []
        for outcome in fresh.values():
            if isinstance(outcome, Answer) and self._drop and outcome.finish_reason == "length":
                text = f"cut at {len(outcome.completion_ids)} tokens and dropped"
                outcome = Failure(outcome.job, FailureClass.length, text)
            if isinstance(outcome, Answer):
                rows.append(_row(outcome))
            else:
                failures.append(_entry(outcome))
        _append(self._file, rows)
        _append(self._failed, failures)
        for row in rows:
            self._take_in(row)
            self.new_tokens += len(_ids(row["completion_ids"]))
        self.written += len(rows)
        self._quarantined |= {entry["key"]: entry for entry in failures}
        self._new_failures.update(entry["error"] for entry in failures)
        return set(fresh)

    def _take_in(self, row: dict[str, object]) -> None:
        known = Known(str(row["completion"]), str(row["finish_reason"]))
        self.rows[str(row["key"])] = known

    def _compact(self) -> None:
        """Takes what has been answered since out of the quarantine; an empty one disappears."""
        for key in self._quarantined.keys() & self.rows.keys():
            del self._quarantined[key]
        path = quarantine_path(self.path)
        if self._quarantined:
            lines = (json.dumps(entry) + "\n" for entry in self._quarantined.values())
            write_atomic(path, "".join(lines))
        else:
            path.unlink(missing_ok=True)


def quarantine_path(rows: Path) -> Path:
    """Where the requests without an answer are listed: beside the file of rows. It carries that
    file's name because `dspark cache` writes a quarantine.jsonl of its own into the same folder.
    """
    return rows.with_name(f"{rows.stem}.quarantine.jsonl")


def cut_torn_line(path: Path) -> None:
    """Removes what a killed writer left behind the last complete line."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        log.warning("%s: removed a torn last line of %d bytes", path, len(content) - end)
        os.truncate(path, end)


def _known_rows(path: Path) -> Iterator[dict[str, object]]:
    if not path.exists():
        return
    for source, value in read_jsonl(path):
        if not {"key", "completion", "completion_ids", "finish_reason"} <= value.keys():
            raise DataError(source, "not a regenerated row", "give another run.name")
        yield value


def _row(answer: Answer) -> dict[str, object]:
    request = answer.job.request
    row: dict[str, object] = {
        "key": answer.job.key,
        "class": request.prompt.class_name,
        "language": request.prompt.language,
        "source": request.prompt.source,
        "turn": request.turn,
        "sample": request.sample,
        "prompt": request.prompt.turns[request.turn],
        "completion": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_ids": list(answer.job.context),
        "completion_ids": answer.completion_ids,
    }
    if answer.reasoning is not None:
        row["reasoning"] = answer.reasoning
    return row


def _entry(failure: Failure) -> dict[str, Any]:
    return {
        "source": failure.job.request.prompt.source,
        "turn": failure.job.request.turn,
        "key": failure.job.key,
        "error": failure.error.value,
        "message": failure.message,
    }


def _append(file: TextIO, records: Iterable[object]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    if lines:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _ids(value: object) -> list[int]:
    return value if isinstance(value, list) else []
