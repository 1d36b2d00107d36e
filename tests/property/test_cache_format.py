"""The documents of a cache: what stock readers see, what our header accepts, and its sizes."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st

from data.cache.format import (
    DATA,
    HEADER_KEY,
    LAST,
    MIN_CHUNK_TOKENS,
    Header,
    Layout,
    array_specs,
    load_header,
    make_header,
)
from data.cache.metadata import document_keys, write_documents, zarr_documents
from data.cache.read import CacheReader
from data.cache.store import LocalStore
from data.config import CacheConfig, Codec
from data.errors import CacheError
from tests.support.cached import header_of, make_case, masked_row, write_cache
from tests.support.tiny import random_rows

# Pairs whose arrays have axes of one name and several lengths among them.
PAIRS = [
    (Codec.bf16, Codec.bf16_zstd),
    (Codec.int8_h64_out8, Codec.int8_out32),
    (Codec.int6_h64, Codec.nf4_h64),
    (Codec.int8_h64, Codec.bf16),
    (Codec.int4_h64, None),
]


@pytest.mark.parametrize("width", [64, 70])
@pytest.mark.parametrize(("taps", "last"), PAIRS)
def test_stock_readers_open_the_group_with_named_axes(
    tmp_path: Path, taps: Codec, last: Codec | None, width: int
) -> None:
    rows = random_rows([(7, 0), (20, 10), (9, 0)])
    case = make_case(header_of(taps, last, width, topk=5), rows)
    write_cache(tmp_path, case)
    group: Any = zarr.open_consolidated(tmp_path / DATA, mode="r")
    assert set(group.group_keys()) == {"samples"}
    opened = xarray.open_zarr(tmp_path / DATA)  # a warning would be an error
    specs = array_specs(case.header)
    assert set(opened.data_vars) == set(group.array_keys()) == {spec.name for spec in specs}
    for spec in specs:
        found = opened[spec.name]
        assert found.dims == group[spec.name].metadata.dimension_names == ("token", *spec.dims)
        assert dict(found.attrs) == dict(spec.attributes)
        np.testing.assert_array_equal(found[:7], case.arrays[0][spec.name])
    assert opened["hidden"].dims[:2] == ("token", "layer")
    assert opened.sizes["layer"] == 2
    tree = xarray.open_datatree(tmp_path / DATA, engine="zarr")
    lengths = tree["samples"]["length"]
    assert (lengths.dims, lengths.to_numpy().tolist()) == (("sample",), [7, 30, 9])
    assert group.attrs["hidden_cache"] == json.loads(case.header.to_bytes())


def test_tables_of_shared_prefixes_open_too(tmp_path: Path) -> None:
    rows = [masked_row([*range(9), i], [i % 2 == 0] * 10) for i in range(3)]
    write_cache(tmp_path, make_case(header_of(Codec.bf16, Codec.bf16, 4, share_prefix=True), rows))
    tree = xarray.open_datatree(tmp_path / DATA, engine="zarr")
    assert set(tree.children) == {"samples", "prefixes", "prefix_masks"}
    assert tree["prefixes"]["length"].to_numpy().tolist() == [9]
    assert tree["samples"]["length"].to_numpy().tolist() == [1, 1, 1]
    assert tree["prefix_masks"]["loss_mask"].to_numpy().tolist() == [1] * 9 + [0] * 9 + [1] * 9


def test_exact_states_say_what_their_bits_are(tmp_path: Path) -> None:
    case = make_case(header_of(Codec.bf16, Codec.bf16_zstd, 5), random_rows([(6, 0)]))
    write_cache(tmp_path, case)
    group: Any = zarr.open_group(tmp_path / DATA, mode="r")
    for name, states in (("hidden", case.taps(0)), ("last_hidden", case.last(0))):
        assert dict(group[name].attrs) == {"bits_as": "bfloat16"}
        bits = torch.from_numpy(group[name][:6].view(np.int16))
        assert torch.equal(bits.view(torch.bfloat16), states.bfloat16())


@pytest.mark.parametrize("kind", [Codec.int8_h64, Codec.int8_h64_out8, Codec.int8_out32])
def test_int8_states_can_be_decoded_from_the_attribute_alone(tmp_path: Path, kind: Codec) -> None:
    write_cache(tmp_path, make_case(header_of(kind, None, 100, topk=1), random_rows([(20, 0)])))
    group: Any = zarr.open_group(tmp_path / DATA, mode="r")
    quant = group["hidden"].attrs["quant"]
    codes, scale = group["hidden"][:20], group["hidden_scale"][:20].astype(np.float32)
    y = codes.reshape(20, 2, -1, quant["group"]).astype(np.float32) - quant["offset"]
    y *= scale[..., None]
    if n := quant.get("hadamard"):
        signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
        y @= np.array(signs, np.float32) / np.sqrt(n)
    states = y.reshape(20, 2, -1)[..., : quant["width"]]
    if "outliers" in quant:
        bits = group["hidden_outliers"][:20].astype(np.uint32) << 16
        for layer, channels in enumerate(quant["outliers"]):
            states[:, layer, channels] = bits.view(np.float32)[:, layer]
    # Ours were rounded to bf16 at last, by 2^-8 of a value at most. Sums of 64 may cancel.
    ours = CacheReader(tmp_path)[0].taps.float().numpy()
    np.testing.assert_allclose(states, ours, rtol=2**-8, atol=1e-5)


def test_documents_are_a_function_of_their_arguments() -> None:
    header = header_of(Codec.int8_h64, Codec.int8_out32, 64, topk=3)
    columns: dict[str, np.ndarray] = {"start": np.arange(3), "length": np.zeros(3, np.int32)}
    for tables in (None, {"samples": columns}):
        first, again = (zarr_documents(header, 3, tables) for _ in range(2))
        assert first == again
        assert set(document_keys(header)) <= first.keys()
        consolidated = "consolidated_metadata" in json.loads(first[f"{DATA}/zarr.json"])
        assert consolidated == (tables is not None)
        chunks = {key for key in first if not key.endswith("zarr.json")}
        assert chunks == {f"{DATA}/samples/{name}/c.0" for name in columns if tables}


def test_group_document_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(LocalStore, "write", lambda _self, key, _content: written.append(key))
    documents = zarr_documents(header_of(Codec.bf16, Codec.bf16, 4), 1, {"samples": {}})
    write_documents(LocalStore(tmp_path), dict(reversed(documents.items())))
    assert written[-1] == f"{DATA}/zarr.json"
    assert sorted(written) == sorted(documents)


HEADER = header_of(Codec.int8_h64, Codec.int8_out32, 64, topk=7)


def refused(tmp_path: Path, **change: Any) -> str:
    value = {k: v for k, v in {**asdict(HEADER), **change}.items() if v is not ...}
    (tmp_path / HEADER_KEY).write_text(json.dumps(value))
    with pytest.raises(CacheError) as caught:
        load_header(LocalStore(tmp_path))
    assert str(tmp_path / HEADER_KEY) in str(caught.value)
    assert "fix:" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("change", [{"version": 1}, {"version": 3}, {"format": "other"}])
def test_header_of_another_version_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    text = refused(tmp_path, **change)
    assert "hidden-cache 2" in text
    assert str(next(iter(change.values()))) in text


@pytest.mark.parametrize(
    "change",
    [{"taps": "int3"}, {"last": "int3"}, {"another": 1}, {"hidden_size": ...}, {"tap_layers": 3}],
)
def test_header_that_cannot_be_understood_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert "damaged cache header" in refused(tmp_path, **change)


def test_header_holds_every_key_and_comes_back(tmp_path: Path) -> None:
    header = replace(HEADER, outliers={LAST: list(range(32))}, fidelity={"topk": {"mass": 0.5}})
    assert json.loads(header.to_bytes()).keys() == {f.name for f in fields(Header)}
    LocalStore(tmp_path).create(HEADER_KEY, header.to_bytes())
    assert load_header(LocalStore(tmp_path)) == header


@given(
    token_bytes=st.integers(1, 1 << 13),
    longest=st.integers(1, 5000),
    part_bytes=st.integers(1, 1 << 22),
    chunk_bytes=st.integers(1, 1 << 18),
)
def test_layout_takes_the_largest_sizes_within_its_limits(
    token_bytes: int, longest: int, part_bytes: int, chunk_bytes: int
) -> None:
    layout = Layout.choose(token_bytes, longest, part_bytes, chunk_bytes)
    part, chunk = layout.part_tokens, layout.chunk_tokens
    assert part.bit_count() == chunk.bit_count() == 1
    assert part == layout.chunks_per_part * chunk
    assert part >= longest
    # Above the limit only where the longest row, or the smallest chunk, needs it.
    assert part * token_bytes <= part_bytes or part // 2 < max(longest, MIN_CHUNK_TOKENS)
    assert 2 * part * token_bytes > part_bytes
    assert chunk * token_bytes <= chunk_bytes or chunk == MIN_CHUNK_TOKENS
    assert chunk == part or 2 * chunk * token_bytes > chunk_bytes


@given(taps=st.sampled_from(Codec), last=st.sampled_from(Codec), width=st.integers(1, 200))
def test_layout_of_a_header_counts_the_largest_array(taps: Codec, last: Codec, width: int) -> None:
    config = CacheConfig(
        taps=taps.value, last=last.value, topk=300, part_bytes=1 << 16, chunk_bytes=1 << 13
    )
    header = make_header(((0, 1), width, 259), "float32", 1, config)
    assert header.topk == 259
    largest = max(spec.token_bytes for spec in array_specs(header))
    assert header.layout == Layout.choose(largest, 1, 1 << 16, 1 << 13)
