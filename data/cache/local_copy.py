"""What was fetched of remote objects, in sparse local files that are mapped into memory."""

import contextlib
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data.cache.store import PARTIAL, Source
from data.errors import ShardError

Ranges = Sequence[tuple[int, int]]
_NEAR_BYTES = 64 << 10  # a gap that costs less than another request
_BATCH_BYTES = 64 << 20  # what one `fetch` holds in memory
_OURS = re.compile("[0-9a-f]{32}")


class LocalCopy:
    """Sparse files of which at most ``limit`` bytes are allocated; whole files are forgotten, the
    least recently used first.

    Processes may share the folder; each but the first may overrun the limit by a sixteenth. A
    forgotten file stays readable, and on the disk, for as long as a source has it open.

    Args:
        folder: holds one folder an object store, named by 32 hex digits, and may hold other things,
            which are left alone. None: a temporary one that goes with this process.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="dspark-"))
            weakref.finalize(self, _remove_own, folder, os.getpid())
        self._folder, self._limit, self._step = folder, limit, max(limit // 16, 1)
        self._ahead = 0  # bytes that may come before the folder is measured again
        self._lock = threading.Lock()

    def open(self, name: str, size: int) -> int:
        """A handle to read and write the file ``<32 hex digits>/...`` of so many bytes."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDWR)
                if os.fstat(handle).st_size == size:
                    os.utime(handle)
                    return handle
                os.close(handle)
                path.unlink()
            # It gets its name when it has its size: other processes map it at once.
            handle, temporary = tempfile.mkstemp(PARTIAL, dir=path.parent)
            try:
                os.ftruncate(handle, size)
                with contextlib.suppress(FileExistsError):  # another process came first
                    os.link(temporary, path)
            finally:
                os.close(handle)
                Path(temporary).unlink()

    def reserve(self, num_bytes: int) -> None:
        """Makes room for bytes that are about to be written."""
        with self._lock:
            self._ahead -= num_bytes
            if self._ahead < 0:
                self._forget(self._limit - self._step - num_bytes)
                self._ahead = self._step

    def _forget(self, keep: int) -> None:
        """Removes files until at most so many bytes are allocated."""
        files = []
        for folder in self._folder.iterdir():
            if _OURS.fullmatch(folder.name):
                for parent, _, names in os.walk(folder):
                    files += [found for n in names if (found := _measure(Path(parent, n)))]
        total = sum(allocated for _, allocated, _ in files)
        for _, allocated, path in sorted(files):
            if total <= keep:
                break
            path.unlink(missing_ok=True)
            total -= allocated


class CopiedSource(Source):
    """A remote object behind a sparse file that is filled on demand, also by other processes.

    Nothing records which bytes are there: chunks carry checksums, and whoever finds one that does
    not match fetches it. So what a crash has torn repairs itself.

    Args:
        name: see `LocalCopy.open`.
        where: the object's place as messages name it.
        read_ranges: reads (begin, end) ranges of the object.
    """

    is_whole = False

    def __init__(
        self,
        copy: LocalCopy,
        name: str,
        size: int,
        where: str,
        read_ranges: Callable[[Ranges], Sequence[memoryview]],
    ) -> None:
        self._copy, self._size, self._where, self._read_ranges = copy, size, where, read_ranges
        self._handle = copy.open(name, size)
        weakref.finalize(self, os.close, self._handle)
        self.map = mmap.mmap(self._handle, size, access=mmap.ACCESS_READ)

    def fetch(self, extents: Sequence[tuple[int, int]]) -> bool:
        """See `Source.fetch`. Raises ShardError and OSError."""
        if any(begin < 0 or begin + count > self._size for begin, count in extents):
            raise ShardError(self._where, "bytes behind its end are asked for")
        for ranges in batches(extents):
            parts = self._read_ranges(ranges)
            self._copy.reserve(sum(end - begin for begin, end in ranges))
            for (begin, end), data in zip(ranges, parts, strict=True):
                if len(data) != end - begin:
                    raise ShardError(self._where, f"ends at byte {begin + len(data)}")
                self._store(begin, data)
        return True

    def _store(self, begin: int, data: memoryview) -> None:
        # Not through the map, where a full disk would be a SIGBUS.
        while data:
            try:
                written = os.pwrite(self._handle, data, begin)
            except OSError as error:
                problem = f"{error.strerror} (where the local copy lies)"
                raise OSError(error.errno, problem, self._where) from error
            begin, data = begin + written, data[written:]


def batches(extents: Sequence[tuple[int, int]]) -> Iterator[Ranges]:
    """(begin, end) ranges to request together: near extents are joined, no batch is too large.

    Args:
        extents: (offset, bytes), in any order; may overlap.
    """
    joined: list[tuple[int, int]] = []
    for begin, count in sorted(extents):
        if joined and begin - joined[-1][1] <= _NEAR_BYTES:
            joined[-1] = joined[-1][0], max(joined[-1][1], begin + count)
        elif count:
            joined.append((begin, begin + count))
    batch: list[tuple[int, int]] = []
    room = _BATCH_BYTES
    for first, last in joined:
        begin = first
        while begin < last:
            end = min(begin + room, last)
            batch.append((begin, end))
            room, begin = room - (end - begin), end
            if not room:
                yield batch
                batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _measure(path: Path) -> tuple[float, int, Path] | None:
    """When a file was last used, its allocated bytes, its path; None when it has none."""
    try:
        status = path.stat()
    except FileNotFoundError:  # another process was faster
        return None
    allocated = status.st_blocks * 512
    if not allocated or not stat.S_ISREG(status.st_mode):
        return None
    return max(status.st_atime, status.st_mtime), allocated, path


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child ends before its parent
        shutil.rmtree(folder, ignore_errors=True)
