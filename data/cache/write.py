"""Streams one part into Zarr v3 shards, chunk by chunk, and commits it.

A shard is its inner chunks, each followed by its CRC32C, then an index of (offset, bytes) pairs
and the index's CRC32C. zarr-python would build a whole shard in memory, and never syncs.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np
from crc32c import crc32c
from numcodecs.zstd import compress

from data.cache.format import ABSENT, CHECKSUM_BYTES, ArraySpec, Layout
from data.cache.metadata import ZSTD_LEVEL
from data.cache.records import CommitRecord, commit_key
from data.cache.store import Sink, Store
from data.errors import CacheError

_ZEROS = bytes(1 << 16)


class ObjectWriter:
    """Writes one object (a shard, or one unsharded chunk) from tokens that arrive in order.

    Nothing is buffered but one chunk that is to be compressed. The object appears in `close`.
    """

    def __init__(self, sink: Sink, spec: ArraySpec, layout: Layout) -> None:
        self._sink, self._spec, self._layout = sink, spec, layout
        tokens = layout.chunk_tokens if spec.sharded else layout.part_tokens
        self._chunk_bytes = tokens * spec.token_bytes
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self._filled = 0  # bytes of the chunk in hand
        self._crc = 0
        self._buffer = bytearray(self._chunk_bytes) if spec.compression else None

    def append(self, tokens: np.ndarray) -> None:
        """Adds tokens, ``[n, *token_shape]`` in the array's type."""
        little = np.ascontiguousarray(tokens, dtype=np.dtype(self._spec.dtype).newbyteorder("<"))
        if little.size:
            self._add(memoryview(little.reshape(-1).view(np.uint8).data))

    def close(self) -> dict[str, int]:
        """Finishes and publishes the object; returns its size and its last checksum."""
        if self._filled or not (self._spec.sharded or self._index):
            missing = self._chunk_bytes - self._filled
            while missing:  # the rest of a chunk is zeros
                missing -= self._add(memoryview(_ZEROS)[:missing])
        checksum = self._crc
        if self._spec.sharded:
            absent = self._layout.chunks_per_part - len(self._index)
            entries = [*self._index, *[(ABSENT, ABSENT)] * absent]
            index = b"".join(struct.pack("<QQ", *entry) for entry in entries)
            self._write(index)
            self._write(struct.pack("<I", crc32c(index)))
            # Indices of plain shards are alike; the last chunk's checksum tells parts apart.
            checksum = crc32c(index, self._crc)
        self._sink.publish()
        return {"bytes": self._offset, "crc32c": checksum}

    def discard(self) -> None:
        """Removes what was written."""
        self._sink.discard()

    def _add(self, data: memoryview) -> int:
        """Adds bytes; a chunk that gets full is finished. Returns their number."""
        at = 0
        while at < len(data):
            piece = data[at : at + self._chunk_bytes - self._filled]
            if self._buffer is None:
                # The checksum grows with the bytes, so that no chunk need be held.
                self._crc = crc32c(piece, self._crc if self._filled else 0)
                self._write(piece)
            else:
                self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            at += len(piece)
            if self._filled == self._chunk_bytes:
                self._end_chunk()
        return len(data)

    def _end_chunk(self) -> None:
        size = self._chunk_bytes
        if self._buffer is not None:
            packed = compress(self._buffer, ZSTD_LEVEL)
            self._crc, size = crc32c(packed), len(packed)
            self._write(packed)
        self._write(struct.pack("<I", self._crc))
        size += CHECKSUM_BYTES
        self._index.append((self._offset - size, size))
        self._filled = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._offset += len(data)


class PartWriter:
    """Writes all arrays of one part; nothing of it counts before `commit`.

    Args:
        store: where the cache lies.
        part: its number.
        specs: the arrays.
        layout: sizes.
        token: tells this writer from others that may write the same part.
    """

    def __init__(
        self, store: Store, part: int, specs: Sequence[ArraySpec], layout: Layout, token: str
    ) -> None:
        self._store, self._part = store, part
        self._keys = {spec.name: spec.object_key(part) for spec in specs}
        self._writers: dict[str, ObjectWriter] = {}
        try:
            for spec in specs:
                sink = store.open_sink(self._keys[spec.name], token)
                self._writers[spec.name] = ObjectWriter(sink, spec, layout)
        except BaseException:  # also Ctrl-C: sinks that were opened must not stay
            self.discard()
            raise

    def append(self, arrays: Mapping[str, np.ndarray]) -> int:
        """Adds the tokens of one piece to every array; returns the bytes before compression."""
        for name, writer in self._writers.items():
            writer.append(arrays[name])
        return sum(arrays[name].nbytes for name in self._writers)

    def commit(self, record: Mapping[str, object]) -> int:
        """Publishes the objects and then the commit record; returns the bytes written.

        Raises:
            CacheError: somebody else has committed this part.
        """
        objects = {self._keys[name]: writer.close() for name, writer in self._writers.items()}
        content = CommitRecord.to_bytes({"part": self._part, **record, "objects": objects})
        try:
            self._store.create(commit_key(self._part), content)
        except FileExistsError as error:
            raise CacheError(
                f"{self._store.url}: another process has built part {self._part} meanwhile, "
                "although this one held it\n  fix: raise cache.claim_timeout_s, and run 'dspark "
                "cache mode=verify' when all have ended"
            ) from error
        return sum(entry["bytes"] for entry in objects.values())

    def discard(self) -> None:
        """Removes an unfinished part."""
        for writer in self._writers.values():
            writer.discard()
