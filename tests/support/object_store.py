"""Object stores on loopback: an S3 server in a process of its own, and a plain HTTP server."""

import http.client
import os
import random
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from data.cache.store import Store

BUCKET = "bucket"
MIB = 1 << 20


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def attempt(call: Callable[..., object], *arguments: object) -> OSError | None:
    """What a call raises; None when it succeeds."""
    try:
        call(*arguments)
    except OSError as error:
        return error
    return None


@dataclass
class S3Server:
    """A running server with one empty bucket.

    Attributes:
        variables: environment that leads a client here.
    """

    process: subprocess.Popen[str]
    port: int
    variables: dict[str, str]
    locations: int = 0

    def unused_url(self) -> str:
        """A location below which nothing lies."""
        self.locations += 1
        return f"s3://{BUCKET}/caches/{self.locations}"

    def open_uploads(self) -> int:
        """Multipart uploads that were neither completed nor aborted."""
        return _ask(self.port, "GET", f"/{BUCKET}?uploads").count(b"<Upload>")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """Starts a server; what it prints goes to a file. Its objects are lost at the end."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with log.open("wb") as output:
        # A process of its own: tests kill clients, and some kill the server.
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
    try:
        port = _wait_for_port(process, log)
        _ask(port, "PUT", f"/{BUCKET}")
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        yield S3Server(process, port, variables)
    finally:
        process.kill()
        process.wait()


def _ask(port: int, method: str, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        content = reply.read()
    finally:
        connection.close()
    assert reply.status == 200, content
    return content


def _wait_for_port(process: subprocess.Popen[str], log: Path) -> int:
    """The port that the server has bound and says it listens on."""
    while process.poll() is None:
        if found := re.search(r"Running on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.02)
    raise AssertionError(f"no S3 server:\n{log.read_text()}")


@dataclass
class FileServer:
    """Serves bytes over HTTP, with ranges. Attributes may be changed while it runs.

    Attributes:
        requests: (method, path, first byte, byte behind the last) of each request.
        cut_after: bodies break off after so many bytes, and the port closes.
        ranges: whether ranges are served; else all bytes, as simple servers do.
    """

    objects: dict[str, bytes]
    requests: list[tuple[str, str, int, int]] = field(default_factory=list)
    cut_after: int | None = None
    ranges: bool = True

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Closes the port; the second time nothing happens."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/some/where"

    def fetched(self) -> list[tuple[int, int]]:
        """Ranges that were asked for, in order of their first byte."""
        return sorted((a, b) for method, _, a, b in self.requests if method == "GET")


@contextmanager
def file_server(objects: dict[str, bytes]) -> Iterator[FileServer]:
    """Serves objects by their keys, below `FileServer.url`."""
    server = FileServer({f"/some/where/{key}": data for key, data in objects.items()})
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FileServer

    def log_message(self, *arguments: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        data = self.owner.objects.get(self.path)
        if data is None:
            self.owner.requests.append((self.command, self.path, 0, 0))
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        header = self.headers.get("range", "") if self.owner.ranges else ""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", header)
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(data))
        end = min(end, len(data))
        self.owner.requests.append((self.command, self.path, begin, end))
        self.send_response(206 if asked else 200)
        body = data[begin:end]
        self.send_header("content-length", str(len(body)))
        if asked:
            self.send_header("content-range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("etag", f'"{zlib.crc32(data)}"')
        self.end_headers()
        if self.command == "GET":
            self._send(body)

    def _send(self, body: bytes) -> None:
        cut = self.owner.cut_after
        self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True
            threading.Thread(target=self.owner.stop, daemon=True).start()


def read_object(store: Store, key: str) -> tuple[int, bytes]:
    """For a process of a pool: its id, and an object."""
    return os.getpid(), store.read(key)
