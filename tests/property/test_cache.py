"""What is written into a cache comes back, whatever the sizes and codecs: by our reader, and by
stock zarr-python and tensorstore.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from data.cache.format import DATA, LAST, TAPS, ArraySpec, Layout, array_specs
from data.cache.passes import length_batches
from data.cache.read import CacheReader
from data.cache.records import CommitRecord
from data.cache.shards import ObjectReader
from data.cache.store import LocalStore
from data.cache.write import ObjectWriter
from data.config import Check, Codec
from data.errors import ShardError
from tests.support.cached import Case, cut_up, header_of, make_case, write_cache
from tests.support.tiny import random_rows

# The last vocabulary of 16-bit ids, whose upper half is negative as int16, and the next one.
VOCABULARIES = (259, 1 << 16, (1 << 16) + 1)


# Each codec once for the tapped states and once for the last one.
PAIRS = list(zip(Codec, [*list(Codec)[3:], *list(Codec)[:3]], strict=True))


@st.composite
def cases(draw: st.DrawFn, taps: Codec, kind: Codec) -> Case:
    chunk = 1 << draw(st.integers(0, 4))
    part = chunk << draw(st.integers(0, 3))
    last = draw(st.sampled_from([kind, kind, None]))
    topk = draw(st.sampled_from([1, 9, 200] if last is None else [0, 9, 200]))
    header = header_of(
        taps,
        last,
        draw(st.integers(1, 130)),
        tap_layers=tuple(range(draw(st.integers(1, 3)))),
        topk=topk,
        vocab_size=draw(st.sampled_from(VOCABULARIES)) if topk else 259,
        chunk_tokens=chunk,
        part_tokens=part,
    )
    lengths = draw(st.lists(st.integers(1, part), min_size=1, max_size=5))
    answers = [n // 2 * draw(st.integers(0, 1)) for n in lengths]
    rows = random_rows([(n - m, m) for n, m in zip(lengths, answers, strict=True)])
    return make_case(header, rows)


def expected_array(case: Case, spec: ArraySpec) -> np.ndarray:
    """The whole array: every token at its place, zeros everywhere else."""
    plan, size = case.plan, case.header.part_tokens
    whole = np.zeros((plan.end_part * size, *spec.token_shape), spec.dtype)
    for i, row in enumerate(case.rows):
        low = int(plan.parts[i]) * size + int(plan.starts[i])
        whole[low : low + len(row)] = case.arrays[i][spec.name]
    return whole


def require_ours(store: LocalStore, case: Case, spec: ArraySpec, whole: np.ndarray) -> None:
    """Whole parts, and some tokens of them. Chunks behind the last token do not exist."""
    header, plan, cuts = case.header, case.plan, random.Random(len(whole))
    key_of = spec.object_key
    for part in range(plan.end_part):
        used = int(plan.lengths[plan.entries_of(part)].sum())
        size = header.chunk_tokens if spec.sharded else header.part_tokens
        stored = -(-used // size) * size
        there = whole[part * header.part_tokens :][:stored]
        recorded = CommitRecord.load(store, part).objects[key_of(part)]
        for check in Check:
            reader = ObjectReader(store, key_of(part), spec, header.layout, recorded, check)
            for cut in (slice(0, stored), *cut_up(stored, cuts)):
                out = np.full_like(there[cut], 77)
                reader.read_into(out, cut.start)
                np.testing.assert_array_equal(out, there[cut])
            assert list(reader.bad_chunks()) == []
            if stored < header.part_tokens:
                with pytest.raises(ShardError, match="absent"):
                    reader.read_into(np.empty((1, *spec.token_shape), spec.dtype), stored)


def require_rows(reader: CacheReader, case: Case) -> None:
    """Decoded rows are what the codecs make of the states, and the likeliest tokens."""
    for i, row in enumerate(case.rows):
        found = reader[i]
        assert found.token_ids.tolist() == list(row.token_ids)
        assert found.loss_mask.tolist() == row.loss_mask
        codec = case.header.codec(TAPS)
        assert torch.equal(found.taps, codec.decode(codec.encode(case.taps(i))))
        assert (found.last is not None) == (case.header.last is not None)
        if found.last is not None:
            codec = case.header.codec(LAST)
            assert torch.equal(found.last, codec.decode(codec.encode(case.last(i))))
        assert (found.topk is not None) == bool(case.header.topk)
        if found.topk is not None:
            best, total = case.logits(i).topk(case.header.topk), case.logits(i).logsumexp(-1)
            assert torch.equal(found.topk.ids, best.indices)
            assert torch.equal(found.topk.logsumexp, total)
            assert torch.equal(found.topk.logprobs, (best.values - total[:, None]).half().float())


@pytest.mark.parametrize(("taps", "last"), PAIRS)
def test_stored_values_are_the_same_to_us_zarr_and_tensorstore(taps: Codec, last: Codec) -> None:
    # A failure is shown as it was found: a smaller one would take minutes of writing.
    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(case=cases(taps, last), seed=st.integers(0, 99))
    def check(case: Case, seed: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            store = write_cache(Path(name), case, seed)
            group: Any = zarr.open_group(store.folder / DATA, mode="r")
            for spec in array_specs(case.header):
                whole = expected_array(case, spec)
                assert group[spec.name].dtype == whole.dtype
                np.testing.assert_array_equal(group[spec.name][:], whole)
                place = {"driver": "file", "path": str(store.folder / DATA / spec.name)}
                array = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
                np.testing.assert_array_equal(np.asarray(array.read().result()), whole)
                require_ours(store, case, spec, whole)
            require_rows(CacheReader(store), case)

    check()


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_ids_keep_their_bits_at_every_vocabulary(tmp_path: Path, vocab: int) -> None:
    header = header_of(Codec.bf16, None, 8, vocab_size=vocab, topk=min(vocab, 60_000))
    case = make_case(header, random_rows([(3, 0), (1, 1)]))
    store = write_cache(tmp_path, case)
    stored: Any = zarr.open_group(tmp_path / DATA, mode="r")["topk_ids"]
    assert stored.dtype == ("uint16" if vocab <= 1 << 16 else "uint32")
    # Most tokens are kept, so ids are there that 15 bits cannot hold.
    assert int(stored[:].max()) >= min(vocab - 1, 1 << 15)
    require_rows(CacheReader(store), case)


@given(
    chunk=st.integers(0, 4),
    chunks=st.integers(0, 3),
    sharded=st.booleans(),
    compression=st.sampled_from([None, "zstd"]),
    data=st.data(),
)
def test_object_does_not_depend_on_how_its_tokens_arrive(
    chunk: int, chunks: int, sharded: bool, compression: str | None, data: st.DataObject
) -> None:
    layout = Layout(1 << chunk, 1 << (chunk + chunks))
    zstd = compression if sharded else None
    spec = ArraySpec("x", "uint16", (3,), ("feature",), sharded, zstd)
    count = data.draw(st.integers(1, layout.part_tokens))
    tokens = np.random.default_rng(count).integers(0, 9, (count, 3), np.uint16)
    cuts = list(cut_up(count, data.draw(st.randoms(use_true_random=False))))
    with tempfile.TemporaryDirectory() as name:
        store = LocalStore(Path(name))
        for key, bounds in (("whole", [slice(0, count)]), ("pieces", cuts)):
            writer = ObjectWriter(store.open_sink(key, "token"), spec, layout)
            for cut in bounds:
                writer.append(tokens[cut])
            assert not store.exists(key)
            entry = writer.close()
            assert store.size(key) == entry["bytes"]
        assert store.read("whole") == store.read("pieces")
        assert store.list("").keys() == {"pieces", "whole"}
        start = data.draw(st.integers(0, count))
        found = np.empty((count - start, 3), np.uint16)
        recorded = (entry["bytes"], entry["crc32c"])
        ObjectReader(store, "pieces", spec, layout, recorded).read_into(found, start)
        np.testing.assert_array_equal(found, tokens[start:])


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    budget=st.integers(1, 300),
    order=st.randoms(use_true_random=False),
)
def test_length_batches_partition_and_keep_the_budget(
    lengths: list[int], budget: int, order: random.Random
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
