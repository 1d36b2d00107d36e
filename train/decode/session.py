"""Rounds of drafting and verifying for one request; without a drafter, plain decoding."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from data.target import Target
from train.decode.drafters import Drafter, Proposal
from train.decode.verify import Chooser, Sampling, law, verify_chain


@dataclass(frozen=True)
class Round:
    """One draft/verify round.

    Attributes:
        drafted: tokens that were proposed and verified, up to a stop token that stood.
        accepted: how many of them stood.
        committed: tokens that the round added to the output.
        cut: whether the token limit kept the drafter from drafting a whole block.
        confidence: the draft's confidence in each proposed token.
        draft_s: seconds of drafting.
        verify_s: seconds of the target's pass and the verification.
    """

    drafted: int
    accepted: int
    committed: int
    cut: bool
    confidence: list[float]
    draft_s: float
    verify_s: float


@dataclass
class Decoded:
    """What one request gave.

    Attributes:
        tokens: the new tokens, up to and including a stop token.
        rounds: every round after the first token, which comes from the prompt's own pass.
        prefill_s: seconds of the prompt's pass.
        decode_s: seconds of all rounds.
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def from_plain(cls, value: dict[str, Any]) -> "Decoded":
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**value, "rounds": [Round(**r) for r in value["rounds"]]})


class Session:
    """Decodes with a target and, optionally, a drafter. The output has the target's law.

    Args:
        target: taps exactly the layers that the drafter reads.
        drafter: None for plain autoregressive decoding.
        sampling: the target's law.
    """

    def __init__(self, target: Target, drafter: Drafter | None, sampling: Sampling) -> None:
        self._target, self._drafter, self._sampling = target, drafter, sampling

    def decode(self, prompt_ids: list[int], max_new_tokens: int, chooser: Chooser) -> Decoded:
        """Decodes until a stop token or exactly ``max_new_tokens`` tokens."""
        result = Decoded()
        start = time.perf_counter()
        cache = self._target.new_cache()
        output = self._target.forward(torch.tensor([prompt_ids]), cache)
        first = law(self._target.logits(output.last[0, -1]), self._sampling)
        tokens = [*prompt_ids, chooser.categorical(first)]
        if self._drafter is not None:
            self._drafter.start()
            self._drafter.extend(output.taps[0])
        result.prefill_s = time.perf_counter() - start
        end = len(prompt_ids) + max_new_tokens
        while len(tokens) < end and tokens[-1] not in self._target.stop_ids:
            began = time.perf_counter()
            limit = end - len(tokens) - 1
            proposal = self._propose(tokens, limit, chooser)
            drafted_at = time.perf_counter()
            block = torch.tensor([[tokens[-1], *proposal.tokens]])
            output = self._target.forward(block, cache)
            target_probs = law(self._target.logits(output.last[0]), self._sampling)
            verdict = verify_chain(
                proposal.tokens, _laws(proposal, target_probs), target_probs, chooser
            )
            self._target.drop_last(cache, len(proposal.tokens) - verdict.accepted)
            new = [*proposal.tokens[: verdict.accepted], verdict.next_token]
            stop = next((i for i, t in enumerate(new) if t in self._target.stop_ids), None)
            drafted, accepted = len(proposal.tokens), verdict.accepted
            if stop is not None:
                # What was drafted behind a stop token is neither output nor evidence.
                new = new[: stop + 1]
                drafted, accepted = min(drafted, stop + 1), min(accepted, stop + 1)
            if self._drafter is not None:
                self._drafter.extend(output.taps[0, : verdict.accepted + 1])
            tokens += new
            result.rounds.append(
                Round(
                    drafted,
                    accepted,
                    len(new),
                    self._drafter is not None and limit < self._drafter.block_size,
                    proposal.confidence[:drafted],
                    drafted_at - began,
                    time.perf_counter() - drafted_at,
                )
            )
        result.tokens = tokens[len(prompt_ids) :]
        result.decode_s = time.perf_counter() - start - result.prefill_s
        return result

    def _propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        if self._drafter is None or limit < 1:
            return Proposal([], None)
        return self._drafter.propose(tokens, limit, chooser)


def _laws(proposal: Proposal, target_probs: Float[Tensor, "K_plus_1 V"]) -> Tensor:
    """Law of every proposed slot; one-hot where the drafter does not draw."""
    if proposal.probs is not None:
        return proposal.probs.to(target_probs.device)
    ids = torch.tensor(proposal.tokens, dtype=torch.long, device=target_probs.device)
    return torch.nn.functional.one_hot(ids, target_probs.shape[-1]).float()
