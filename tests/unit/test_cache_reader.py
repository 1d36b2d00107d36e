"""Reading rows back: padding, memory, cut rows, checksums, and readers in threads and processes."""

import gc
import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from torch import Tensor

from data.cache import read
from data.cache.format import array_specs
from data.cache.read import CacheReader
from data.cache.shards import ObjectReader
from data.cache.store import LocalStore, Source
from data.cache.stored import StoredBatch
from data.config import Check, Codec
from data.errors import ShardError
from data.pool import BufferPool
from tests.support.cached import Case, digest_of, header_of, make_case, mixed_rows, write_cache

CPU = torch.device("cpu")
HEADERS = {
    "exact": header_of(Codec.bf16, Codec.bf16, 12),
    "lossy": header_of(Codec.int8_h64_out8, Codec.int8_out32, 70),
    "law": header_of(Codec.int6_h64, None, 64, topk=9),
    "shared": header_of(Codec.bf16_zstd, Codec.nf4_h64, 70, topk=3, share_prefix=True),
}
CASES = {name: make_case(header, mixed_rows()) for name, header in HEADERS.items()}
ROWS = range(len(mixed_rows()))
WAIT_S = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A cache of every case; not to be written to."""
    root = tmp_path_factory.mktemp("caches")
    return {name: write_cache(root / name, case).folder for name, case in CASES.items()}


def tensors_of(batch: StoredBatch) -> dict[str, Tensor]:
    return {**batch.arrays, "input_ids": batch.token_ids, "loss_mask": batch.loss_mask}


def require_batch(
    batch: StoredBatch, case: Case, rows: Sequence[int], longest: int | None = None
) -> None:
    """Every array holds the rows' tokens, up to the ``longest``, and zeros behind them."""
    lengths = [len(case.rows[i].token_ids[:longest]) for i in rows]
    assert batch.lengths == tuple(lengths)
    assert batch.row_keys == tuple(case.rows[i].row_key for i in rows)
    found = tensors_of(batch)
    for spec in array_specs(case.header):
        padded = np.zeros((len(rows), max(lengths), *spec.token_shape), spec.dtype)
        for b, (i, n) in enumerate(zip(rows, lengths, strict=True)):
            padded[b, :n] = case.arrays[i][spec.name][:n]
        mine = found[spec.name].numpy()
        assert mine.dtype.itemsize == padded.dtype.itemsize
        np.testing.assert_array_equal(mine.view(padded.dtype), padded)


def overwrite(batch: StoredBatch) -> None:
    for tensor in tensors_of(batch).values():
        tensor.view(torch.uint8).fill_(0xA7)


@pytest.mark.parametrize("name", CASES)
def test_memory_is_used_again_and_padding_is_zero(folders: dict[str, Path], name: str) -> None:
    pool = BufferPool(1 << 20)
    reader = CacheReader(folders[name], pool=pool)
    for rows in ([0, 7, 6], [6, 3], [2], [9, 1, 4, 5], [0, 7, 6]):
        batch = reader.read_batch(rows, [0] * len(rows))
        require_batch(batch, CASES[name], rows)
        head = reader.read_head(rows, list(rows))
        assert torch.equal(head.loss_mask, batch.loss_mask)
        assert head.epochs == tuple(rows)
        overwrite(batch)
        del batch, head
    assert pool.reuses > 0
    assert pool.leased_bytes == 0


@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_living_batch_is_never_used_for_another(
    folders: dict[str, Path], name: str
) -> None:
    reader = CacheReader(folders[name], pool=BufferPool(1 << 20))
    plain = CacheReader(folders[name])
    rows = [3, 0, 8]
    first, decoded = (reader.read_batch(rows, [0, 0, 0]) for _ in range(2))
    batch = decoded.to(CPU)
    del decoded  # exact states are not copied: only the batch holds their memory now
    for _ in range(3):
        overwrite(reader.read_batch(rows, [0, 0, 0]))
    require_batch(first, CASES[name], rows)
    expected = plain.read_batch(rows, [0, 0, 0]).to(CPU)
    assert torch.equal(batch.token_ids, expected.token_ids)
    assert torch.equal(batch.taps, expected.taps)


