"""Rows on disk instead of in memory: a corpus of any size needs a few bytes a row."""

import json
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from data.batch import Row, Segment


class RowSpool(Sequence[Row]):
    """A sequence of rows behind an unnamed temporary file, which a killed process does not leave.

    Args:
        folder: on whose disk the file lies; about five bytes a token.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the spool
        weakref.finalize(self, self._file.close)
        self._offsets = array("q")
        self._end = 0

    def append(self, row: Row) -> None:
        """Adds a row at the end."""
        segments = [[s.token_ids, s.supervised, s.role] for s in row.segments]
        fields = [segments, row.class_name, row.source, row.finish_reason, row.language]
        self._file.seek(self._end)
        self._offsets.append(self._end)
        self._end += self._file.write(json.dumps(fields, separators=(",", ":")).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """One row, read from disk; or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        self._file.seek(self._offsets[index])
        segments, *rest = json.loads(self._file.readline())
        return Row(tuple(Segment(tuple(i), on, role) for i, on, role in segments), *rest)

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            yield self[index]
