"""One contract for stores: folders and buckets."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.cache.remote import RemoteStore, open_store
from data.cache.store import LocalStore, Store
from data.errors import ShardError
from tests.support.object_store import MIB, S3Server, attempt, noise, s3_server

ODD_KEYS = ["a b/c+d", "%41", "x#y=z&w", "\u00fc/\u00f1", "a..b/.c", "d/0.0.0", "d'(e)!~*"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A location that nobody has used, with the environment that it needs."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    return s3.unused_url()


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    found: str = request.getfixturevalue("bucket")
    return found


@pytest.fixture
def store(location: str, tmp_path: Path) -> Store:
    return open_store(location, tmp_path / "copy")


def test_location_chooses_the_store(location: str, store: Store, tmp_path: Path) -> None:
    kind = RemoteStore if "://" in location else LocalStore
    assert type(store) is kind
    assert store.url == location
    assert store.locate("a/b") == f"{location}/a/b"
    assert isinstance(open_store(tmp_path), LocalStore)
    store.write("a", b"")
    assert (store.free_bytes() is None) == (kind is RemoteStore)


@pytest.mark.parametrize("content", [b"", b"x", noise(6 * MIB)], ids=len)
def test_objects_are_written_read_and_deleted(store: Store, content: bytes) -> None:
    store.write("a/b", b"older")
    store.write("a/b", content)
    assert store.read("a/b") == content
    assert store.size("a/b") == len(content)
    assert store.exists("a/b")
    store.delete("a/b")
    store.delete("a/b")
    assert store.size("a/b") is None
    assert not store.exists("a/b")
    with pytest.raises(FileNotFoundError, match="a/b"):
        store.read("a/b")


def test_list_knows_prefixes_by_their_parts(store: Store) -> None:
    assert store.list("a/") == {}
    for key, size in {"a/b": 1, "a/c/d": 2, "a/c/e/f": 0, "ab/c": 3, "g": 4}.items():
        store.write(key, bytes(size))
    assert store.list("a/") == {"a/b": 1, "a/c/d": 2, "a/c/e/f": 0}
    assert store.list("a/c/") == {"a/c/d": 2, "a/c/e/f": 0}
    assert store.list("")["g"] == 4
    store.remove_partials()
    assert store.read("g") == bytes(4)


def test_odd_names(store: Store) -> None:
    for key in ODD_KEYS:
        store.write(f"odd/{key}", key.encode())
    assert store.list("odd/") == {f"odd/{key}": len(key.encode()) for key in ODD_KEYS}
    for key in ODD_KEYS:
        assert store.read(f"odd/{key}") == key.encode()
        assert bytes(store.open_source(f"odd/{key}", len(key.encode())).map[:0]) == b""


def test_create_happens_once(store: Store, location: str) -> None:
    store.create("a/b", b"first")
    with pytest.raises(FileExistsError, match="a/b"):
        open_store(location).create("a/b", b"second")
    assert store.read("a/b") == b"first"


def test_create_by_threads_at_once(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        for key in "abcdefghij":
            failed = list(pool.map(lambda n, k=key: attempt(store.create, k, b"%d" % n), range(8)))
            assert sum(error is None for error in failed) == 1
            assert store.read(key) == b"%d" % failed.index(None)


def test_swap_needs_the_old_content(store: Store) -> None:
    assert not store.swap("a/b", b"old", b"new")
    assert not store.exists("a/b")
    store.write("a/b", b"old")
    assert store.swap("a/b", b"old", b"new")
    assert not store.swap("a/b", b"old", b"newer")
    assert store.read("a/b") == b"new"
    with ThreadPoolExecutor(8) as pool:
        swapped = list(pool.map(lambda n: store.swap("a/b", b"new", b"%d" % n), range(8)))
    assert sum(swapped) == 1
    assert store.read("a/b") == b"%d" % swapped.index(True)


def test_sink_appears_when_it_is_published(store: Store) -> None:
    sink = store.open_sink("a/b", "token")
    sink.write(b"one")
    sink.write(bytearray(b"two"))
    sink.write(memoryview(b"three"))
    assert not store.exists("a/b")
    assert store.list("a/") == {}
    sink.publish()
    sink.discard()
    assert store.read("a/b") == b"onetwothree"


def test_sink_of_nothing(store: Store) -> None:
    store.open_sink("a/b", "token").publish()
    assert store.size("a/b") == 0


def test_large_sink_owns_what_it_was_given(store: Store) -> None:
    """Whoever writes uses its buffer again at once."""
    buffer, expected = bytearray(3 * MIB), bytearray()
    sink = store.open_sink("a/b", "token")
    for seed in range(8):
        buffer[:] = noise(len(buffer), seed)
        expected += buffer
        sink.write(buffer)
    buffer[:] = bytes(len(buffer))
    sink.publish()
    assert store.read("a/b") == expected


def test_discarded_sink_leaves_nothing(store: Store, request: pytest.FixtureRequest) -> None:
    for num_bytes in (0, 100, 20 * MIB):
        sink = store.open_sink("a/b", "token")
        sink.write(bytes(num_bytes))
        sink.discard()
        assert store.list("a/") == {}
    store.write("a/b", b"older")
    sink = store.open_sink("a/b", "token")
    sink.write(bytes(20 * MIB))
    sink.discard()
    assert store.read("a/b") == b"older"
    if isinstance(store, RemoteStore):
        assert request.getfixturevalue("s3").open_uploads() == 0


def test_two_sinks_of_one_key(store: Store) -> None:
    first, second = store.open_sink("a/b", "one"), store.open_sink("a/b", "two")
    for _ in range(3):
        first.write(b"1" * 4 * MIB)
        second.write(b"2" * 4 * MIB)
    second.publish()
    assert store.read("a/b") == b"2" * 12 * MIB
    first.publish()
    assert store.read("a/b") == b"1" * 12 * MIB


def test_open_source_keeps_what_it_has(store: Store, location: str, tmp_path: Path) -> None:
    old, new = noise(MIB, 1), noise(MIB, 2)
    store.write("a/b", old)
    source = store.open_source("a/b", MIB)
    source.fetch([(0, MIB)])
    sink = store.open_sink("a/b", "token")
    sink.write(new)
    sink.publish()
    assert source.map[:] == old
    source = open_store(location, tmp_path / "copy").open_source("a/b", MIB)
    assert source.map[:] in (new, bytes(MIB)), "nothing of the older object"
    source.fetch([(0, MIB)])
    assert source.map[:] == new


def test_extents_hold_the_bytes(store: Store) -> None:
    data, rng = noise(3 * MIB), random.Random(1)
    store.write("a/b", data)
    source = store.open_source("a/b", len(data))
    assert len(source.map) == len(data)
    for _ in range(10):
        extents = [(rng.randrange(len(data)), rng.randrange(200_000)) for _ in range(4)]
        extents = [(begin, min(count, len(data) - begin)) for begin, count in extents]
        assert source.fetch(extents) != source.is_whole
        for begin, count in extents:
            assert source.map[begin : begin + count] == data[begin : begin + count]


@pytest.mark.parametrize("size", [0, 9, 11])
def test_source_of_another_size(store: Store, size: int) -> None:
    store.write("a/b", bytes(10))
    with pytest.raises(ShardError, match=r"a/b: (has 10 bytes|cannot be opened)"):
        store.open_source("a/b", size)


def test_source_that_is_missing(store: Store) -> None:
    with pytest.raises(ShardError, match=r"a/b: (is missing|cannot be opened)"):
        store.open_source("a/b", 10)
