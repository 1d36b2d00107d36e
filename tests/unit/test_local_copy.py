"""What sources of remote objects fetch, keep and forget; http serves here for every store."""

import itertools
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from data.cache.local_copy import batches
from data.cache.remote import open_store
from data.cache.store import Source
from data.errors import ShardError
from tests.support.object_store import MIB, FileServer, file_server, noise

PATIENCE_S = 2.0


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server({"a/b": noise(2 * MIB), "c": b"c" * 100}) as running:
        yield running


def test_only_extents_are_fetched(server: FileServer, tmp_path: Path) -> None:
    source = open_store(server.url, tmp_path).open_source("a/b", 2 * MIB)
    assert server.fetched() == []
    source.fetch([(500_000, 5), (10, 10), (0, 10), (1000, 10), (700_000, 0)])
    assert server.fetched() == [(0, 1010), (500_000, 500_005)]
    assert source.map[1100:400_000] == bytes(400_000 - 1100)
    source.fetch([])
    assert len(server.fetched()) == 2
    with pytest.raises(ShardError, match="behind its end"):
        source.fetch([(2 * MIB - 1, 2)])


@given(st.lists(st.tuples(st.integers(0, 400 * MIB), st.integers(0, 200 * MIB)), max_size=6))
def test_batches_cover_extents(extents: list[tuple[int, int]]) -> None:
    found = [list(batch) for batch in batches(extents)]
    assert all(sum(end - begin for begin, end in batch) <= 64 * MIB for batch in found)
    ranges = [r for batch in found for r in batch]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    wanted = [(begin, begin + count) for begin, count in extents if count]
    for begin, end in wanted:
        inside = [(max(a, begin), min(b, end)) for a, b in ranges if a < end and b > begin]
        assert sum(b - a for a, b in inside) == end - begin
    bounds = {bound for r in wanted for bound in r}
    joints = {b for (_, b), (a, _) in itertools.pairwise(ranges) if a == b}
    assert {bound for r in ranges for bound in r} <= bounds | joints
    assert sum(b - a for a, b in ranges) <= sum(b - a for a, b in wanted) + 5 * (64 << 10)


def test_local_copy_is_used_again(server: FileServer, tmp_path: Path) -> None:
    data = server.objects["/some/where/a/b"]
    store = open_store(server.url, tmp_path)
    store.open_source("a/b", len(data)).fetch([(0, len(data))])
    server.requests.clear()
    assert store.open_source("a/b", len(data)).map[:] == data
    assert server.requests == []
    assert open_store(server.url, tmp_path).open_source("a/b", len(data)).map[:] == data
    assert [method for method, *_ in server.requests] == ["HEAD"]


def read_chunk(source: Source, begin: int, count: int, checksum: int) -> bytes:
    """What a reader does: check, fetch, check again."""
    if crc32c(source.map[begin : begin + count]) != checksum:
        source.fetch([(begin, count)])
    found = source.map[begin : begin + count]
    assert crc32c(found) == checksum
    return found


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_damaged_local_copy_repairs_itself(server: FileServer, tmp_path: Path, damage: str) -> None:
    data = server.objects["/some/where/a/b"]
    open_store(server.url, tmp_path).open_source("a/b", len(data)).fetch([(0, len(data))])
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    if damage == "flipped":
        with path.open("r+b") as file:
            file.seek(5000)
            file.write(bytes(100))
    elif damage == "short":
        os.truncate(path, 1000)
    else:
        path.unlink()
    source = open_store(server.url, tmp_path).open_source("a/b", len(data))
    for begin in range(0, len(data), 65536):
        chunk = data[begin : begin + 65536]
        assert read_chunk(source, begin, len(chunk), crc32c(chunk)) == chunk


def test_chunks_of_an_older_object_are_not_taken(server: FileServer, tmp_path: Path) -> None:
    """They match their own checksums, so nobody would notice."""
    open_store(server.url, tmp_path).open_source("c", 100).fetch([(0, 100)])
    server.objects["/some/where/c"] = b"d" * 100
    source = open_store(server.url, tmp_path).open_source("c", 100)
    assert source.map[:] == bytes(100)
    source.fetch([(0, 100)])
    assert source.map[:] == b"d" * 100


def allocated(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def test_local_copy_keeps_its_limit(tmp_path: Path) -> None:
    objects = {f"k{n}": noise(MIB, n) for n in range(12)}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_bytes(noise(MIB))
    with file_server(objects) as server:
        store = open_store(server.url, tmp_path, 4 * MIB)
        sources = {}
        for key, data in objects.items():
            sources[key] = source = store.open_source(key, MIB)
            source.fetch([(0, MIB // 2)])
            source.fetch([(MIB // 2, MIB // 2)])
            assert allocated(tmp_path) - MIB <= 4 * MIB
            assert source.map[:] == data
        assert all(sources[key].map[:] == data for key, data in objects.items())
        assert allocated(tmp_path) - MIB >= 2 * MIB
        assert (tmp_path / "mine" / "precious").read_bytes() == noise(MIB)


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    objects = {f"k{n}": noise(MIB, n) for n in range(4)}
    with file_server(objects) as server:
        store = open_store(server.url, tmp_path, 7 * MIB // 2)
        for n in range(3):
            store.open_source(f"k{n}", MIB).fetch([(0, MIB)])
            (path,) = tmp_path.rglob(f"k{n}.*")
            os.utime(path, (1000 + n, 1000 + n))
        store.open_source("k0", MIB)
        store.open_source("k3", MIB).fetch([(0, MIB)])
    assert {path.name[:2] for path in tmp_path.rglob("k*")} == {"k0", "k2", "k3"}


def test_threads_fetch_at_once(server: FileServer, tmp_path: Path) -> None:
    data = server.objects["/some/where/a/b"]
    store = open_store(server.url, tmp_path)
    barrier = threading.Barrier(8)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        barrier.wait()
        source = store.open_source("a/b", len(data))
        for _ in range(10):
            begin = rng.randrange(len(data) - 50_000)
            chunk = data[begin : begin + 50_000]
            assert read_chunk(source, begin, len(chunk), crc32c(chunk)) == chunk

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_server_without_ranges(server: FileServer, tmp_path: Path) -> None:
    server.ranges = False
    source = open_store(server.url, tmp_path).open_source("c", 100)
    with pytest.raises(OSError, match=r"Range request not supported.*some/where/c"):
        source.fetch([(10, 10)])


@pytest.mark.slow
def test_server_that_stops_in_the_middle(server: FileServer, tmp_path: Path) -> None:
    source = open_store(server.url, tmp_path, patience_s=PATIENCE_S).open_source("a/b", 2 * MIB)
    server.cut_after = 1000
    with pytest.raises(OSError, match="some/where/a/b"):
        source.fetch([(0, MIB)])
    assert source.map[:] == bytes(2 * MIB)


def test_object_that_changes_while_open(server: FileServer, tmp_path: Path) -> None:
    source = open_store(server.url, tmp_path).open_source("c", 100)
    server.objects["/some/where/c"] = b"c" * 50
    with pytest.raises(ShardError, match=r"some/where/c: ends at byte 50"):
        source.fetch([(10, 80)])
    del server.objects["/some/where/c"]
    with pytest.raises(ShardError, match=r"some/where/c: is missing"):
        source.fetch([(10, 80)])
