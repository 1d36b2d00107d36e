"""Who proposes a block: a trained draft, or prompt lookup, which needs no training."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from train.decode.verify import Chooser, Sampling, law
from train.models.backbone import ContextKeysValues
from train.models.draft import Draft


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens, the laws they were drawn from, and the draft's own confidence.

    Attributes:
        tokens: k tokens, k may be 0.
        probs: law of each slot; None for one-hot laws at the tokens.
        confidence: chance of each slot given that the earlier ones stand; empty without a head.
    """

    tokens: list[int]
    probs: Float[Tensor, "k V"] | None
    confidence: list[float] = field(default_factory=list)


class Drafter(Protocol):
    """Proposes blocks for one request at a time."""

    @property
    def block_size(self) -> int:
        """Most tokens that one proposal holds."""

    def start(self) -> None:
        """Forgets the last request."""

    def extend(self, taps: Float[Tensor, "C M D"]) -> None:
        """Takes the target's states of tokens that were committed since the last call."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        """Drafts up to ``limit`` tokens that follow ``tokens``, whose last one is the anchor."""


class ModelDrafter:
    """Drafts with a trained model. Its key/value cache holds committed tokens only."""

    def __init__(self, draft: Draft, sampling: Sampling) -> None:
        self._draft = draft.eval()
        self._sampling = sampling
        self._device = next(draft.parameters()).device
        self._contexts: list[ContextKeysValues] = []
        self._length = 0

    @property
    def block_size(self) -> int:
        """Slots of the draft's block."""
        return self._draft.shape.block_size

    def start(self) -> None:
        """Forgets the last request."""
        self._contexts, self._length = [], 0

    @torch.inference_mode()
    def extend(self, taps: Float[Tensor, "C M D"]) -> None:
        """Adds keys and values of newly committed tokens."""
        end = self._length + taps.shape[0]
        positions = torch.arange(self._length, end, device=self._device)
        new = self._draft.context(taps.unsqueeze(0).to(self._device), positions)
        if self._contexts:
            new = [
                (torch.cat([k0, k1], dim=1), torch.cat([v0, v1], dim=1))
                for (k0, v0), (k1, v1) in zip(self._contexts, new, strict=True)
            ]
        self._contexts, self._length = new, end

    @torch.inference_mode()
    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        """One parallel pass over the block, then the sequential head from left to right."""
        draft = self._draft
        anchor = torch.tensor([[tokens[-1]]], device=self._device)
        position = torch.tensor([[self._length]], device=self._device)
        states = draft.block(anchor, position, self._contexts)[0, 0]
        count = min(limit, draft.shape.block_size)
        base = draft.base_logits(states[:count])
        previous = tokens[-1]
        drafted, laws, confidence = [], [], []
        for k in range(count):
            embedded = draft.embed_previous(torch.tensor([previous], device=self._device))
            probs = law(base[k : k + 1] + draft.head_bias(embedded), self._sampling)[0]
            logit = draft.confidence_logits(states[k : k + 1], embedded)
            if logit is not None:
                confidence.append(float(logit.sigmoid()))
            previous = chooser.categorical(probs)
            drafted.append(previous)
            laws.append(probs)
        return Proposal(drafted, torch.stack(laws), confidence)


class LookupDrafter:
    """Prompt lookup: proposes what followed the last occurrence of the newest n-gram."""

    def __init__(self, block_size: int, longest_ngram: int = 3) -> None:
        self._block_size, self._longest = block_size, longest_ngram

    @property
    def block_size(self) -> int:
        """Most tokens that are proposed at once."""
        return self._block_size

    def start(self) -> None:
        """Nothing is kept."""

    def extend(self, taps: Float[Tensor, "C M D"]) -> None:
        """The target's states are not used."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:  # noqa: ARG002
        """The continuation of the latest match of the longest n-gram that occurs before."""
        count = min(limit, self._block_size)
        for n in range(min(self._longest, len(tokens) - 1), 0, -1):
            tail = tokens[-n:]
            for start in range(len(tokens) - n - 1, -1, -1):
                if tokens[start : start + n] == tail:
                    found = tokens[start + n : start + n + count]
                    return Proposal(found, None)
        return Proposal([], None)
