"""The sample table of a finished cache: where each row's pieces lie, and what kind of row it is."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from data.cache.format import CHECKSUM_BYTES, Header
from data.cache.metadata import table_key
from data.cache.records import Manifest
from data.cache.store import Store
from data.errors import ShardError

# Column -> type. `sample_id` is the row's place among all rows that were ever given.
SAMPLES = {
    "start": "int64",
    "length": "int32",
    "sample_id": "int64",
    "part": "int32",
    "row_key": "uint64",
    "class_id": "uint16",
    "language_id": "uint16",
    "prefix": "int64",
    "prefix_mask_start": "int64",
}
PREFIXES = {"part": "int32", "start": "int64", "length": "int32", "prefix": "int64"}
PREFIX_MASKS = {"loss_mask": "uint8"}


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a row inside one part."""

    part: int
    start: int
    length: int


@dataclass(frozen=True)
class SampleTable:
    """One entry a row that may be used.

    Attributes:
        lengths: tokens of the whole row, shared prefix included.
        row_keys: uint64, see `data.batch.Row.row_key`.
        class_ids, language_ids: index into the manifest's names.
        sample_ids: place among all rows that were ever given.
    """

    columns: Mapping[str, np.ndarray]
    prefixes: Mapping[str, np.ndarray]
    prefix_masks: np.ndarray
    lengths: np.ndarray

    @classmethod
    def load(cls, store: Store, header: Header, manifest: Manifest) -> "SampleTable":
        """Reads the table.

        Raises:
            ShardError: a file of it is missing or damaged.
        """

        def column(table: str, name: str, dtype: str) -> np.ndarray:
            key = table_key(table, name)
            # An array without entries has no chunk.
            content = manifest.read(store, key) if key in manifest.digests else bytes(4)
            values = content[:-CHECKSUM_BYTES]  # its CRC32C; the digest is stronger
            return np.frombuffer(values, np.dtype(dtype).newbyteorder("<"))

        samples = {n: column("samples", n, t) for n, t in SAMPLES.items()}
        if {len(column) for column in samples.values()} != {manifest.num_samples}:
            raise ShardError(store.locate("data.zarr/samples"), "has columns of another length")
        prefixes = {n: np.zeros(0, t) for n, t in PREFIXES.items()}
        masks = np.zeros(0, np.uint8)
        if has_prefixes(header):
            prefixes = {n: column("prefixes", n, t) for n, t in PREFIXES.items()}
            masks = column("prefix_masks", "loss_mask", "uint8")
        return cls(samples, prefixes, masks, samples["length"] + _before(samples, prefixes))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def row_keys(self) -> np.ndarray:
        """See the class."""
        return self.columns["row_key"]

    @property
    def class_ids(self) -> np.ndarray:
        """See the class."""
        return self.columns["class_id"]

    @property
    def language_ids(self) -> np.ndarray:
        """See the class."""
        return self.columns["language_id"]

    @property
    def sample_ids(self) -> np.ndarray:
        """See the class."""
        return self.columns["sample_id"]

    def pieces(self, index: int) -> list[Piece]:
        """The pieces of a row, first to last."""
        c, p = self.columns, self.prefixes
        found = [Piece(int(c["part"][index]), int(c["start"][index]), int(c["length"][index]))]
        prefix = int(c["prefix"][index])
        while prefix >= 0:
            found.append(
                Piece(int(p["part"][prefix]), int(p["start"][prefix]), int(p["length"][prefix]))
            )
            prefix = int(p["prefix"][prefix])
        return found[::-1]

    def prefix_mask(self, index: int) -> np.ndarray:
        """Loss mask of a row's shared prefix: rows that share tokens may supervise others."""
        start = int(self.columns["prefix_mask_start"][index])
        return self.prefix_masks[start : start + self.prefix_length(index)]

    def prefix_length(self, index: int) -> int:
        """Tokens of a row that lie in shared pieces."""
        return int(self.lengths[index]) - int(self.columns["length"][index])

    def rows_in(self, part: int, start: int, end: int) -> list[int]:
        """Rows that have a token in slots ``start .. end`` of a part."""
        c, p = self.columns, self.prefixes
        hit = (c["part"] == part) & (c["start"] < end) & (c["start"] + c["length"] > start)
        bad = (p["part"] == part) & (p["start"] < end) & (p["start"] + p["length"] > start)
        while True:  # what hangs below a damaged prefix is damaged too
            below = bad | ((p["prefix"] >= 0) & bad[p["prefix"]])
            if (below == bad).all():
                break
            bad = below
        if len(bad):
            hit = hit | ((c["prefix"] >= 0) & bad[c["prefix"]])
        rows: list[int] = np.flatnonzero(hit).tolist()
        return rows


def has_prefixes(header: Header) -> bool:
    """Whether the tables of shared prefixes exist."""
    return header.share_prefix


def _before(samples: Mapping[str, np.ndarray], prefixes: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tokens before each row's own piece."""
    total = np.zeros(len(samples["start"]), np.int64)
    at = samples["prefix"].astype(np.int64)
    while (live := at >= 0).any():
        total[live] += prefixes["length"][at[live]]
        at[live] = prefixes["prefix"][at[live]]
    return total
