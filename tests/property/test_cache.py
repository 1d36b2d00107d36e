"""What is written into a cache comes back, whatever the sizes: by our reader and by stock zarr."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Row
from data.cache.build import build_cache, length_batches
from data.cache.codecs import decode_bf16, encode_bf16
from data.cache.format import (
    MIN_CHUNK_TOKENS,
    ArraySpec,
    Header,
    Layout,
    Plan,
    array_specs,
    create_store,
    plan_parts,
)
from data.cache.read import CacheReader, ObjectReader
from data.cache.records import commit_path
from data.cache.verify import describe_cache, verify_cache
from data.cache.write import ObjectWriter, PartWriter
from data.config import CacheConfig
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.tiny import TAPS, random_rows, tiny_target

M, D = 2, 3


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    layout: Layout

    @property
    def plan(self) -> Plan:
        return plan_parts(self.lengths, self.layout.part_tokens)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunk = 1 << draw(st.integers(0, 4))
    part = chunk << draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(1, part), min_size=1, max_size=8))
    return Case(tuple(lengths), Layout(M, D, chunk, part))


def random_tokens(spec: ArraySpec, count: int, generator: np.random.Generator) -> np.ndarray:
    top = int(np.iinfo(np.dtype(spec.dtype)).max)
    return generator.integers(0, top, (count, *spec.token_shape), spec.dtype, endpoint=True)


def write_store(folder: Path, case: Case) -> list[dict[str, np.ndarray]]:
    """Writes random tokens for every sample; returns them in the samples' order."""
    layout, plan = case.layout, case.plan
    counts = (plan.num_parts, len(case.lengths))
    header = Header(tuple(range(M)), D, 9, layout.chunk_tokens, layout.part_tokens, *counts,
                    "bf16", "", ("",), ("",), "float32")  # fmt: skip
    assert create_store(folder, header, plan).cache_uuid
    generator = np.random.default_rng(sum(case.lengths))
    specs = array_specs(layout)
    samples = [{s.name: random_tokens(s, n, generator) for s in specs} for n in case.lengths]
    for part in range(plan.num_parts):
        writer = PartWriter(folder, part, specs, layout)
        for i in plan.samples_of(part):
            writer.append(samples[i])
        written = writer.commit({})
        files = [folder / spec.object_key(part) for spec in specs]
        assert written == sum(path.stat().st_size for path in files)
    return samples


def open_object(folder: Path, spec: ArraySpec, layout: Layout, part: int) -> ObjectReader:
    record = json.loads(commit_path(folder, part).read_text())
    key = spec.object_key(part)
    return ObjectReader(folder / key, spec, layout, record["objects"][key]["bytes"])


@settings(max_examples=20)
@given(case=cases(), data=st.data())
def test_parts_read_back_by_us_and_by_stock_zarr(case: Case, data: st.DataObject) -> None:
    plan, layout = case.plan, case.layout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples = write_store(folder, case)
        group: Any = zarr.open(folder / "data.zarr", mode="r")
        for spec in array_specs(layout):
            stock = np.asarray(group[spec.name])
            assert stock.shape == (plan.num_parts * layout.part_tokens, *spec.token_shape)
            expected = np.zeros_like(stock)
            for i, sample in enumerate(samples):
                low = int(plan.parts[i]) * layout.part_tokens + int(plan.starts[i])
                expected[low : low + case.lengths[i]] = sample[spec.name]
            np.testing.assert_array_equal(stock, expected)
            part = data.draw(st.integers(0, plan.num_parts - 1))
            used = sum(case.lengths[i] for i in plan.samples_of(part))
            start = data.draw(st.integers(0, used))
            count = data.draw(st.integers(0, used - start))
            reader = open_object(folder, spec, layout, part)
            at = part * layout.part_tokens + start
            found = reader.tokens(start, count)
            assert found.dtype == np.dtype(spec.dtype)
            np.testing.assert_array_equal(found, expected[at : at + count])
            reader.verify()


