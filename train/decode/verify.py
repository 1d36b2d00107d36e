"""Chain verification by rejection sampling: the output has exactly the target's law.

(Leviathan et al. 2023; DSpark section 2.1.) Pure functions over one block. Randomness comes from a
`Chooser`, so that a test can walk through every outcome with its probability.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The law that is sampled: temperature first, then top-k, then nucleus. 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@runtime_checkable
class Chooser(Protocol):
    """A source of random choices."""

    def categorical(self, probs: Float[Tensor, " V"]) -> int:
        """Index drawn from probabilities that sum to 1."""

    def accept(self, probability: float) -> bool:
        """True with the given probability, in [0, 1]."""


class RandomChooser:
    """Draws with a seeded generator, in double precision."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def categorical(self, probs: Float[Tensor, " V"]) -> int:
        """Inverse-CDF draw; a token of probability 0 is never drawn."""
        cumulative = probs.double().cpu().cumsum(0)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64)
        index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
        return min(index, int(probs.nonzero().max()))

    def accept(self, probability: float) -> bool:
        """Compares with a uniform number in [0, 1)."""
        return bool(torch.rand((), generator=self._generator, dtype=torch.float64) < probability)


def law(logits: Float[Tensor, "*s V"], sampling: Sampling) -> Float[Tensor, "*s V"]:
    """Probabilities that sampling follows, fp32; one-hot at temperature 0.

    Ties at the top-k border are all kept; the nucleus is the smallest set of likeliest tokens
    whose probability reaches ``top_p``.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        border = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < border, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(probs, dtype=torch.bool)
        dropped.scatter_(-1, order, before >= sampling.top_p)
        probs = probs.masked_fill(dropped, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


@dataclass(frozen=True)
class Verdict:
    """Outcome of one block: ``accepted`` drafts stand, ``next_token`` follows them.

    ``next_token`` is the bonus token when all drafts stand, else the residual's draw.
    """

    accepted: int
    next_token: int


def verify_chain(
    drafts: list[int],
    draft_probs: Float[Tensor, "K V"],
    target_probs: Float[Tensor, "K_plus_1 V"],
    chooser: Chooser,
) -> Verdict:
    """Accepts the longest prefix that the target's law allows and draws the token after it.

    Args:
        drafts: K drafted tokens; K may be 0.
        draft_probs: q: for each slot exactly the law from which its token was drawn.
        target_probs: p: the target's law after the committed text and each prefix of the drafts.
        chooser: the source of randomness.
    """
    for k, token in enumerate(drafts):
        p, q = target_probs[k], draft_probs[k]
        if not chooser.accept(acceptance(p, q, token)):
            return Verdict(k, chooser.categorical(residual(p, q)))
    return Verdict(len(drafts), chooser.categorical(target_probs[len(drafts)]))


def acceptance(p: Float[Tensor, " V"], q: Float[Tensor, " V"], token: int) -> float:
    """min(1, p(x) / q(x)) of a token that was drawn from q."""
    return min(1.0, float(p[token].double() / q[token].double()))


def residual(p: Float[Tensor, " V"], q: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
    """norm(max(p - q, 0)): the law of the token that replaces a rejected one.

    It is only used after a rejection, which has probability sum max(p - q, 0). Where rounding
    leaves no mass, p and q agree to the last bit and p itself is the law.
    """
    mass = (p.double() - q.double()).clamp_min(0)
    total = mass.sum()
    return mass / total if total > 0 else p.double()