@pytest.mark.parametrize("name", CASES)
def test_cut_rows_are_the_beginnings_of_whole_ones(folders: dict[str, Path], name: str) -> None:
    case = CASES[name]
    longest = max(map(len, case.rows))
    for cut in range(1, longest + 2):  # also inside shared prefixes, and between pieces
        reader = CacheReader(folders[name], max_length=cut)
        assert [reader.length(i) for i in ROWS] == [min(len(row), cut) for row in case.rows]
        require_batch(reader.read_batch(ROWS, [0] * len(ROWS)), case, ROWS, cut)


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_batch_are_an_upper_bound(folders: dict[str, Path], name: str) -> None:
    reader = CacheReader(folders[name])
    for rows in ([0], [3, 7, 6], ROWS):
        stored = reader.read_batch(rows, [0] * len(rows))
        batch = stored.to(CPU)
        held = [*tensors_of(stored).values(), batch.token_ids, batch.loss_mask, batch.taps]
        held += [] if batch.last is None else [batch.last]
        held += [] if batch.topk is None else list(vars(batch.topk).values())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        used, bound = sum(storages.values()), reader.batch_bytes(rows)
        assert used <= bound <= 2 * used  # exact states need no second copy


@pytest.fixture
def cache(tmp_path: Path) -> LocalStore:
    """A cache of one part, to be damaged: 30 tokens in chunks of 4."""
    return write_cache(tmp_path, make_case(HEADERS["exact"], mixed_rows()[7:8]))


def damage(store: LocalStore, chunk: int) -> bytes:
    """Flips a bit of a chunk of the tapped states; returns the chunk as it is then."""
    spec = array_specs(HEADERS["exact"])[0]
    size = 4 * spec.token_bytes
    path = store.folder / spec.object_key(0)
    with path.open("r+b") as file:
        file.seek(chunk * (size + 4))
        content = bytearray(file.read(size))
        content[5] ^= 1
        file.seek(chunk * (size + 4))
        file.write(content)
    return bytes(content)


def read_chunk(reader: ObjectReader, chunk: int) -> bytes:
    out = np.empty((4, 2, 12), np.uint16)
    reader.read_into(out, 4 * chunk)
    return out.tobytes()


def opened(store: LocalStore, check: Check) -> ObjectReader:
    return CacheReader(store, check).open_object("hidden", 0)


def test_damage_is_an_error_unless_checks_are_off(cache: LocalStore) -> None:
    before = {check: opened(cache, check) for check in Check}
    content = damage(cache, 1)
    after = {check: opened(cache, check) for check in Check}
    for readers in (before, after):
        assert read_chunk(readers[Check.never], 1) == content
        for check in (Check.first, Check.always):
            read_chunk(readers[check], 0)
            for _ in range(2):
                with pytest.raises(ShardError, match=r"c\.0\.0\.0: chunk 1: .*damaged"):
                    read_chunk(readers[check], 1)
    reader = CacheReader(cache)
    with pytest.raises(ShardError, match="mode=repair"):
        reader.read_batch([0], [0])
    assert CacheReader(cache, max_length=4).read_batch([0], [0]).lengths == (4,)


