"""Stores behind a URL: what they refuse, stores that fail, other processes."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.cache.remote import open_store
from data.errors import ConfigError
from tests.support.object_store import (
    MIB,
    S3Server,
    attempt,
    file_server,
    read_object,
    s3_server,
)
from tests.support.processes import ROOT, environment

PATIENCE_S = 2.0


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


def test_http_is_only_read_from() -> None:
    with file_server({"c": b"c" * 100}) as server:
        store = open_store(server.url)
        assert (store.read("c"), store.size("c"), store.size("d")) == (b"c" * 100, 100, None)
        calls: list[Callable[[], object]] = [
            lambda: store.write("c", b""),
            lambda: store.create("d", b""),
            lambda: store.swap("c", b"c" * 100, b""),
            lambda: store.delete("c"),
            lambda: store.list(""),
            lambda: store.open_sink("d", "token"),
        ]
        server.requests.clear()
        for call in calls:
            with pytest.raises(OSError, match="can only be read"):
                call()
        assert server.requests == []


@pytest.mark.slow
def test_bucket_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(tmp_path / "log") as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        store = open_store(server.unused_url(), tmp_path / "copy", patience_s=PATIENCE_S)
        store.write("a", bytes(MIB))
        source, sink = store.open_source("a", MIB), store.open_sink("b", "token")
        sink.write(bytes(10 * MIB))
        server.kill()
    calls: list[Callable[[], object]] = [
        lambda: store.read("a"),
        lambda: store.size("a"),
        lambda: store.list(""),
        lambda: store.write("a", b""),
        lambda: store.create("c", b""),
        lambda: store.swap("a", b"", b""),
        lambda: store.delete("a"),
        lambda: store.open_source("d", 1),
        lambda: source.fetch([(0, 1)]),
        sink.publish,
    ]
    with ThreadPoolExecutor(len(calls)) as pool:  # each waits for its patience to end
        for failed in [pool.submit(call) for call in calls]:
            assert isinstance(failed.exception(), OSError)
            assert "s3://bucket/caches/1/" in str(failed.exception())
    sink.discard()


class Meddler:
    """A connection; somebody else writes whenever something was read through it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def get(self, key: str) -> Any:
        found = self._backend.get(key)
        content = bytes(found.bytes())
        result = SimpleNamespace(meta=found.meta, bytes=lambda: content)
        self._backend.put(key, b"theirs")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_swap_sees_a_writer_in_between(bucket: str) -> None:
    store: Any = open_store(bucket)
    store.write("a", b"old")
    store._backend = Meddler(store._backend)
    assert not store.swap("a", b"old", b"new")
    assert bytes(store._backend._backend.get("a").bytes()) == b"theirs"


def test_store_without_conditions(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = open_store(bucket)
    store.write("a", b"old")
    with pytest.raises(OSError, match="cannot refuse to overwrite"):
        store.create("a", b"new")
    assert not store.swap("a", b"other", b"new")
    for old, new in itertools.pairwise([b"old", b"new", b"newer"]):
        assert store.swap("a", old, new)
    assert store.read("a") == b"newer"


@pytest.mark.slow
def test_store_that_implements_no_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    with file_server({}) as server:  # which answers 501 to every PUT
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url.removesuffix("/some/where"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(OSError, match=r"cannot refuse to overwrite.*s3://some/where/a"):
            open_store("s3://some/where", patience_s=PATIENCE_S).create("a", b"")


@pytest.mark.parametrize(
    "location",
    [
        "s3://user:hunter2@bucket/p",
        "s3://hunter2@bucket/p",
        "https://user:hunter2@host/p",
        "https://host/p?sig=hunter2",
        "abfs://container:hunter2@account.dfs.core.windows.net/p",
        "s3://bucket/p#hunter2",
        "s3://[hunter2/p",
    ],
)
def test_secrets_in_urls_are_refused(location: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.path") as caught:
        open_store(location)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("ftp://host/p", "unknown place"),
        ("s3:///p", "unknown place"),
        (Path("s3://bucket/p"), "one slash"),
        ("az://container/p", "Account must be specified"),
    ],
)
def test_locations_that_cannot_be(location: str | Path, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_store(location)


@pytest.mark.slow
def test_messages_hide_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=hunter2")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    store = open_store("az://container/p", patience_s=PATIENCE_S)
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP") as caught:
        store.read("a")
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    with pytest.raises(OSError, match="az://container/p/a") as caught:
        open_store("az://container/p", patience_s=PATIENCE_S).read("a")
    assert "hunter2" not in str(caught.value)


def script(text: str, *arguments: str) -> str:
    """Runs a program that would be killed if it hung; returns what it printed."""
    command = [sys.executable, "-c", text, *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_obstore_is_optional() -> None:
    text = """
import sys
sys.modules["obstore"] = None
from data.cache.remote import open_store
from data.errors import ConfigError
open_store("/tmp")
try:
    open_store("s3://bucket/p")
except ConfigError as error:
    print(error)
"""
    assert "pip install 'dspark-pipeline[remote]'" in script(text)


FORK = """
import os, signal, sys
from pathlib import Path
from data.cache.remote import open_store
from data.errors import UserError

url = sys.argv[1]
store = open_store(url)

def in_child(call):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            print(call())
        except UserError as error:
            print("refused", "spawn" in str(error))
        sys.exit()  # not os._exit: what Python does at an exit belongs to the test
    print(os.waitpid(child, 0)[1])

in_child(lambda: open_store(url).read("a"))
source = store.open_source("a", 3)
source.fetch([(0, 3)])
for call in (
    lambda: store.read("a"),
    lambda: open_store(url).size("a"),
    lambda: store.open_source("a", 3),
    lambda: source.fetch([(0, 3)]),
    lambda: source.map[:],
):
    in_child(call)
print(store.open_source("a", 3).map[:])
print(store._copy._folder)
"""


@pytest.mark.slow
def test_forked_children_are_refused(bucket: str) -> None:
    open_store(bucket).write("a", b"abc")
    *printed, folder = script(FORK, bucket).splitlines()
    refused = ["refused True", "0"]
    assert printed == ["b'abc'", "0", *refused * 4, "b'abc'", "0", "b'abc'"]
    assert not Path(folder).exists(), "the temporary local copy goes with its process"


@pytest.mark.slow
def test_spawned_processes_connect_anew(bucket: str, tmp_path: Path) -> None:
    store = open_store(bucket, tmp_path)
    store.write("a", b"abc")
    assert b"secret" not in pickle.dumps(store)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        process, content = pool.submit(read_object, store, "a").result(timeout=120)
    assert (process != os.getpid(), content) == (True, b"abc")


@pytest.mark.slow
def test_sink_takes_no_more_than_it_can_send(s3: S3Server, bucket: str) -> None:
    """Whatever it takes from its caller while the server stands still is in memory."""
    sink = open_store(bucket, patience_s=PATIENCE_S).open_sink("a", "token")
    sink.write(bytes(20 * MIB))
    s3.process.send_signal(signal.SIGSTOP)
    try:
        taken = 0
        while taken < 400 * MIB and attempt(sink.write, bytes(MIB)) is None:
            taken += MIB
    finally:
        s3.process.send_signal(signal.SIGCONT)
    sink.discard()
    assert taken <= 64 * MIB
    assert not open_store(bucket).exists("a")
