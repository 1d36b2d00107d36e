"""Rows and batches: what travels between the stages. Shapes live here.

Symbols: B rows, T tokens of the longest row, M tapped layers, D hidden size.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CONTEXT, ASSISTANT = "context", "assistant"


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a row that are supervised, or not, for the same reason.

    Attributes:
        role: who wrote them (``assistant``), or ``context`` for what serving is given.
    """

    token_ids: tuple[int, ...]
    supervised: bool
    role: str


@dataclass(frozen=True)
class Row:
    """One context that serving would have, with the answers that the target would generate.

    Only what the target would generate is supervised: its answers, up to and including the stop
    token. Several turns share a row when serving would have tokenised them to the same ids.

    Attributes:
        class_name: kind of the prompt (math, code, chat, ...).
        source: where the row came from, as ``file:line``.
        finish_reason: ``stop``, or ``length`` when the last answer was cut.
        language: what the source says, or empty.
    """

    segments: tuple[Segment, ...]
    class_name: str = ""
    source: str = ""
    finish_reason: str = "stop"
    language: str = ""

    @classmethod
    def of(cls, prompt_ids: Sequence[int], completion_ids: Sequence[int], **rest: str) -> "Row":
        """A row of one prompt and one completion; ``rest`` are the row's other fields."""
        context = Segment(tuple(prompt_ids), False, CONTEXT)
        answer = Segment(tuple(completion_ids), True, ASSISTANT)
        return cls(tuple(s for s in (context, answer) if s.token_ids), **rest)

    @cached_property
    def row_id(self) -> str:
        """Hash of tokens and supervision: the row's identity wherever it lies (32 hex digits)."""
        return content_hash([[list(s.token_ids), s.supervised] for s in self.segments])

    @property
    def row_key(self) -> int:
        """The first 63 bits of `row_id`: keys the random anchors of the row."""
        return int(self.row_id[:16], 16) >> 1

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def loss_mask(self) -> list[bool]:
        """Which tokens are supervised; as long as `token_ids`."""
        return [s.supervised for s in self.segments for _ in s.token_ids]

    @property
    def num_supervised(self) -> int:
        """Supervised tokens."""
        return sum(len(s.token_ids) for s in self.segments if s.supervised)

    def __len__(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    def truncated(self, max_length: int) -> "Row":
        """The row cut at its end to ``max_length`` tokens; what is kept does not change."""
        if len(self) <= max_length:
            return self
        kept, room = [], max_length
        for segment in self.segments:
            ids = segment.token_ids[:room]
            room -= len(ids)
            if ids:
                kept.append(replace(segment, token_ids=ids))
        return replace(self, segments=tuple(kept), finish_reason="length")


def content_hash(value: object) -> str:
    """32 hex digits that depend on the JSON form of a value alone."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TopK:
    """The target's likeliest next tokens at every position, likeliest first.

    Attributes:
        ids: int64.
        logprobs: fp32; the rest of the probability is dropped, nothing is renormalised.
        logsumexp: fp32; ``logprobs + logsumexp`` are the target's logits.
    """

    ids: Int[Tensor, "*B T k"]
    logprobs: Float[Tensor, "*B T k"]
    logsumexp: Float[Tensor, "*B T"]

    def to(self, device: torch.device) -> "TopK":
        """The same on another device."""
        moved = (t.to(device, non_blocking=True) for t in vars(self).values())
        return TopK(*moved)


@dataclass(frozen=True)
class CachedRow:
    """One row as the cache holds it.

    Attributes:
        token_ids: int64.
        loss_mask: which tokens are supervised.
        taps: outputs of the tapped target layers.
        last: last state of the target, after its final norm; None in a cache without it.
        row_key: keys the row's anchors, see `Row.row_key`.
        topk: or None in a cache without it.
    """

    token_ids: Int[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    taps: Float[Tensor, "T M D"]
    last: Float[Tensor, "T D"] | None
    row_key: int
    topk: TopK | None = None


@dataclass(frozen=True)
class BatchHead:
    """What is known of a batch before its states are read; enough to draw its blocks.

    Attributes:
        lengths: tokens of each row.
        row_keys: `Row.row_key` of each row.
        epochs: pass over the data in which each row is read; with its key it seeds the anchors.
    """

    loss_mask: Bool[Tensor, "B T"]
    lengths: tuple[int, ...]
    row_keys: tuple[int, ...]
    epochs: tuple[int, ...]


@dataclass(frozen=True)
class Batch(BatchHead):
    """Rows padded to the longest of them; ``lengths``, never a token's value, says what is padding.

    Attributes:
        taps, last, topk: as in `CachedRow`.
    """

    token_ids: Int[Tensor, "B T"]
    taps: Float[Tensor, "B T M D"]
    last: Float[Tensor, "B T D"] | None
    topk: TopK | None = None

    def to(self, device: torch.device) -> "Batch":
        """The batch on another device."""
        return replace(
            self,
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            token_ids=self.token_ids.to(device, non_blocking=True),
            taps=self.taps.to(device, non_blocking=True),
            last=None if self.last is None else self.last.to(device, non_blocking=True),
            topk=None if self.topk is None else self.topk.to(device),
        )
