"""Rows and batches: what travels between the stages. Shapes live here.

Symbols: B rows, T tokens of the longest row, M tapped layers, D hidden size.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One context that serving would have: a prompt and the completion that answers it.

    Attributes:
        prompt_ids: the rendered prompt with its generation prompt; never supervised.
        completion_ids: what the target answered, up to and including the stop token; supervised.
        class_name: kind of the prompt (math, code, chat, ...).
        source: where the row came from, as ``file:line``.
        finish_reason: ``stop``, or ``length`` for an answer cut at its token limit.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    class_name: str = ""
    source: str = ""
    finish_reason: str = "stop"

    @cached_property
    def row_id(self) -> str:
        """Hash of the row's tokens: its identity wherever it lies (32 hex digits)."""
        return content_hash([list(self.prompt_ids), list(self.completion_ids)])

    @property
    def row_key(self) -> int:
        """The first 63 bits of `row_id`: keys the random anchors of the row."""
        return int(self.row_id[:16], 16) >> 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion in one."""
        return self.prompt_ids + self.completion_ids

    @property
    def loss_mask(self) -> list[bool]:
        """Which tokens are supervised; as long as `token_ids`."""
        return [False] * len(self.prompt_ids) + [True] * len(self.completion_ids)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def truncated(self, max_length: int) -> "Row":
        """The row cut at its end to ``max_length`` tokens; the completion loses first."""
        if len(self) <= max_length:
            return self
        return Row(
            self.prompt_ids[:max_length],
            self.completion_ids[: max(0, max_length - len(self.prompt_ids))],
            self.class_name,
            self.source,
            "length",
        )


def content_hash(value: object) -> str:
    """32 hex digits that depend on the JSON form of a value alone."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class CachedRow:
    """One row as the cache holds it.

    Attributes:
        token_ids: int64.
        loss_mask: which tokens are supervised.
        taps: outputs of the tapped target layers.
        last: last state of the target, after its final norm.
        row_key: keys the row's anchors, see `Row.row_key`.
    """

    token_ids: Int[Tensor, " T"]
    loss_mask: Bool[Tensor, " T"]
    taps: Float[Tensor, "T M D"]
    last: Float[Tensor, "T D"]
    row_key: int


@dataclass(frozen=True)
class Batch:
    """Rows padded to the longest of them; ``lengths``, never a token's value, says what is padding.

    Attributes:
        lengths: tokens of each row.
        row_keys: `Row.row_key` of each row.
        epochs: pass over the data in which each row is read; with its key it seeds the anchors.
    """

    token_ids: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    taps: Float[Tensor, "B T M D"]
    last: Float[Tensor, "B T D"]
    lengths: tuple[int, ...]
    row_keys: tuple[int, ...]
    epochs: tuple[int, ...]

    def to(self, device: torch.device) -> "Batch":
        """The batch on another device."""
        return Batch(
            self.token_ids.to(device, non_blocking=True),
            self.loss_mask.to(device, non_blocking=True),
            self.taps.to(device, non_blocking=True),
            self.last.to(device, non_blocking=True),
            self.lengths,
            self.row_keys,
            self.epochs,
        )


def collate(rows: Sequence[CachedRow], epochs: Sequence[int]) -> Batch:
    """Pads rows on the right with zeros into one batch."""

    def pad(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(r, name) for r in rows], batch_first=True)

    return Batch(
        token_ids=pad("token_ids"),
        loss_mask=pad("loss_mask"),
        taps=pad("taps"),
        last=pad("last"),
        lengths=tuple(len(r.token_ids) for r in rows),
        row_keys=tuple(r.row_key for r in rows),
        epochs=tuple(epochs),
    )