@given(
    case=cases(),
    cuts=st.lists(st.integers(0, 128), max_size=6),
    sharded=st.booleans(),
    data=st.data(),
)
def test_object_does_not_depend_on_how_its_tokens_arrive(
    case: Case, cuts: list[int], sharded: bool, data: st.DataObject
) -> None:
    layout = case.layout
    spec = ArraySpec("x", "uint16", (D,), ("feature",), sharded)
    count = data.draw(st.integers(1, layout.part_tokens))
    tokens = random_tokens(spec, count, np.random.default_rng(count))
    with tempfile.TemporaryDirectory() as name:
        whole, pieces = (Path(name) / n for n in ("whole", "pieces"))
        edges = sorted({0, count, *(c for c in cuts if c < count)})
        for path, bounds in ((whole, [0, count]), (pieces, edges)):
            writer = ObjectWriter(path, spec, layout)
            for low, high in pairwise(bounds):
                writer.append(tokens[low:high])
            assert not path.exists()
            entry = writer.close()
            assert path.stat().st_size == entry["bytes"]
        assert whole.read_bytes() == pieces.read_bytes()
        assert sorted(p.name for p in Path(name).iterdir()) == ["pieces", "whole"]
        start = data.draw(st.integers(0, count))
        found = ObjectReader(pieces, spec, layout, entry["bytes"]).tokens(start, count - start)
        np.testing.assert_array_equal(found, tokens[start:])


@given(case=cases())
def test_plan_puts_every_sample_into_one_place_of_its_own(case: Case) -> None:
    with tempfile.TemporaryDirectory() as name:
        case.plan.save(Path(name) / "plan.npy")
        plan = Plan.load(Path(name) / "plan.npy")
    size = case.layout.part_tokens
    taken = np.zeros(plan.num_parts * size, dtype=int)
    for part, start, length in zip(plan.parts, plan.starts, case.lengths, strict=True):
        assert start >= 0
        assert start + length <= size
        taken[part * size + start :][:length] += 1
    assert taken.max() == 1
    assert taken.sum() == sum(case.lengths)
    members = [plan.samples_of(p) for p in range(plan.num_parts)]
    assert [i for m in members for i in sorted(m)] == list(range(len(case.lengths)))
    for part, inside in enumerate(members):
        lengths = [case.lengths[i] for i in inside]
        assert lengths == sorted(lengths, reverse=True)
        following = max(inside) + 1
        if part + 1 < plan.num_parts:  # closed only because the next sample did not fit
            assert sum(lengths) + case.lengths[following] > size


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    budget=st.integers(1, 300),
    order=st.randoms(use_true_random=False),
)
def test_length_batches_partition_and_keep_the_budget(
    lengths: list[int], budget: int, order: Any
) -> None:
    samples = list(range(len(lengths)))
    order.shuffle(samples)
    batches = list(length_batches(samples, np.array(lengths), budget))
    assert [i for batch in batches for i in batch] == samples
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget
        if following:
            with_next = max(longest, lengths[following[0]]) * (len(batch) + 1)
            assert with_next > budget


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 64)),
    longest=st.integers(1, 5000),
    part_bytes=st.integers(1, 1 << 22),
    chunk_bytes=st.integers(1, 1 << 18),
)
def test_layout_keeps_the_byte_limits_and_holds_the_longest_row(
    shape: tuple[int, int], longest: int, part_bytes: int, chunk_bytes: int
) -> None:
    layout = Layout.choose(*shape, longest, part_bytes, chunk_bytes)
    token_bytes = 2 * shape[0] * shape[1]
    assert layout.part_tokens >= longest
    assert layout.part_tokens == layout.chunks_per_part * layout.chunk_tokens
    assert layout.part_tokens.bit_count() == layout.chunk_tokens.bit_count() == 1
    needed = max(2 * longest - 1, MIN_CHUNK_TOKENS)
    assert layout.part_tokens * token_bytes <= part_bytes or layout.part_tokens <= needed
    assert layout.chunk_tokens >= MIN_CHUNK_TOKENS
    assert layout.chunk_tokens in (MIN_CHUNK_TOKENS, layout.part_tokens) or (
        layout.chunk_tokens * token_bytes <= chunk_bytes < 2 * layout.chunk_tokens * token_bytes
    )


