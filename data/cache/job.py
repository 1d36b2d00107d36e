"""One part on its way from the target's passes to its commit: encoded and written by threads."""

import os
import socket
import time
from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch

from data.cache.claims import Claims, part_work
from data.cache.encode import StateEncoder
from data.cache.format import array_specs
from data.cache.passes import PassOutput
from data.cache.store import Store
from data.cache.write import PartWriter
from data.errors import CacheError
from data.pipeline import Stage

Task = Callable[[], None]


def call(task: Task) -> None:
    """What the stages do with what they are given."""
    task()


class PartJob:
    """Encodes and writes one part; its methods run in the stages' threads, in order.

    Args:
        store: where the cache lies.
        encoder: makes the stored arrays.
        part: its number.
        claims: of this builder.
        committed: called with the bytes of the part once it counts.
    """

    def __init__(
        self,
        store: Store,
        encoder: StateEncoder,
        part: int,
        claims: Claims,
        committed: Callable[[int, int], None],
    ) -> None:
        self.part = part
        self._store, self._encoder, self._claims = store, encoder, claims
        self._committed = committed
        self._writer: PartWriter | None = None
        self._skipped: list[list[object]] = []
        self._pieces: list[list[int]] = []
        self._computed = 0

    def put(self, found: PassOutput, encode: Stage[Task], write: Stage[Task]) -> None:
        """Hands the output of a pass to the threads."""
        # Recorded here: the encoding thread must not wait for passes that come later.
        event = torch.cuda.Event() if found.output.last.is_cuda else None
        if event is not None:
            event.record()
        encode.put(lambda: self._encode(found, event, write), found.num_bytes)

    def end(self, encode: Stage[Task], write: Stage[Task]) -> None:
        """Commits the part when all of it is written."""
        encode.put(lambda: write.put(self._commit, 0), 0)

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        if self._writer is not None:
            self._writer.discard()

    def _encode(
        self, found: PassOutput, event: torch.cuda.Event | None, write: Stage[Task]
    ) -> None:
        if event is None:
            self._encode_pieces(found, write)
            return
        stream = _side_stream(found.output.last.device)
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            for tensor in (found.output.taps, found.output.last):
                tensor.record_stream(stream)
            self._encode_pieces(found, write)

    def _encode_pieces(self, found: PassOutput, write: Stage[Task]) -> None:
        self._computed += found.computed_tokens
        for b, piece in enumerate(found.pieces):
            n = len(piece)
            arrays, finite = self._encoder.encode(
                found.output.taps[b, :n], found.output.last[b, :n]
            )
            if not finite:
                reason = "states that are not finite, or too large for the codec"
                self._skipped.append([piece.entry, piece.source, reason])
            self._pieces.append([piece.entry, n])
            arrays |= {"input_ids": piece.token_ids, "loss_mask": piece.loss_mask}
            size = sum(array.nbytes for array in arrays.values())
            write.put(partial(self._append, arrays), size)

    def _append(self, arrays: dict[str, np.ndarray]) -> None:
        if self._writer is None:
            header = self._encoder.header
            self._writer = PartWriter(
                self._store, self.part, array_specs(header), header.layout, self._claims.token
            )
        self._writer.append(arrays)

    def _commit(self) -> None:
        if self._writer is None:
            raise RuntimeError("a part without pieces")
        if not self._claims.is_held(part_work(self.part)):
            raise CacheError(
                f"{self._store.url}: part {self.part} went to another process, because this one "
                "showed no life for cache.claim_timeout_s\n  fix: run the same command again; "
                "raise that key if it was alive"
            )
        written = self._writer.commit(
            {
                "cache_uuid": self._encoder.header.cache_uuid,
                "writer": {
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "token": self._claims.token,
                },
                "pieces": self._pieces,
                "skipped": self._skipped,
                "computed_tokens": self._computed,
                "time": time.time(),
            }
        )
        self._writer = None
        self._committed(self.part, written)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a device encodes and copies while its main stream computes the next pass."""
    return torch.cuda.Stream(device)
