"""Reads rows and batches of a finished cache, from a folder or an object store."""

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from data.batch import BatchHead, CachedRow, TopK
from data.cache.format import HEADER_KEY, LAST, TAPS, ArraySpec, array_specs, load_header
from data.cache.records import FINGERPRINT_KEY, CommitRecord, Manifest, commit_key
from data.cache.shards import ObjectReader
from data.cache.store import LocalStore, Store
from data.cache.stored import StoredBatch
from data.cache.table import SampleTable
from data.config import Check
from data.errors import ShardError
from data.fingerprint import Fingerprint
from data.pool import BufferPool

_OPEN_PARTS = 64
_CONTROL = ("input_ids", "loss_mask")


class CacheReader:
    """A finished cache: ``reader[i]`` is row ``i``.

    Objects are opened on first use, and again in a process that inherited or was sent the reader.
    Threads may read at once.

    Args:
        store: where the cache lies; a path is a folder.
        check: when a chunk's checksum is verified.
        pool: where the memory of batches comes from; None takes fresh memory.
        max_length: longer rows are cut at their end.

    Raises:
        CacheError: the cache is unfinished, or of an unknown format.
        ShardError: also when a row is read: a file is missing, short or damaged.
    """

    def __init__(
        self,
        store: Store | Path,
        check: Check = Check.first,
        pool: BufferPool | None = None,
        max_length: int | None = None,
    ) -> None:
        self.store = LocalStore(store) if isinstance(store, Path) else store
        self.check, self.pool, self.max_length = check, pool, max_length
        self.header = load_header(self.store)  # first: it says which version may read the rest
        self.manifest = Manifest.load(self.store)
        self.manifest.read(self.store, HEADER_KEY)
        self.fingerprint = Fingerprint.parse(
            self.manifest.read(self.store, FINGERPRINT_KEY), self.store.locate(FINGERPRINT_KEY)
        )
        self.specs = {spec.name: spec for spec in array_specs(self.header)}
        self.samples = SampleTable.load(self.store, self.header, self.manifest)
        self.taps_codec = self.header.codec(TAPS)
        self.last_codec = self.header.codec(LAST) if self.header.last else None
        self._open_caches()

    def _open_caches(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._object = lru_cache(maxsize=_OPEN_PARTS * len(self.specs))(self.open_object)
        self._record = lru_cache(maxsize=4096)(self._load_record)

    def __getstate__(self) -> dict[str, object]:
        own = ("_lock", "_object", "_record")
        state = {k: v for k, v in vars(self).items() if k not in own}
        if self.pool is not None:  # memory stays in its process
            state["pool"] = BufferPool(self.pool.max_free_bytes)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open_caches()

    def __len__(self) -> int:
        return len(self.samples)

    def length(self, index: int) -> int:
        """Tokens of a row as it is read."""
        return min(int(self.samples.lengths[index]), self.max_length or 1 << 62)

    def __getitem__(self, index: int) -> CachedRow:
        """Row ``index``, decoded."""
        batch = self.read_batch([index], [0]).to(torch.device("cpu"))
        topk = batch.topk
        return CachedRow(
            token_ids=batch.token_ids[0],
            loss_mask=batch.loss_mask[0],
            taps=batch.taps[0],
            last=None if batch.last is None else batch.last[0],
            row_key=batch.row_keys[0],
            topk=None if topk is None else TopK(*(t[0] for t in vars(topk).values())),
        )

    def read_head(self, indices: Sequence[int], epochs: Sequence[int]) -> BatchHead:
        """What blocks are drawn from: a byte a token is read."""
        return self._head(indices, epochs, self._read("loss_mask", indices))

    def read_batch(self, indices: Sequence[int], epochs: Sequence[int]) -> StoredBatch:
        """Rows padded with zeros to the longest of them, as they are stored."""
        head = self._head(indices, epochs, self._read("loss_mask", indices))
        arrays = {n: self._read(n, indices) for n in self.specs if n not in _CONTROL}
        return StoredBatch(
            **vars(head),
            token_ids=torch.from_numpy(self._read("input_ids", indices)),
            arrays={n: torch.from_numpy(_signed(a)) for n, a in arrays.items()},
            taps=self.taps_codec,
            last=self.last_codec,
        )

    def batch_bytes(self, indices: Sequence[int]) -> int:
        """Memory of a batch: what is stored of it, and what that becomes."""
        tokens = len(indices) * max(self.length(i) for i in indices)
        header = self.header
        states = len(header.tap_layers) + (header.last is not None)
        stored = sum(spec.token_bytes for spec in self.specs.values())
        # Decoded: bf16 states, int64 ids, and of a law int64 ids with fp32 log-probabilities.
        decoded = 2 * states * header.hidden_size + 8 + (8 + 4) * header.topk
        return tokens * (stored + decoded)

    def open_object(self, name: str, part: int, check: Check | None = None) -> ObjectReader:
        """Opens one object of a part. Raises ShardError."""
        key = self.specs[name].object_key(part)
        recorded = self._record(part).objects.get(key)
        if recorded is None:
            raise ShardError(self.store.locate(commit_key(part)), f"does not name {key}")
        layout = self.header.layout
        return ObjectReader(
            self.store, key, self.specs[name], layout, recorded, check or self.check
        )

    def _load_record(self, part: int) -> CommitRecord:
        record = CommitRecord.load(self.store, part)
        if record.cache_uuid != self.header.cache_uuid:
            raise ShardError(self.store.locate(commit_key(part)), "belongs to another cache")
        return record

    def _head(self, indices: Sequence[int], epochs: Sequence[int], mask: np.ndarray) -> BatchHead:
        for b, index in enumerate(indices):
            if prefix := min(self.samples.prefix_length(index), mask.shape[1]):
                mask[b, :prefix] = self.samples.prefix_mask(index)[:prefix]
        return BatchHead(
            loss_mask=torch.from_numpy(mask.view(np.bool_)),
            lengths=tuple(self.length(i) for i in indices),
            row_keys=tuple(int(self.samples.row_keys[i]) for i in indices),
            epochs=tuple(epochs),
        )

    def _read(self, name: str, indices: Sequence[int]) -> np.ndarray:
        """One array of some rows, ``[B, T, *token_shape]``, padded with zeros."""
        spec = self.specs[name]
        lengths = [self.length(i) for i in indices]
        out = self._allocate((len(indices), max(lengths)), spec)
        for b, index in enumerate(indices):
            at = 0
            for piece in self.samples.pieces(index):
                count = min(piece.length, lengths[b] - at)
                if count > 0:
                    source = self._opened(name, piece.part)
                    source.read_into(out[b, at : at + count], piece.start)
                    at += count
            out[b, at:] = 0
        return out

    def _opened(self, name: str, part: int) -> ObjectReader:
        if os.getpid() != self._process:  # a thread that held the lock does not exist after a fork
            self._open_caches()
        with self._lock:  # lru_cache may open an object twice, and the maps are big
            return self._object(name, part)

    def _allocate(self, shape: tuple[int, ...], spec: ArraySpec) -> np.ndarray:
        full = (*shape, *spec.token_shape)
        if self.pool is None:
            return np.empty(full, spec.dtype)
        size = int(np.prod(full)) * np.dtype(spec.dtype).itemsize
        return self.pool.lease(size).view(spec.dtype).reshape(full)


def _signed(array: np.ndarray) -> np.ndarray:
    """The same bits in a signed type: PyTorch knows few operations on wide unsigned integers."""
    if array.dtype in (np.uint16, np.uint32):
        return array.view(np.dtype(f"int{8 * array.dtype.itemsize}"))
    return array
