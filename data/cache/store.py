"""Where a cache lies: a local folder, or a bucket (see `data.cache.remote`), behind one interface.

Keys are relative names with '/' between their parts. Whatever appears under a key is complete.
"""

import contextlib
import fcntl
import mmap
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from data.errors import ShardError
from data.files import fsync_dir, fsync_file, write_atomic

PARTIAL = ".partial"


class Sink(ABC):
    """An object that is being written, invisible under its key until `publish`."""

    @abstractmethod
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends bytes."""

    @abstractmethod
    def publish(self) -> None:
        """Makes the object durable and visible, in place of an older one."""

    @abstractmethod
    def discard(self) -> None:
        """Removes what was written; does nothing after `publish`."""


class Source(ABC):
    """One stored object, opened for random reads.

    Attributes:
        map: the object's bytes. Of a remote object, bytes that were never fetched are zeros.
        is_whole: whether all bytes are there.
    """

    map: mmap.mmap
    is_whole: bool

    @abstractmethod
    def fetch(self, extents: Sequence[tuple[int, int]]) -> bool:
        """Brings (offset, bytes) extents into `map`; False when there is nowhere to fetch from."""


class Store(ABC):
    """Named objects. Methods raise OSError when the storage fails."""

    url: str

    @abstractmethod
    def read(self, key: str) -> bytes:
        """A whole object. Raises FileNotFoundError."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of an object; None when it does not exist."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, int]:
        """Keys that start with ``prefix`` (which ends at a '/'), with their bytes; at any depth."""

    @abstractmethod
    def write(self, key: str, content: bytes) -> None:
        """Writes a whole object, in place of an older one."""

    @abstractmethod
    def create(self, key: str, content: bytes) -> None:
        """Writes an object that must not exist yet. Raises FileExistsError."""

    @abstractmethod
    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Writes ``new`` if the object still holds ``old``; says whether it did."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""

    @abstractmethod
    def open_sink(self, key: str, token: str) -> Sink:
        """Begins an object; ``token`` tells the writers of one key apart."""

    @abstractmethod
    def open_source(self, key: str, size: int) -> Source:
        """Opens an object of ``size`` bytes for reading. Raises ShardError."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room that is left; None when nothing is known of it."""

    @abstractmethod
    def remove_partials(self, keys: Iterable[str] | None = None) -> None:
        """Removes what killed writers left, of some keys or of all; nobody may be writing them."""

    def exists(self, key: str) -> bool:
        """Whether an object exists."""
        return self.size(key) is not None

    def locate(self, key: str) -> str:
        """The object's place as messages name it."""
        return f"{self.url}/{key}"


class LocalStore(Store):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, key: str) -> bytes:
        """See `Store.read`."""
        return (self.folder / key).read_bytes()

    def size(self, key: str) -> int | None:
        """See `Store.size`."""
        path = self.folder / key
        return path.stat().st_size if path.is_file() else None

    def list(self, prefix: str) -> dict[str, int]:
        """See `Store.list`."""
        found = {}
        for folder, _, names in os.walk(self.folder / prefix):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):  # somebody renames or deletes it
                    found[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        return {k: n for k, n in found.items() if not k.endswith(PARTIAL)}

    def write(self, key: str, content: bytes) -> None:
        """See `Store.write`."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)

    def create(self, key: str, content: bytes) -> None:
        """See `Store.create`."""
        path = self.folder / key
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not named by the process id: nodes that share the folder may have the same.
            partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
            try:
                partial.write_bytes(content)
                fsync_file(partial)
                os.link(partial, path)
                break
            except FileNotFoundError:  # swept away by another's `remove_partials`
                continue
            finally:
                partial.unlink(missing_ok=True)
        fsync_dir(path.parent)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """See `Store.swap`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if self.read(key) != old:
                    return False
            except FileNotFoundError:
                return False
            self.write(key, new)
            return True

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        (self.folder / key).unlink(missing_ok=True)

    def open_sink(self, key: str, token: str) -> Sink:
        """See `Store.open_sink`."""
        return _LocalSink(self.folder / key, token)

    def open_source(self, key: str, size: int) -> Source:
        """See `Store.open_source`."""
        return _LocalSource(self.folder / key, size)

    def free_bytes(self) -> int | None:
        """See `Store.free_bytes`."""
        there = self.folder.absolute()
        while not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free

    def remove_partials(self, keys: Iterable[str] | None = None) -> None:
        """See `Store.remove_partials`."""
        paths = [self.folder / key for key in keys or ()]
        found = [p for path in paths for p in path.parent.glob(f"{path.name}.*{PARTIAL}")]
        if keys is None:
            found = list(self.folder.rglob(f"*{PARTIAL}"))
        for path in found:
            path.unlink(missing_ok=True)


class _LocalSink(Sink):
    def __init__(self, path: Path, token: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._partial = path.with_name(f"{path.name}.{token}{PARTIAL}")
        self._file: BinaryIO = self._partial.open("wb")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._file.write(data)

    def publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        fsync_dir(self._path.parent)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()
        self._partial.unlink(missing_ok=True)


class _LocalSource(Source):
    is_whole = True

    def __init__(self, path: Path, size: int) -> None:
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ShardError(path, f"cannot be opened ({error})") from error
        if len(self.map) != size:
            raise ShardError(path, f"has {len(self.map)} bytes, its commit record says {size}")

    def fetch(self, extents: Sequence[tuple[int, int]]) -> bool:
        del extents
        return False
