"""The on-disk format: sizes, arrays and header. See docs/cache-format.md.

P parts of CAP token slots each; a piece of a row never crosses a part; token ``t`` of a piece lies
at slot ``part * CAP + start + t``. One object holds one part of one array.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from data.cache.codecs import StateCodec, needs_outliers
from data.cache.store import Store
from data.config import CacheConfig, Codec
from data.errors import CacheError

FORMAT, VERSION = "hidden-cache", 2
HEADER_KEY = "cache.json"
DATA = "data.zarr"
TAPS, LAST = "hidden", "last_hidden"
BF16_BYTES = 2
MIN_CHUNK_TOKENS = 16
CHECKSUM_BYTES = 4
INDEX_ENTRY_BYTES = 16
ABSENT = 2**64 - 1
_UINT16_IDS = 1 << 16


@dataclass(frozen=True)
class Layout:
    """Sizes of the store. ``chunk_tokens`` (T) divides ``part_tokens`` (CAP)."""

    chunk_tokens: int
    part_tokens: int

    @classmethod
    def choose(
        cls, token_bytes: int, max_length: int, part_bytes: int, chunk_bytes: int
    ) -> "Layout":
        """The largest powers of two within the byte limits (and room for the longest row).

        Args:
            token_bytes: of one token in the largest array.
            max_length: tokens of the longest row.
            part_bytes: largest part of an array.
            chunk_bytes: largest chunk of an array.
        """
        part = max(_floor_power(part_bytes // token_bytes), _ceil_power(max_length))
        chunk = max(_floor_power(chunk_bytes // token_bytes), MIN_CHUNK_TOKENS)
        part = max(part, MIN_CHUNK_TOKENS)
        return cls(min(chunk, part), part)

    @property
    def chunks_per_part(self) -> int:
        """Checksummed chunks of one shard."""
        return self.part_tokens // self.chunk_tokens


@dataclass(frozen=True)
class ArraySpec:
    """One array.

    Attributes:
        dtype: numpy's name of the stored type; little-endian.
        token_shape: shape of one token.
        dims: names of the axes behind the token axis.
        sharded: shards of inner chunks, or one chunk a part.
        compression: ``zstd`` or None.
        attributes: Zarr attributes: what a reader without our code needs to know.
    """

    name: str
    dtype: str
    token_shape: tuple[int, ...]
    dims: tuple[str, ...]
    sharded: bool = True
    compression: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token before compression."""
        return np.dtype(self.dtype).itemsize * math.prod(self.token_shape)

    def object_key(self, part: int) -> str:
        """Key of one part (separator '.': one folder an array)."""
        zeros = ".0" * len(self.token_shape)
        return f"{DATA}/{self.name}/c.{part}{zeros}"


