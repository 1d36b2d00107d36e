"""Random access to one object of a part: checked chunks copied into the caller's memory."""

from collections.abc import Iterator

import numpy as np
from crc32c import crc32c
from numcodecs.zstd import decompress

from data.cache.format import ABSENT, CHECKSUM_BYTES, INDEX_ENTRY_BYTES, ArraySpec, Layout
from data.cache.store import Store
from data.config import Check
from data.errors import ShardError


class ObjectReader:
    """One object: a shard with its index, or one unsharded chunk.

    Raises:
        ShardError: it is missing, short, damaged, or not what its commit record says.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        spec: ArraySpec,
        layout: Layout,
        recorded: tuple[int, int],
        check: Check = Check.first,
    ) -> None:
        size, checksum = recorded
        self._where = store.locate(key)
        self._spec, self._check = spec, check
        self._source = store.open_source(key, size)
        self._bytes = np.frombuffer(self._source.map, np.uint8)
        self._chunk_tokens = layout.chunk_tokens if spec.sharded else layout.part_tokens
        self._chunk_bytes = self._chunk_tokens * spec.token_bytes
        self._only_crc = None if spec.sharded else checksum
        if not spec.sharded:
            self._index = np.array([[0, size]], np.uint64)
            self._require_sizes()
        else:
            self._index = self._read_index(layout.chunks_per_part, size, checksum)
        self._checked = np.zeros(len(self._index), np.bool_)

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Copies tokens ``start .. start + len(out)``.

        Args:
            out: contiguous ``[n, *token_shape]`` of the array's type.
            start: first slot of the part.
        """
        if not len(out):
            return
        token, size = self._spec.token_bytes, self._chunk_tokens
        first, last = start // size, (start + len(out) - 1) // size
        if not self._source.is_whole:
            self._fetch_missing(first, last)
        target = out.reshape(-1).view(np.uint8)
        at = 0
        for chunk in range(first, last + 1):
            low = max(start - chunk * size, 0) * token
            high = min(start + len(out) - chunk * size, size) * token
            # Checked right before it is copied: the copy finds it in the CPU's cache.
            target[at : at + high - low] = self._content(chunk)[low:high]
            at += high - low

    def bad_chunks(self) -> Iterator[tuple[int, str]]:
        """Reads everything; yields (chunk, problem) of each damaged one."""
        for chunk in range(len(self._index)):
            if self._index[chunk, 0] != ABSENT:
                try:
                    if not self._source.is_whole:
                        self._fetch_missing(chunk, chunk)
                    self._content(chunk)
                except ShardError as error:
                    yield chunk, error.problem

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk."""
        return self._chunk_tokens

    def _read_index(self, count: int, size: int, checksum: int) -> np.ndarray:
        length = count * INDEX_ENTRY_BYTES + CHECKSUM_BYTES
        if size < length:
            raise ShardError(self._where, "is too short for its index")
        begin = size - length
        before = begin - CHECKSUM_BYTES  # the checksum of the last chunk
        if not self._is_sound(begin, length) and not (
            self._source.fetch([(before, length + CHECKSUM_BYTES)])
            and self._is_sound(begin, length)
        ):
            raise ShardError(self._where, "its index is damaged (CRC32C)")
        index = self._bytes[begin : size - CHECKSUM_BYTES].copy()
        if crc32c(index.data, self._stored_crc(begin)) != checksum:
            raise ShardError(self._where, "is not the object that its commit record describes")
        self._index = index.view("<u8").reshape(count, 2)
        self._require_sizes()
        return self._index

    def _require_sizes(self) -> None:
        """Refuses an index that points out of the object: it was not written by us."""
        there = self._index[self._index[:, 0] != ABSENT].astype(np.int64)
        if len(there) and (there.min() < 0 or there.sum(1).max() > len(self._bytes)):
            raise ShardError(self._where, "a chunk lies behind the end of the file")
        plain = self._spec.compression is None
        if plain and np.any(there[:, 1] != self._chunk_bytes + CHECKSUM_BYTES):
            raise ShardError(self._where, "has chunks of another size; it was not written by us")

    def _fetch_missing(self, first: int, last: int) -> None:
        """Brings chunks of a remote object that are not in the local copy, in few requests."""
        missing = [
            extent
            for chunk in range(first, last + 1)
            if not self._checked[chunk]
            and (extent := self._extent(chunk))[0] != ABSENT
            and not self._is_sound(*extent)
        ]
        if missing:
            self._source.fetch(missing)

    def _is_due(self, chunk: int) -> bool:
        """Whether a chunk's checksum must be verified now."""
        if self._index[chunk, 0] == ABSENT:
            raise ShardError(self._where, f"chunk {chunk} is absent")
        first = self._check is Check.first and not self._checked[chunk]
        return first or self._check is Check.always

    def _damaged(self, chunk: int) -> ShardError:
        problem = f"chunk {chunk}: its CRC32C does not match: the data is damaged"
        return ShardError(self._where, problem)

    def _content(self, chunk: int) -> np.ndarray:
        """The bytes of a chunk, checked as often as this reader was told to."""
        due = self._is_due(chunk)
        offset, size = self._extent(chunk)
        if due:
            if not self._is_sound(offset, size):
                raise self._damaged(chunk)
            self._checked[chunk] = True
        stored = self._bytes[offset : offset + size - CHECKSUM_BYTES]
        if self._spec.compression is None:
            return stored
        try:
            plain = np.frombuffer(decompress(stored), np.uint8)
        except RuntimeError as error:
            raise ShardError(self._where, f"chunk {chunk}: {error}") from error
        if len(plain) != self._chunk_bytes:
            raise ShardError(self._where, f"chunk {chunk}: {len(plain)} bytes after decompression")
        return plain

    def _extent(self, chunk: int) -> tuple[int, int]:
        return int(self._index[chunk, 0]), int(self._index[chunk, 1])

    def _is_sound(self, offset: int, size: int) -> bool:
        """Whether bytes that end in their CRC32C are undamaged."""
        end = offset + size
        data = self._bytes[offset : end - CHECKSUM_BYTES].data
        return crc32c(data) == self._stored_crc(end)

    def _stored_crc(self, end: int) -> int:
        """The checksum that lies before ``end``; -1 if the record of an only chunk has another."""
        found = int.from_bytes(self._bytes[end - CHECKSUM_BYTES : end].tobytes(), "little")
        return found if self._only_crc in (None, found) else -1
