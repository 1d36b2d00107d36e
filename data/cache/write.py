"""Streams one part into Zarr v3 shards, chunk by chunk, and commits it.

A shard is its inner chunks, each followed by its CRC32C, then an index of (offset, bytes) pairs
and the index's CRC32C. zarr-python would build a whole shard in memory, and never syncs.
"""

import contextlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from crc32c import crc32c

from data.cache.format import ABSENT, CHECKSUM_BYTES, ArraySpec, Layout
from data.cache.records import commit_path
from data.errors import CacheError
from data.files import create_exclusive, fsync_dir


class ObjectWriter:
    """Writes one object (a shard, or one unsharded chunk) from tokens that arrive in order.

    Holds at most one chunk of tokens in memory. The object appears under its name in `close`.
    """

    def __init__(self, path: Path, spec: ArraySpec, layout: Layout) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._spec, self._layout = spec, layout
        self._chunk_bytes = layout.chunk_tokens * spec.token_bytes
        self._file: BinaryIO = self._partial.open("wb")
        self._buffer = bytearray()
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self._crc = 0

    def append(self, tokens: np.ndarray) -> None:
        """Adds tokens, ``[n, *token_shape]`` in the array's type."""
        little = np.ascontiguousarray(tokens, dtype=np.dtype(self._spec.dtype).newbyteorder("<"))
        data = memoryview(little.reshape(-1).view(np.uint8).data)
        if not self._spec.sharded:
            self._crc = crc32c(data, self._crc)
            self._offset += self._file.write(data)
            return
        at = 0
        while at < len(data):
            room = self._chunk_bytes - len(self._buffer)
            if not self._buffer and len(data) - at >= self._chunk_bytes:
                self._write_chunk(data[at : at + self._chunk_bytes])
                at += self._chunk_bytes
                continue
            self._buffer += data[at : at + room]
            at += room
            if len(self._buffer) == self._chunk_bytes:
                self._write_chunk(self._buffer)
                self._buffer = bytearray()

    def close(self) -> dict[str, int]:
        """Finishes, syncs and publishes the object; returns its size and its last checksum."""
        total = self._layout.part_tokens * self._spec.token_bytes
        if self._spec.sharded:
            if self._buffer:
                self._write_chunk(self._buffer.ljust(self._chunk_bytes, b"\0"))
            absent = self._layout.chunks_per_part - len(self._index)
            entries = [*self._index, *[(ABSENT, ABSENT)] * absent]
            index = b"".join(struct.pack("<QQ", *entry) for entry in entries)
            checksum = crc32c(index)
            self._file.write(index)
        else:
            # An unsharded chunk is as long as the part; the rest of it is zeros.
            zeros = bytes(total - self._offset)
            checksum = crc32c(zeros, self._crc)
            self._file.write(zeros)
        self._file.write(struct.pack("<I", checksum))
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        return {"bytes": size, "crc32c": checksum}

    def discard(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _write_chunk(self, data: bytearray | memoryview | bytes) -> None:
        self._file.write(data)
        self._file.write(struct.pack("<I", crc32c(data)))
        size = len(data) + CHECKSUM_BYTES
        self._index.append((self._offset, size))
        self._offset += size


class PartWriter:
    """Writes all arrays of one part; nothing of it counts before `commit`."""

    def __init__(self, folder: Path, part: int, specs: Sequence[ArraySpec], layout: Layout) -> None:
        self._folder, self._part = folder, part
        self._keys = {spec.name: spec.object_key(part) for spec in specs}
        self._writers = {
            spec.name: ObjectWriter(folder / self._keys[spec.name], spec, layout) for spec in specs
        }

    def append(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds the tokens of one sample to every array."""
        for name, writer in self._writers.items():
            writer.append(arrays[name])

    def commit(self, record: dict[str, object]) -> int:
        """Publishes the objects and then the commit record; returns the bytes written.

        Raises:
            CacheError: somebody else has committed this part.
        """
        objects = {self._keys[name]: writer.close() for name, writer in self._writers.items()}
        for key in self._keys.values():
            fsync_dir((self._folder / key).parent)
        text = json.dumps({"part": self._part, **record, "objects": objects}) + "\n"
        try:
            create_exclusive(commit_path(self._folder, self._part), text)
        except FileExistsError as error:
            raise CacheError(
                f"{self._folder}: another process has built part {self._part} meanwhile\n"
                "  fix: let one process build at a time"
            ) from error
        return sum(entry["bytes"] for entry in objects.values())

    def discard(self) -> None:
        """Removes an unfinished part."""
        for writer in self._writers.values():
            writer.discard()
