"""From the cache to the steps of training: order, memory, errors, and where states are decoded."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batch import Batch, BatchHead
from data.cache.read import CacheReader
from data.cache.stored import StoredBatch
from data.config import Codec
from data.errors import ShardError
from data.loader import Step, StepLoader
from data.pool import BufferPool
from data.sampler import RowSampler
from tests.support.cached import header_of, make_case, mixed_rows, write_cache

CPU = torch.device("cpu")
HEADERS = {
    "exact": header_of(Codec.bf16, Codec.bf16, 12),
    "lossy": header_of(Codec.int8_h64_out8, Codec.int8_out32, 70),
    "law": header_of(Codec.int6_h64, None, 64, topk=9),
    "shared": header_of(Codec.bf16_zstd, Codec.nf4_h64, 70, topk=3, share_prefix=True),
}


@pytest.fixture(scope="module", params=HEADERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of ten rows; not to be written to."""
    case = make_case(HEADERS[request.param], mixed_rows())
    return write_cache(tmp_path_factory.mktemp("cache"), case).folder


@pytest.fixture
def exact(tmp_path: Path) -> CacheReader:
    return CacheReader(write_cache(tmp_path, make_case(HEADERS["exact"], mixed_rows())))


def loader_of(reader: CacheReader, **options: Any) -> StepLoader:
    """Steps of six rows in micro-batches of two."""
    return StepLoader(reader, RowSampler(len(reader), 0), 6, 2, **options)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    found = [batch.token_ids, batch.loss_mask, batch.taps]
    found += [] if batch.last is None else [batch.last]
    return found + ([] if batch.topk is None else list(vars(batch.topk).values()))


def prefetch_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_batches_are_the_same_wherever_they_are_decoded(folder: Path) -> None:
    reader = CacheReader(folder)
    pooled = CacheReader(folder, pool=BufferPool(1 << 20))
    here = loader_of(pooled, threads=3)
    there = loader_of(pooled, threads=2, decode=False)
    plain = loader_of(reader)
    steps = zip(here.steps(0, 4), there.steps(0, 4), strict=True)
    for number, (one, other) in enumerate(steps):
        groups = plain.rows_of(number)
        for rows, mine, stored in zip(groups, one.batches, other.batches, strict=True):
            assert isinstance(mine, Batch)
            assert isinstance(stored, StoredBatch)
            indices, epochs = zip(*rows, strict=True)
            expected = reader.read_batch(indices, epochs).to(CPU)
            for batch in (mine, stored.to(CPU)):
                assert vars(batch).keys() == vars(expected).keys()
                assert batch.lengths == expected.lengths
                assert (batch.row_keys, batch.epochs) == (expected.row_keys, tuple(epochs))
                for a, b in zip(tensors_of(batch), tensors_of(expected), strict=True):
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b)


def test_heads_are_those_of_the_batches(folder: Path) -> None:
    for step in loader_of(CacheReader(folder), threads=2, decode=False).steps(3, 6):
        batches = list(step.batches)
        assert len(step.heads) == len(batches) == 3
        for head, batch in zip(step.heads, batches, strict=True):
            assert type(head) is BatchHead
            assert torch.equal(head.loss_mask, batch.loss_mask)
            names = ("lengths", "row_keys", "epochs")
            assert [getattr(head, n) for n in names] == [getattr(batch, n) for n in names]


def consumed(loader: StepLoader, end: int, count: list[int]) -> Iterator[Step | Batch]:
    """What is handed out, one after another; counted when it is let go of."""
    for step in loader.steps(0, end):
        yield step
        count[0] += 1
        for batch in step.batches:
            assert isinstance(batch, Batch)
            yield batch
            count[0] += 1


