"""Zarr's own documents, made by zarr-python in memory and written through our store.

The only module that knows zarr: shards are written and read without it (see `data.cache.write`).
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec
from zarr.errors import ZarrUserWarning
from zarr.storage import MemoryStore

from data.cache.format import DATA, Header, array_specs
from data.cache.store import Store

# Table -> name of its axis.
TABLES = {"samples": "sample", "prefixes": "piece", "prefix_masks": "prefix_token"}
ZSTD_LEVEL = 1
# The group keeps a second copy of the header, from which a damaged one is mended.
HEADER_ATTRIBUTE = "hidden_cache"
_KEYS: dict[str, Any] = {"name": "default", "separator": "."}


def zarr_documents(
    header: Header, num_parts: int, tables: Mapping[str, Mapping[str, np.ndarray]] | None = None
) -> dict[str, bytes]:
    """Every ``zarr.json`` of the group and, when the cache is complete, its tables.

    Args:
        header: what the cache is.
        num_parts: parts of the whole cache; sets the length of the token axis.
        tables: columns of `TABLES`; None while the cache is being built.

    Returns:
        documents by key; a function of the arguments alone.
    """
    memory: dict[str, Any] = {}
    store = MemoryStore(memory)
    group = zarr.create_group(store, attributes={HEADER_ATTRIBUTE: asdict(header)})
    layout = header.layout
    rows = num_parts * layout.part_tokens
    for spec in array_specs(header):
        per_part = (layout.part_tokens, *spec.token_shape)
        inner = (layout.chunk_tokens, *spec.token_shape)
        zstd = [ZstdCodec(level=ZSTD_LEVEL)] if spec.compression == "zstd" else []
        one_byte = np.dtype(spec.dtype).itemsize == 1
        group.create_array(
            spec.name,
            shape=(rows, *spec.token_shape),
            chunks=inner if spec.sharded else per_part,
            shards=per_part if spec.sharded else None,
            dtype=spec.dtype,
            fill_value=0,
            serializer=BytesCodec() if one_byte else BytesCodec(endian="little"),
            compressors=[*zstd, Crc32cCodec()],
            chunk_key_encoding=_KEYS,
            dimension_names=("token", *spec.dims),
            attributes=dict(spec.attributes),
        )
    if tables is not None:
        for name, columns in tables.items():
            _add_table(group, name, columns)
        with warnings.catch_warnings():
            # Readers without consolidated metadata ignore it; others open with one request.
            warnings.simplefilter("ignore", ZarrUserWarning)
            zarr.consolidate_metadata(store)
    return {f"{DATA}/{key}": memory[key].to_bytes() for key in sorted(memory)}


def table_key(table: str, column: str) -> str:
    """Key of the one chunk that holds a column."""
    return f"{DATA}/{table}/{column}/c.0"


def document_keys(header: Header) -> list[str]:
    """Keys of the group's and the arrays' documents, in order."""
    return [f"{DATA}/zarr.json", *(f"{DATA}/{s.name}/zarr.json" for s in array_specs(header))]


def write_documents(store: Store, documents: Mapping[str, bytes]) -> None:
    """Writes documents; the group's last, because with it the others become visible."""
    for key in sorted(documents, key=lambda k: (k == f"{DATA}/zarr.json", k)):
        store.write(key, documents[key])


def _add_table(group: zarr.Group, name: str, columns: Mapping[str, np.ndarray]) -> None:
    table = group.create_group(name)
    for column, values in columns.items():
        one_byte = values.dtype.itemsize == 1
        array = table.create_array(
            column,
            shape=values.shape,
            chunks=(max(len(values), 1),),
            dtype=values.dtype,
            fill_value=0,
            serializer=BytesCodec() if one_byte else BytesCodec(endian="little"),
            compressors=[Crc32cCodec()],
            chunk_key_encoding=_KEYS,
            dimension_names=(TABLES[name],),
            config={"write_empty_chunks": True},  # a chunk of zeros is written too
        )
        array[:] = values