@dataclass(frozen=True)
class Header:
    """``cache.json``: what the cache is. Written once; a later build must agree on it.

    Attributes:
        taps, last: codecs of tapped states and last state; ``last`` is None without it.
        topk: likeliest tokens whose log-probabilities are kept; 0 keeps none.
        outliers: channels that a codec keeps exact, by array; chosen on the target's own states.
        fidelity: what the codecs cost on this target, measured before the build.
    """

    tap_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    chunk_tokens: int
    part_tokens: int
    taps: str
    last: str | None
    topk: int
    share_prefix: bool
    target_precision: str
    outliers: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    cache_uuid: str = ""
    created_by: str = ""
    format: str = FORMAT
    version: int = VERSION
    layer_convention: str = "output of block i"
    last_convention: str = "after the final norm"

    @property
    def layout(self) -> Layout:
        """Sizes of the store."""
        return Layout(self.chunk_tokens, self.part_tokens)

    def codec(self, name: str) -> StateCodec:
        """The codec of `TAPS` or `LAST`."""
        kind = Codec(self.taps if name == TAPS else self.last)
        ids = self.outliers.get(name)
        lead = (len(self.tap_layers),) if name == TAPS else ()
        tensor = None if ids is None else torch.tensor(ids, dtype=torch.long)
        return StateCodec(kind, self.hidden_size, lead, tensor)

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Header":
        """Reads a header.

        Raises:
            CacheError: damaged, or of a format that this version does not know.
        """
        try:
            value: dict[str, Any] = json.loads(content)
            found = (value["format"], value["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(
                f"{where}: no readable cache header ({error})\n"
                "  fix: run 'dspark cache mode=repair'"
            ) from error
        if found != (FORMAT, VERSION):
            raise CacheError(
                f"{where}: format {found[0]} version {found[1]}, but this version"
                f" reads {FORMAT} {VERSION}\n  fix: use the version that wrote it"
            )
        try:
            value["tap_layers"] = tuple(value["tap_layers"])
            header = cls(**value)
            array_specs(header)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CacheError(
                f"{where}: damaged cache header ({error})\n  fix: run 'dspark cache mode=repair'"
            ) from error
        return header

    def to_bytes(self) -> bytes:
        """The JSON document."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    def require_same(self, stored: "Header", where: str) -> None:
        """Refuses to go on with another cache.

        Raises:
            CacheError: names the fields that differ, with both values.
        """
        mine, theirs = asdict(self), asdict(stored)
        free = ("cache_uuid", "created_by", "fidelity", "outliers")
        diff = [k for k in mine if k not in free and mine[k] != theirs[k]]
        if diff:
            lines = "\n".join(f"  {k}: stored {theirs[k]}, asked for {mine[k]}" for k in diff)
            raise CacheError(
                f"{where} is another cache:\n{lines}\n  fix: give another run.name or cache.path, "
                "or delete the folder to start over"
            )


def load_header(store: Store) -> Header:
    """The header of the cache in a store.

    Raises:
        CacheError: no cache, or see `Header.parse`.
    """
    try:
        content = store.read(HEADER_KEY)
    except FileNotFoundError as error:
        raise CacheError(f"{store.url}: no cache\n  fix: build it with 'dspark cache'") from error
    return Header.parse(content, store.locate(HEADER_KEY))


def make_header(
    shape: tuple[tuple[int, ...], int, int],
    target_precision: str,
    max_length: int,
    config: CacheConfig,
) -> Header:
    """The header of a cache that is to be built, without what only the target can tell.

    Args:
        shape: tapped layers, hidden size, vocabulary of the target.
        target_precision: type in which the target runs.
        max_length: tokens of the longest row.
        config: codecs and sizes.
    """
    tap_layers, hidden_size, vocab_size = shape
    header = Header(
        tap_layers=tap_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        chunk_tokens=1,
        part_tokens=1,
        taps=config.taps_codec.value,
        last=config.last_codec.value if config.last_codec else None,
        topk=min(config.topk, vocab_size),
        share_prefix=config.share_prefix,
        target_precision=target_precision,
    )
    largest = max(spec.token_bytes for spec in array_specs(header))
    layout = Layout.choose(largest, max_length, config.part_bytes, config.chunk_bytes)
    sizes = {"chunk_tokens": layout.chunk_tokens, "part_tokens": layout.part_tokens}
    return Header(**{**vars(header), **sizes})


def array_specs(header: Header) -> tuple[ArraySpec, ...]:
    """The arrays of a cache. bf16 is stored as its bits in uint16: stock zarr and xarray cannot
    open a bfloat16 array.
    """
    specs = _state_specs(header, TAPS, ("layer",))
    if header.last is not None:
        specs += _state_specs(header, LAST, ())
    if header.topk:
        k, ids = (header.topk,), "uint16" if header.vocab_size <= _UINT16_IDS else "uint32"
        specs += [
            ArraySpec("topk_ids", ids, k, ("k",)),
            ArraySpec("topk_logprobs", "float16", k, ("k",)),
            ArraySpec("logsumexp", "float32", (), ()),
        ]
    return (
        *_named_apart(specs),
        ArraySpec("input_ids", "int32", (), (), sharded=False),
        ArraySpec("loss_mask", "uint8", (), (), sharded=False),
    )


def token_bytes(header: Header) -> int:
    """Bytes of one token in all arrays, before compression."""
    return sum(spec.token_bytes for spec in array_specs(header))


def raw_token_bytes(num_layers: int, hidden_size: int) -> int:
    """Bytes of one token's states in plain bf16: tapped layers and last state."""
    return BF16_BYTES * (num_layers + 1) * hidden_size


def _state_specs(header: Header, name: str, lead: tuple[str, ...]) -> list[ArraySpec]:
    kind = Codec(header.taps if name == TAPS else header.last)
    if needs_outliers(kind) and name not in header.outliers:
        # Sizes are asked for before the target has chosen the channels; any will do for them.
        count = min(needs_outliers(kind), header.hidden_size)
        ids = list(range(count))
        outliers = {**header.outliers, name: [ids] * len(header.tap_layers) if lead else ids}
        header = Header(**{**vars(header), "outliers": outliers})
    codec = header.codec(name)
    return [
        ArraySpec(
            name + part.suffix,
            part.dtype,
            part.shape,
            (*lead, *part.dims),
            compression=codec.compression,
            attributes=part.attributes,
        )
        for part in codec.components()
    ]


def _named_apart(specs: Iterable[ArraySpec]) -> Iterator[ArraySpec]:
    """An axis is named after its array when an earlier one has that name and another length:
    xarray opens no group in which a name has two lengths.
    """
    sizes: dict[str, int] = {}
    for spec in specs:
        axes = zip(spec.dims, spec.token_shape, strict=True)
        dims = (d if sizes.setdefault(d, n) == n else f"{spec.name}_{d}" for d, n in axes)
        yield replace(spec, dims=tuple(dims))


def _floor_power(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1


def _ceil_power(value: int) -> int:
    return 1 << (value - 1).bit_length()
