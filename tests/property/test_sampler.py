"""The order of rows and the batches of a step: stateless, equal for any number of ranks."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch, CachedRow
from data.cache.read import CacheReader
from data.cache.stored import StoredBatch
from data.errors import ShardError
from data.loader import StepLoader
from data.sampler import RowSampler
from data.target import Target
from tests.support.collate import collate
from tests.support.tiny import CPU, random_rows, tiny_cache, tiny_target

ROWS = random_rows([(2 + i % 5, 3 + 7 * i % 11) for i in range(13)])


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_cache(target, ROWS, tmp_path_factory.mktemp("c") / "cache", part_bytes=1 << 14)


@pytest.fixture(scope="module")
def reader(folder: Path) -> CacheReader:
    return CacheReader(folder)


def order(sampler: RowSampler, epochs: int) -> list[tuple[int, int]]:
    return [sampler.at(i) for i in range(epochs * sampler.num_rows)]


sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)


@given(num_rows=sizes, seed=seeds, epochs=st.integers(1, 6))
def test_each_epoch_is_a_permutation(num_rows: int, seed: int, epochs: int) -> None:
    rows = order(RowSampler(num_rows, seed), epochs)
    for epoch in range(epochs):
        chunk = rows[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(chunk) == [(row, epoch) for row in range(num_rows)]


@given(num_rows=sizes, seed=seeds, rows_per_step=st.integers(1, 50), start=st.integers(0, 5))
def test_fresh_sampler_at_a_step_gives_the_tail_of_the_whole_order(
    num_rows: int, seed: int, rows_per_step: int, start: int
) -> None:
    sampler = RowSampler(num_rows, seed)
    whole = [item for step in range(8) for item in sampler.step(step, rows_per_step)]
    assert whole == [sampler.at(i) for i in range(8 * rows_per_step)]
    resumed = RowSampler(num_rows, seed)
    tail = [item for step in range(start, 8) for item in resumed.step(step, rows_per_step)]
    assert tail == whole[start * rows_per_step :]


@given(seed=st.integers(0, 2**32 - 2), epoch=st.integers(0, 5))
def test_seeds_and_epochs_give_different_orders(seed: int, epoch: int) -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        sampler = RowSampler(50, seed)
        return [sampler.at(epoch * 50 + i)[0] for i in range(50)]

    orders = [rows(seed, epoch), rows(seed + 1, epoch), rows(seed, epoch + 1)]
    orders.append(rows(seed + 1, epoch + 1))
    assert len({tuple(o) for o in orders}) == len(orders)


def loader(reader: CacheReader, rank: int = 0, num_ranks: int = 1, micro: int = 2) -> StepLoader:
    return StepLoader(reader, RowSampler(len(reader), 3), 8, micro, rank, num_ranks)


@settings(max_examples=20)
@given(step=st.integers(0, 20), micro=st.sampled_from([1, 2]))
def test_rows_of_a_step_do_not_depend_on_the_number_of_ranks(
    reader: CacheReader, step: int, micro: int
) -> None:
    alone = loader(reader, micro=micro).rows_of(step)
    expected = sorted(RowSampler(len(reader), 3).step(step, 8))
    assert sorted(item for batch in alone for item in batch) == expected
    for num_ranks in (2, 4):
        ranks = [loader(reader, r, num_ranks, micro).rows_of(step) for r in range(num_ranks)]
        assert sorted(item for rank in ranks for batch in rank for item in batch) == expected
        for rank in ranks:
            assert [len(batch) for batch in rank] == [micro] * (8 // num_ranks // micro)


def test_micro_batches_hold_rows_of_like_length(reader: CacheReader) -> None:
    lengths = reader.samples.lengths
    for step in range(5):
        flat = [int(lengths[row]) for batch in loader(reader).rows_of(step) for row, _ in batch]
        assert flat == sorted(flat, reverse=True)
        two = [loader(reader, r, 2).rows_of(step) for r in range(2)]
        first, second = ([int(lengths[row]) for b in rank for row, _ in b] for rank in two)
        assert all(a >= b for a, b in zip(first, second, strict=True))


def test_loaded_batches_hold_the_rows_of_the_step(reader: CacheReader) -> None:
    one = loader(reader)
    for rows in one.rows_of(1):
        batch = one.load(rows)
        assert isinstance(batch, Batch)
        assert batch.epochs == tuple(epoch for _, epoch in rows)
        assert batch.row_keys == tuple(ROWS[row].row_key for row, _ in rows)
        for b, (row, _) in enumerate(rows):
            length = batch.lengths[b]
            assert batch.token_ids[b, :length].tolist() == list(ROWS[row].token_ids)
            assert batch.loss_mask[b, :length].tolist() == ROWS[row].loss_mask
            assert torch.equal(batch.taps[b, :length], reader[row].taps)


def same(a: Batch, b: Batch) -> bool:
    tensors = all(
        torch.equal(getattr(a, n), getattr(b, n)) for n in ("token_ids", "loss_mask", "taps")
    )
    assert a.last is not None
    assert b.last is not None
    return tensors and torch.equal(a.last, b.last) and a.row_keys == b.row_keys


@pytest.mark.parametrize(("first", "end"), [(0, 0), (0, 1), (2, 9)])
def test_read_ahead_gives_the_steps_in_order(reader: CacheReader, first: int, end: int) -> None:
    one = loader(reader)
    found = [(step.heads, list(step.batches)) for step in one.steps(first, end)]
    assert len(found) == end - first
    for step, (heads, batches) in zip(range(first, end), found, strict=True):
        for head, batch, rows in zip(heads, batches, one.rows_of(step), strict=True):
            expected = one.load(rows)
            assert isinstance(batch, Batch)
            assert isinstance(expected, Batch)
            assert same(batch, expected)
            assert torch.equal(head.loss_mask, batch.loss_mask)
            assert (head.lengths, head.row_keys) == (batch.lengths, batch.row_keys)
            assert head.epochs == batch.epochs


def test_batches_decoded_on_the_device_are_those_decoded_by_the_loader(
    reader: CacheReader,
) -> None:
    one, other = loader(reader), replace(loader(reader), decode=False, threads=2, max_bytes=1)
    pairs = zip(one.steps(0, 4), other.steps(0, 4), strict=True)
    for here, there in pairs:
        for a, b in zip(here.batches, there.batches, strict=True):
            assert isinstance(b, StoredBatch)
            assert same(a.to(CPU), b.to(CPU))
    assert other.stats.items >= 4


def test_error_in_the_thread_reaches_the_caller_at_the_step_that_needs_the_row(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "cache"))
    reader = CacheReader(copy)
    one = StepLoader(reader, RowSampler(len(reader), 0), 1, 1)
    rows = [one.rows_of(step)[0][0][0] for step in range(len(reader))]
    parts = [reader.samples.pieces(row)[-1].part for row in rows]
    bad = next(step for step in range(4, len(rows)) if parts[step] not in parts[:step])
    path = copy / reader.specs["hidden"].object_key(parts[bad])
    os.truncate(path, 10)
    steps = one.steps(0, len(rows))
    for _ in range(bad):
        list(next(steps).batches)
    broken = next(steps)
    with pytest.raises(ShardError) as error:
        list(broken.batches)
    assert error.value.path == path


lengths_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(lengths=lengths_of_rows)
def test_collate_pads_on_the_right_and_keeps_lengths(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [
        CachedRow(
            torch.randint(1, 9, (n,), generator=generator),
            torch.ones(n, dtype=torch.bool),
            torch.rand(n, 2, 3, generator=generator) + 1,
            torch.rand(n, 3, generator=generator) + 1,
            row_key=100 + n,
        )
        for n in lengths
    ]
    batch = collate(rows, range(len(rows)))
    assert batch.lengths == tuple(lengths)
    assert batch.row_keys == tuple(100 + n for n in lengths)
    assert batch.epochs == tuple(range(len(rows)))
    assert batch.token_ids.shape == (len(rows), max(lengths))
    for name in ("token_ids", "loss_mask", "taps", "last"):
        whole = getattr(batch, name)
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            assert torch.equal(whole[b, :n], getattr(row, name))
            assert not whole[b, n:].any()
    assert same(batch.to(CPU), batch)
    assert (batch.to(CPU).lengths, batch.to(CPU).epochs) == (batch.lengths, batch.epochs)