def test_what_is_read_ahead_keeps_within_its_bytes(
    exact: CacheReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, lock = 6, threading.Lock()
    plain = loader_of(exact)
    sizes: list[int] = []  # in the order in which they are asked for: heads, three batches, ...
    for number in range(end):
        groups = [[row for row, _ in rows] for rows in plain.rows_of(number)]
        sizes += [0, *map(exact.batch_bytes, groups)]
    bound, begun, done, most = sum(sizes) // 4, [0], [0], [0]
    assert bound > 2 * max(sizes)
    true_load = StepLoader.load

    def counted(loader: StepLoader, rows: Any) -> Batch | StoredBatch:
        with lock:
            begun[0] += 1
            batches_done = done[0] - (done[0] + 3) // 4
            batches = [size for size in sizes if size]
            most[0] = max(most[0], sum(batches[batches_done : begun[0]]))
        return true_load(loader, rows)

    monkeypatch.setattr(StepLoader, "load", counted)
    loader = loader_of(exact, threads=2, max_bytes=bound)
    for _ in consumed(loader, end, done):
        pass
    assert done == [4 * end]
    assert begun == [3 * end]
    # Heads, a byte a token, are counted too and take a little of the room.
    assert max(sizes) < most[0] <= bound
    stats = loader.stats
    assert stats.items == 4 * end
    heads = sum(plain.reader.length(r) for n in range(end) for g in plain.rows_of(n) for r, _ in g)
    assert stats.bytes == sum(sizes) + heads
    assert 0 <= stats.waits <= stats.items
    assert stats.wait_s >= 0


def damage(reader: CacheReader, name: str, row: int) -> tuple[str, set[int]]:
    """Flips a bit of the last token of a row; returns the object and the rows in that chunk."""
    spec, piece = reader.specs[name], reader.samples.pieces(row)[-1]
    size = reader.header.chunk_tokens if spec.sharded else reader.header.part_tokens
    chunk, place = divmod(piece.start + piece.length - 1, size)
    key = spec.object_key(piece.part)
    with Path(reader.store.locate(key)).open("r+b") as file:
        at = chunk * (size * spec.token_bytes + 4) + place * spec.token_bytes
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return key, set(reader.samples.rows_in(piece.part, chunk * size, (chunk + 1) * size))


def run_through(loader: StepLoader, end: int, seen: list[tuple[int, ...]]) -> None:
    for number, step in enumerate(loader.steps(0, end)):
        seen.append((number,))
        for b, _ in enumerate(step.batches):
            seen.append((number, b))


@pytest.mark.parametrize("name", ["hidden", "loss_mask"])
def test_damage_ends_the_run_at_the_batch_that_needs_it(exact: CacheReader, name: str) -> None:
    plain, end = loader_of(exact), 4
    order = [(n, b, r) for n in range(end) for b, g in enumerate(plain.rows_of(n)) for r, _ in g]
    latest = max(range(len(exact)), key=[r for _, _, r in order].index)
    key, rows = damage(exact, name, latest)
    step, batch = next((n, b) for n, b, row in order if row in rows)
    assert step > 0
    seen: list[tuple[int, ...]] = []
    with pytest.raises(ShardError, match=re.escape(key)):
        run_through(loader_of(exact, threads=2), end, seen)
    whole = [(n, *b) for n in range(end) for b in ((), (0,), (1,), (2,))]
    # The heads of a step, before its batches, need the masks of all its rows.
    bad = (step,) if name == "loss_mask" else (step, batch)
    assert seen == whole[: whole.index(bad)]
    assert prefetch_threads() == []


def test_leaving_early_joins_the_threads(exact: CacheReader) -> None:
    for step in loader_of(exact, threads=3).steps(0, 10**9):
        next(step.batches)
        assert prefetch_threads()
        break
    del step
    assert prefetch_threads() == []


def test_an_error_of_the_consumer_joins_the_threads(exact: CacheReader) -> None:
    def consume() -> None:
        for step in loader_of(exact, threads=3).steps(0, 10**9):
            for batch in step.batches:
                raise RuntimeError(str(batch.lengths))

    with pytest.raises(RuntimeError):
        consume()
    assert prefetch_threads() == []