def test_later_damage_is_seen_by_those_that_check_always(cache: LocalStore) -> None:
    readers = {check: opened(cache, check) for check in Check}
    for reader in readers.values():
        read_chunk(reader, 1)
    content = damage(cache, 1)
    assert read_chunk(readers[Check.never], 1) == content
    assert read_chunk(readers[Check.first], 1) == content
    with pytest.raises(ShardError, match="chunk 1"):
        read_chunk(readers[Check.always], 1)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every piece of data whose checksum is computed for reading."""
    sizes: list[int] = []

    def counted(data: memoryview, *start: int) -> int:
        sizes.append(len(data))
        return int(crc32c(data, *start))

    monkeypatch.setattr("data.cache.shards.crc32c", counted)
    return sizes


@pytest.mark.parametrize(("check", "times"), [("never", 0), ("first", 1), ("always", 3)])
def test_chunks_are_checked_as_often_as_asked(
    cache: LocalStore, checked: list[int], check: str, times: int
) -> None:
    reader = opened(cache, Check(check))
    checked.clear()  # the index always is
    for _ in range(3):  # one token of chunk 0, all of 1 and 2, one token of 3
        reader.read_into(np.empty((10, 2, 12), np.uint16), 3)
    assert checked == [4 * 2 * 12 * 2] * (4 * times)


def test_rows_are_checked_as_often_as_asked(folders: dict[str, Path], checked: list[int]) -> None:
    found = {}
    for check in Check:
        reader = CacheReader(folders["lossy"], check)
        passes = []
        for _ in range(2):
            checked.clear()
            passes.append((digest_of(reader), len(checked)))
        assert passes[0][0] == passes[1][0]
        found[check] = [count for _, count in passes]
    opening = found[Check.never][0]
    assert found[Check.never] == [opening, 0]
    assert found[Check.first][0] > opening
    assert found[Check.first][1] == 0
    # A chunk in which two rows meet is checked for each.
    again = found[Check.always][1]
    assert again == found[Check.always][0] - opening > found[Check.first][0] - opening


@pytest.mark.parametrize("name", CASES)
def test_threads_read_the_same_rows(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest_of(CacheReader(folders[name]))
    monkeypatch.setattr(read, "_OPEN_PARTS", 1)  # objects are closed under the threads' hands
    reader = CacheReader(folders[name], pool=BufferPool(1 << 16))
    barrier = threading.Barrier(4)

    def read_all() -> set[str]:
        barrier.wait()
        return {digest_of(reader) for _ in range(3)}

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(read_all) for _ in range(4)]
        assert set.union(*(f.result(WAIT_S) for f in futures)) == {expected}


def maps_of(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(folder) in line for line in lines)


def test_few_maps_stay_open(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # readers of other tests
    assert maps_of(folders["exact"]) == 0
    monkeypatch.setattr(read, "_OPEN_PARTS", 2)
    reader = CacheReader(folders["exact"])
    assert reader.manifest.num_parts > 3
    most = 0
    for i in (*ROWS, *ROWS):
        reader.read_batch([i], [0])
        most = max(most, maps_of(folders["exact"]))
    assert 2 < most <= 2 * len(reader.specs)
    del reader
    gc.collect()
    assert maps_of(folders["exact"]) == 0


def send_digest(reader: CacheReader, pipe: Any) -> None:
    pipe.send(digest_of(reader))


def forked_digest(reader: CacheReader) -> str:
    """What a forked child reads; it must not hang."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=send_digest, args=(reader, theirs))
    child.start()
    try:
        assert mine.poll(WAIT_S), "the child hangs"
        return str(mine.recv())
    finally:
        child.kill()
        child.join()


def test_reader_works_in_a_forked_child(folders: dict[str, Path]) -> None:
    reader = CacheReader(folders["exact"], pool=BufferPool(1 << 20))
    expected = digest_of(reader)
    held = reader.read_batch(ROWS, [0] * len(ROWS))
    assert forked_digest(reader) == expected
    require_batch(held, CASES["exact"], ROWS)
    assert digest_of(reader) == expected


def test_reader_works_in_a_child_forked_while_another_thread_opens_an_object(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest_of(CacheReader(folders["exact"]))
    reader = CacheReader(folders["exact"])
    true_open = LocalStore.open_source
    begun, go_on, main = threading.Event(), threading.Event(), threading.get_ident()

    def slow_open(store: LocalStore, key: str, size: int) -> Source:
        if threading.get_ident() != main:
            begun.set()
            go_on.wait(WAIT_S)
        return true_open(store, key, size)

    monkeypatch.setattr(LocalStore, "open_source", slow_open)
    thread = threading.Thread(target=reader.read_batch, args=([0], [0]))
    thread.start()
    assert begun.wait(WAIT_S)
    try:
        assert forked_digest(reader) == expected
    finally:
        go_on.set()
        thread.join()


def test_reader_can_be_sent_to_another_process(folders: dict[str, Path]) -> None:
    reader = CacheReader(folders["shared"], Check.always, BufferPool(1 << 20), max_length=11)
    expected = digest_of(reader)  # its pool holds memory now
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        assert pool.submit(digest_of, reader).result(2 * WAIT_S) == expected