@given(values=st.lists(st.floats(width=16, allow_nan=False), max_size=20))
def test_bf16_codec_is_exact_on_bf16_values(values: list[float]) -> None:
    states = torch.tensor(values, dtype=torch.bfloat16)
    bits = encode_bf16(states)
    assert bits.dtype == np.uint16
    assert torch.equal(decode_bf16(bits.copy()), states)
    assert torch.equal(decode_bf16(encode_bf16(states.float())), states)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def require_row(target: Target, found: Any, row: Row, exact: bool) -> None:
    output = target.forward(torch.tensor([row.token_ids]))
    assert found.token_ids.tolist() == list(row.token_ids)
    assert found.loss_mask.tolist() == row.loss_mask
    assert found.row_key == row.row_key
    # Rows of one batch are padded together: sums in another order may round to the next bf16.
    rtol, atol = (0.0, 0.0) if exact else (2**-7, 1e-3)
    for mine, own in ((found.taps, output.taps), (found.last, output.last)):
        torch.testing.assert_close(mine, own[0].bfloat16(), rtol=rtol, atol=atol)


@settings(max_examples=8)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=9, unique=True
    ),
    part_bytes=st.sampled_from([1, 1 << 14, 1 << 16]),
    batch_tokens=st.sampled_from([1, 64]),
)
def test_built_cache_holds_what_the_target_computes(
    target: Target, sizes: Sequence[tuple[int, int]], part_bytes: int, batch_tokens: int
) -> None:
    rows = random_rows(sizes, seed=len(sizes))
    config = CacheConfig(part_bytes=part_bytes, chunk_bytes=1 << 13, batch_tokens=batch_tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        summary = build_cache(target, rows, config, folder, Fingerprint.of_target(target))
        reader = CacheReader(folder)
        assert len(reader) == summary.manifest.num_samples == len(rows)
        assert summary.manifest.num_tokens == sum(len(row) for row in rows)
        assert summary.manifest.num_parts == summary.parts_built == reader.header.num_parts
        assert reader.header.tap_layers == TAPS
        for i, row in enumerate(rows):
            require_row(target, reader[i], row, exact=batch_tokens == 1)
            assert reader.header.class_names[reader.samples.class_ids[i]] == row.class_name
        report = verify_cache(folder)
        assert (report.objects, report.problems) == (4 * summary.manifest.num_parts, ())
        assert describe_cache(folder)["tokens"] == f"{summary.manifest.num_tokens:,}"
        states = [p for p in (folder / "data.zarr").glob("*/c.*") if p.is_file()]
        assert summary.manifest.total_bytes == sum(p.stat().st_size for p in states)


def test_row_with_non_finite_states_is_quarantined_by_its_source(
    target: Target, tmp_path: Path
) -> None:
    rows = random_rows([(4, 5), (9, 12), (3, 14)])

    def poison(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        for b, ids in enumerate(kwargs["input_ids"].tolist()):
            if tuple(ids[: len(rows[1])]) == rows[1].token_ids:
                output.last_hidden_state[b, 2, 0] = torch.nan

    handle = target.decoder.register_forward_hook(poison, with_kwargs=True)
    try:
        config = CacheConfig(self_check_tokens=1)
        summary = build_cache(target, rows, config, tmp_path, Fingerprint.of_target(target))
    finally:
        handle.remove()
    assert (len(summary.manifest.skipped), summary.manifest.num_samples) == (1, 2)
    line = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert line == {"source": rows[1].source, "reason": "non-finite states"}
    reader = CacheReader(tmp_path)
    kept = [reader[i].token_ids.tolist() for i in range(len(reader))]
    assert kept == [list(rows[0].token_ids), list(rows[2].token_ids)]
