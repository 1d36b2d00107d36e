"""The on-disk format: arrays, header, plan, commit records. See docs/cache-format.md.

P parts of CAP token rows each; a sample never crosses a part; token ``t`` of a sample lies at row
``part * CAP + start + t``. One shard file holds one part of one array.
"""

import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec

from data.errors import CacheError
from data.files import create_exclusive

FORMAT, VERSION = "hidden-cache", 1
BF16_BYTES = 2
MIN_CHUNK_TOKENS = 16
CHECKSUM_BYTES = 4
INDEX_ENTRY_BYTES = 16
ABSENT = 2**64 - 1
# Column of the `samples` group -> its type. `sample_id` is the row's place in the input.
SAMPLE_COLUMNS = {
    "start": "int64",
    "length": "int32",
    "sample_id": "int64",
    "part": "int32",
    "row_key": "uint64",
    "class_id": "uint16",
    "language_id": "uint16",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the store. ``chunk_tokens`` (T) divides ``part_tokens`` (CAP)."""

    num_layers: int
    hidden_size: int
    chunk_tokens: int
    part_tokens: int

    @classmethod
    def choose(
        cls, num_layers: int, hidden_size: int, max_length: int, part_bytes: int, chunk_bytes: int
    ) -> "Layout":
        """The largest powers of two within the byte limits (and room for the longest row)."""
        token_bytes = num_layers * hidden_size * BF16_BYTES
        part = max(_floor_power(part_bytes // token_bytes), _ceil_power(max_length))
        chunk = max(_floor_power(chunk_bytes // token_bytes), MIN_CHUNK_TOKENS)
        part = max(part, MIN_CHUNK_TOKENS)
        return cls(num_layers, hidden_size, min(chunk, part), part)

    @property
    def chunks_per_part(self) -> int:
        """Checksummed chunks of one shard."""
        return self.part_tokens // self.chunk_tokens


@dataclass(frozen=True)
class ArraySpec:
    """One array: name, item type, item shape of one token, and whether it is sharded."""

    name: str
    dtype: str
    token_shape: tuple[int, ...]
    dims: tuple[str, ...]
    sharded: bool
    bits_as: str | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.dtype).itemsize * math.prod(self.token_shape)

    def object_key(self, part: int) -> str:
        """File of one part, relative to the cache's folder (separator '.': one folder)."""
        zeros = ".0" * len(self.token_shape)
        return f"data.zarr/{self.name}/c.{part}{zeros}"


def array_specs(layout: Layout) -> tuple[ArraySpec, ...]:
    """The arrays of an exact bf16 cache. bf16 is stored as its bits in uint16: stock zarr and
    xarray cannot open a bfloat16 array.
    """
    M, D = layout.num_layers, layout.hidden_size
    return (
        ArraySpec("hidden", "uint16", (M, D), ("layer", "feature"), True, "bfloat16"),
        ArraySpec("last_hidden", "uint16", (D,), ("feature",), True, "bfloat16"),
        ArraySpec("input_ids", "int32", (), (), False),
        ArraySpec("loss_mask", "uint8", (), (), False),
    )


@dataclass(frozen=True)
class Plan:
    """Where each sample lies.

    Attributes:
        parts: part of each sample, int64 [n].
        starts: first row inside the part, int64 [n].
        lengths: tokens, int64 [n].
    """

    parts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return int(self.parts.max()) + 1

    def samples_of(self, part: int) -> list[int]:
        """Samples of one part, in the order in which they lie in it."""
        members = np.flatnonzero(self.parts == part)
        return [int(i) for i in members[np.argsort(self.starts[members], kind="stable")]]

    def equals(self, other: "Plan") -> bool:
        """Whether every sample lies at the same place."""
        mine, theirs = (self.parts, self.starts, self.lengths), other
        return all(
            np.array_equal(a, b)
            for a, b in zip(mine, (theirs.parts, theirs.starts, theirs.lengths), strict=True)
        )

    def save(self, path: Path) -> None:
        """Writes int64 [n, 3]: part, start, length."""
        np.save(path, np.stack([self.parts, self.starts, self.lengths], axis=1))

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Reads what `save` wrote; nothing is unpickled."""
        try:
            table = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path}: unreadable plan ({error})\n  fix: rebuild the cache"
            ) from error
        return cls(table[:, 0], table[:, 1], table[:, 2])


def plan_parts(lengths: Sequence[int], part_tokens: int) -> Plan:
    """Packs samples in their order into parts; inside a part the longest come first.

    The plan depends on the lengths alone, so that part k holds the same samples at the same rows
    whoever builds it, and equal lengths lie together for the target's batches.
    """
    parts = np.zeros(len(lengths), dtype=np.int64)
    starts = np.zeros(len(lengths), dtype=np.int64)
    part, used = 0, 0
    for i, length in enumerate(lengths):
        if used + length > part_tokens:
            part, used = part + 1, 0
        parts[i] = part
        used += length
    sizes = np.asarray(lengths, dtype=np.int64)
    for p in range(part + 1):
        members = np.flatnonzero(parts == p)
        members = members[np.argsort(-sizes[members], kind="stable")]
        starts[members] = np.concatenate([[0], np.cumsum(sizes[members])[:-1]])
    return Plan(parts, starts, sizes)


@dataclass(frozen=True)
class Header:
    """``cache.json``: what the cache is. Written once; a later build must agree on every field."""

    tap_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    chunk_tokens: int
    part_tokens: int
    num_parts: int
    num_samples: int
    codec: str
    dataset_hash: str
    class_names: tuple[str, ...]
    languages: tuple[str, ...]
    target_precision: str
    cache_uuid: str = ""
    format: str = FORMAT
    version: int = VERSION
    layer_convention: str = "output of block i"
    last: str = "post-final-norm"
    mode: str = "planned"

    @property
    def layout(self) -> Layout:
        """Sizes of the store."""
        return Layout(len(self.tap_layers), self.hidden_size, self.chunk_tokens, self.part_tokens)

    @classmethod
    def load(cls, path: Path) -> "Header":
        """Reads a header.

        Raises:
            CacheError: no cache, or one of a format that this version does not know.
        """
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found = (value["format"], value["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(
                f"{path}: no readable cache header ({error})\n  fix: build with 'dspark cache'"
            ) from error
        if found != (FORMAT, VERSION):
            raise CacheError(
                f"{path}: format {found[0]} version {found[1]}, but this version"
                f" reads {FORMAT} {VERSION}\n  fix: use the version that wrote it"
            )
        try:
            value["tap_layers"] = tuple(value["tap_layers"])
            value["class_names"] = tuple(value["class_names"])
            value["languages"] = tuple(value["languages"])
            return cls(**value)
        except (KeyError, TypeError) as error:
            raise CacheError(
                f"{path}: damaged cache header ({error})\n  fix: rebuild the cache"
            ) from error

    def require_same(self, stored: "Header", path: Path) -> None:
        """Refuses to go on with another cache.

        Raises:
            CacheError: names the fields that differ, with both values.
        """
        mine, theirs = asdict(self), asdict(stored)
        diff = [k for k in mine if k != "cache_uuid" and mine[k] != theirs[k]]
        if diff:
            lines = "\n".join(f"  {k}: stored {theirs[k]}, asked for {mine[k]}" for k in diff)
            raise CacheError(
                f"{path} is another cache:\n{lines}\n  fix: give another run.name or cache.path, "
                "or delete the folder to start over"
            )


def create_store(folder: Path, header: Header, plan: Plan) -> Header:
    """Creates control files and empty arrays; the header comes last and is created exclusively."""
    for name in ("commits", "data.zarr"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.npy")
    group = zarr.open_group(folder / "data.zarr", mode="a")
    layout = header.layout
    rows = header.num_parts * layout.part_tokens
    for spec in array_specs(layout):
        per_file = (layout.part_tokens, *spec.token_shape)
        group.create_array(
            spec.name,
            shape=(rows, *spec.token_shape),
            chunks=(layout.chunk_tokens, *spec.token_shape) if spec.sharded else per_file,
            shards=per_file if spec.sharded else None,
            dtype=spec.dtype,
            fill_value=0,
            serializer=BytesCodec(endian="little") if spec.dtype != "uint8" else BytesCodec(),
            compressors=[Crc32cCodec()],
            chunk_key_encoding={"name": "default", "separator": "."},
            dimension_names=("token", *spec.dims),
            attributes={"bits_as": spec.bits_as} if spec.bits_as else {},
            overwrite=True,
        )
    stored = Header(**{**asdict(header), "cache_uuid": uuid.uuid4().hex})
    create_exclusive(folder / "cache.json", json.dumps(asdict(stored), indent=1) + "\n")
    return stored


def _floor_power(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _ceil_power(value: int) -> int:
    return 1 << (value - 1).bit_length()
