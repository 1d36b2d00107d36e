"""A real HTTP server on loopback that speaks OpenAI's completions, with the faults of real ones.

Answers are a function of the prompt's token ids alone, so that runs can be compared; they arrive
out of order. Prompts are numbered by what they are, requests by when they come.
"""

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenizers import pre_tokenizers

from data.tiny import STOP_ID

Fields = dict[str, Any]
_ALPHABET = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@dataclass
class StubOptions:
    """What the server does wrong; None or 0 never does it."""

    fail_every: int = 0  # every n-th request: 500 and 429 in turn
    fail_all: int | None = None  # status of every reply
    die_after: int | None = None  # after n requests the port is closed
    hang: bool = False  # never replies
    max_prompt: int | None = None  # longer prompts: 400
    length_every: int = 0  # one prompt in n: finish_reason length
    reasoning_every: int = 0  # one prompt in n: no text, reasoning_content
    reasoning_key: str = "reasoning_content"
    token_ids: bool = True  # says which tokens were sampled
    extra_prompt_tokens: int = 0  # the engine sees more than it was sent
    models: tuple[str, ...] = ("tiny",)
    max_delay_s: float = 0.02
    required_key: str | None = None  # 401 without it


def draw(prompt: Sequence[int], options: StubOptions) -> tuple[str, str, str]:
    """Text, reasoning and finish_reason for a prompt."""
    digest = hashlib.sha256(json.dumps(list(prompt)).encode()).digest()
    words = " ".join(f"w{b}" for b in digest[: 2 + digest[0] % 6])
    length = options.length_every and digest[1] % options.length_every == 0
    apart = options.reasoning_every and digest[2] % options.reasoning_every == 0
    return ("" if apart else words), (words if apart else ""), ("length" if length else "stop")


@dataclass
class StubServer:
    """One server on a free port (or a given one). Attributes count what it saw."""

    options: StubOptions
    port: int = 0
    requests: int = 0
    answered: list[tuple[int, ...]] = field(default_factory=list)
    bodies: list[Fields] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        handler = type("Handler", (_Handler,), {"stub": self})
        self._http = _Http(("127.0.0.1", self.port), handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Closes the port and every connection; the second time nothing happens."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http.close_connections()

    def die(self) -> None:
        """The same from within a request."""
        threading.Thread(target=self.stop, daemon=True).start()


@contextmanager
def stub_server(port: int = 0, **options: Any) -> Iterator[StubServer]:
    server = StubServer(StubOptions(**options), port)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""

    def close_connections(self) -> None:
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubServer

    def log_message(self, *arguments: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        models = [{"id": name, "object": "model"} for name in self.stub.options.models]
        if self.stub.options.fail_all:
            self._send(self.stub.options.fail_all, _error("no"))
        else:
            self._send(200, {"object": "list", "data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stub = self.stub
        with stub.lock:
            stub.requests += 1
            number = stub.requests
            stub.in_flight += 1
            stub.most_in_flight = max(stub.most_in_flight, stub.in_flight)
            stub.bodies.append(body)
            stub.keys.append(self.headers.get("authorization", ""))
        try:
            reply = self._reply(number, body)
        finally:  # before the client can send its next one
            with stub.lock:
                stub.in_flight -= 1
        if reply is None:
            self.close_connection = True
        else:
            self._send(*reply)

    def _reply(self, number: int, body: Fields) -> tuple[int, Fields] | None:
        options, prompt = self.stub.options, body["prompt"]
        if options.hang:
            time.sleep(2)
        if options.die_after is not None and number > options.die_after:
            if number == options.die_after + 1:
                self.stub.die()
            return None
        # Requests that come first are not answered first.
        time.sleep(options.max_delay_s * ((number * 7919) % 10) / 10)
        status = self._status(number, prompt)
        if status != 200:
            message = f"status {status} for {self.headers.get('authorization')} {'x' * 1000}"
            return status, _error(message)
        with self.stub.lock:
            self.stub.answered.append(tuple(prompt))
        return 200, self._completion(body)

    def _status(self, number: int, prompt: list[int]) -> int:
        options = self.stub.options
        if (
            options.required_key
            and self.headers["authorization"] != f"Bearer {options.required_key}"
        ):
            return 401
        if options.fail_all:
            return options.fail_all
        if options.max_prompt is not None and len(prompt) > options.max_prompt:
            return 400
        if options.fail_every and number % options.fail_every == 0:
            return 500 if number // options.fail_every % 2 else 429
        return 200

    def _completion(self, body: Fields) -> Fields:
        options, prompt = self.stub.options, body["prompt"]
        text, reasoning, finish = draw(prompt, options)
        choice: Fields = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        if reasoning:
            choice[options.reasoning_key] = reasoning
        if options.token_ids:
            choice["token_ids"] = byte_ids(text or reasoning) + [STOP_ID] * (finish == "stop")
        count = len(prompt) + options.extra_prompt_tokens
        usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        head = {"id": "c", "object": "text_completion", "created": 0, "model": body["model"]}
        return {**head, "choices": [choice], "usage": usage}

    def _send(self, status: int, value: Fields) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if status == 429 or status >= 500:
            self.send_header("retry-after-ms", "20")
        self.end_headers()
        self.wfile.write(content)


def byte_ids(text: str) -> list[int]:
    """The tiny tokenizer's ids of printable ASCII: its alphabet is sorted, a blank is a G-dot."""
    return [_ALPHABET["\u0120" if c == " " else c] for c in text]


def _error(message: str) -> Fields:
    return {"error": {"message": message, "type": "stub", "code": None}}
