"""Reads rows from local shards through memory maps; a chunk is checked when first touched."""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import zarr
from crc32c import crc32c

from data.batch import CachedRow
from data.cache.codecs import decode_bf16
from data.cache.format import (
    ABSENT,
    CHECKSUM_BYTES,
    INDEX_ENTRY_BYTES,
    SAMPLE_COLUMNS,
    ArraySpec,
    Header,
    Layout,
    array_specs,
)
from data.cache.records import CommitRecord, Manifest, commit_path, samples_digest
from data.errors import CacheError, ShardError
from data.fingerprint import Fingerprint

_OPEN_PARTS = 64


class ObjectReader:
    """One object of a part: a shard with its index, or one unsharded chunk."""

    def __init__(self, path: Path, spec: ArraySpec, layout: Layout, size: int) -> None:
        self._path, self._spec, self._layout = path, spec, layout
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ShardError(path, f"cannot be opened ({error})") from error
        if len(self._map) != size:
            raise ShardError(path, f"has {len(self._map)} bytes, its commit record says {size}")
        self._chunk_bytes = layout.chunk_tokens * spec.token_bytes
        self._checked: set[int] = set()
        self._offsets = self._read_index() if spec.sharded else []

    def _read_index(self) -> list[int]:
        count = self._layout.chunks_per_part
        raw = self._map[-(count * INDEX_ENTRY_BYTES + CHECKSUM_BYTES) :]
        index, (stored,) = raw[:-CHECKSUM_BYTES], struct.unpack("<I", raw[-CHECKSUM_BYTES:])
        if crc32c(index) != stored:
            raise ShardError(self._path, "its index is damaged (CRC32C)")
        offsets = []
        for offset, size in struct.iter_unpack("<QQ", index):
            if offset != ABSENT and size != self._chunk_bytes + CHECKSUM_BYTES:
                raise ShardError(self._path, f"a chunk of {size} bytes; it was not written by us")
            offsets.append(offset)
        return offsets

    def tokens(self, start: int, count: int) -> np.ndarray:
        """A copy of tokens ``start .. start + count``, ``[count, *token_shape]``."""
        if count == 0:
            return np.empty((0, *self._spec.token_shape), self._spec.dtype)
        if not self._spec.sharded:
            self._check_whole()
            data = self._map[start * self._spec.token_bytes :][: count * self._spec.token_bytes]
            return self._as_tokens(data, count)
        size, token = self._layout.chunk_tokens, self._spec.token_bytes
        out = bytearray(count * token)
        at = 0
        for chunk in range(start // size, (start + count - 1) // size + 1):
            base = self._checked_offset(chunk)
            low = max(start - chunk * size, 0) * token
            high = min(start + count - chunk * size, size) * token
            out[at : at + high - low] = self._map[base + low : base + high]
            at += high - low
        return self._as_tokens(out, count)

    def verify(self) -> None:
        """Reads everything. Raises ShardError."""
        if not self._spec.sharded:
            self._check_whole()
            return
        for chunk, offset in enumerate(self._offsets):
            if offset != ABSENT:
                self._checked_offset(chunk)

    def _as_tokens(self, data: bytes | bytearray, count: int) -> np.ndarray:
        return np.frombuffer(data, self._spec.dtype).reshape(count, *self._spec.token_shape)

    def _check_whole(self) -> None:
        if 0 in self._checked:
            return
        data = memoryview(self._map)[:-CHECKSUM_BYTES]
        self._require_crc(data, self._map[-CHECKSUM_BYTES:], "")
        self._checked.add(0)

    def _checked_offset(self, chunk: int) -> int:
        offset = self._offsets[chunk]
        if offset == ABSENT:
            raise ShardError(self._path, f"chunk {chunk} is absent")
        if chunk not in self._checked:
            end = offset + self._chunk_bytes
            if end + CHECKSUM_BYTES > len(self._map):
                raise ShardError(self._path, f"chunk {chunk} lies behind the end of the file")
            data = memoryview(self._map)[offset:end]
            self._require_crc(data, self._map[end : end + CHECKSUM_BYTES], f"chunk {chunk}: ")
            self._checked.add(chunk)
        return offset

    def _require_crc(self, data: memoryview, stored: bytes, what: str) -> None:
        if crc32c(data) != struct.unpack("<I", stored)[0]:
            raise ShardError(self._path, f"{what}its CRC32C does not match: the data is damaged")


@dataclass(frozen=True)
class SampleTable:
    """Samples that the cache holds (finished parts only), one entry each.

    Attributes:
        row_keys: uint64, see `data.batch.Row.row_key`.
        class_ids: index into the header's ``class_names``.
        language_ids: index into the header's ``languages``.
    """

    parts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    row_keys: np.ndarray
    class_ids: np.ndarray
    language_ids: np.ndarray


class CacheReader:
    """A finished cache: ``reader[i]`` is row ``i``. Opens shards on first use, so it may be sent
    to another process before any row is read.

    Raises:
        CacheError: the cache is unfinished, or of an unknown format.
        ShardError: when a row is read: a file is missing, short or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = Header.load(folder / "cache.json")
        self.manifest = Manifest.load(folder)
        self.fingerprint = Fingerprint.load(folder / "fingerprint.json")
        self.specs = {spec.name: spec for spec in array_specs(self.header.layout)}
        self.samples = _read_samples(folder, self.manifest.samples_sha256)
        self._object = lru_cache(maxsize=_OPEN_PARTS * len(self.specs))(self._open_object)
        self._record = lru_cache(maxsize=None)(partial(CommitRecord.load, folder))

    def __len__(self) -> int:
        return len(self.samples.lengths)

    def __getitem__(self, index: int) -> CachedRow:
        """Row ``index``; tensors own their memory."""
        start, count = int(self.samples.starts[index]), int(self.samples.lengths[index])
        part = int(self.samples.parts[index])
        data = {n: self._object(n, part).tokens(start, count) for n in self.specs}
        return CachedRow(
            token_ids=torch.from_numpy(data["input_ids"].astype(np.int64)),
            loss_mask=torch.from_numpy(data["loss_mask"].astype(np.bool_)),
            taps=decode_bf16(data["hidden"]),
            last=decode_bf16(data["last_hidden"]),
            row_key=int(self.samples.row_keys[index]),
        )

    def objects(self) -> Iterator[tuple[str, int]]:
        """(array, part) of every object of the cache."""
        for part in range(self.header.num_parts):
            for name in self.specs:
                yield name, part

    def verify_object(self, name: str, part: int) -> None:
        """Reads one object whole and checks every checksum. Raises ShardError."""
        self._open_object(name, part).verify()

    def _open_object(self, name: str, part: int) -> ObjectReader:
        key = self.specs[name].object_key(part)
        size = self._record(part).objects.get(key)
        if size is None:
            raise ShardError(commit_path(self.folder, part), f"does not name {key}")
        return ObjectReader(self.folder / key, self.specs[name], self.header.layout, size)


def _read_samples(folder: Path, expected_digest: str) -> SampleTable:
    if samples_digest(folder) != expected_digest:
        raise ShardError(
            folder / "data.zarr" / "samples",
            "the sample table is damaged",
            "delete manifest.json and run 'dspark cache' again: it writes the table anew",
        )
    try:
        group = zarr.open_group(folder / "data.zarr" / "samples", mode="r")
        columns = {name: np.asarray(group[name]) for name in SAMPLE_COLUMNS}
    except (OSError, KeyError, ValueError) as error:
        raise CacheError(f"{folder}: unreadable sample table ({error})\n  fix: rebuild") from error
    return SampleTable(
        columns["part"],
        columns["start"],
        columns["length"],
        columns["row_key"],
        columns["class_id"],
        columns["language_id"],
    )
