"""Sequential heads: what is added to the base logits of slot k once token k-1 is known."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from train.config import HeadKind

_INIT_STD = 0.02


class VanillaHead(nn.Module):
    """Low-rank Markov bias ``W2 W1[x]`` of the previous token (DSpark Eq. 4-6, vanilla)."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=_INIT_STD)
        nn.init.normal_(self.markov_w2.weight, std=_INIT_STD)

    def embed(self, previous: Int[Tensor, "*s"]) -> Float[Tensor, "*s R"]:
        """``W1[x]``: also an input of the confidence head."""
        out: Tensor = self.markov_w1(previous)
        return out

    def bias(self, embedded: Float[Tensor, "*s R"]) -> Float[Tensor, "*s V"]:
        """What is added to the base logits, fp32."""
        out: Tensor = self.markov_w2(embedded)
        return out.float()


HEADS: dict[HeadKind, Callable[[int, int], VanillaHead]] = {HeadKind.vanilla: VanillaHead}


class ConfidenceHead(nn.Module):
    """Chance that slot k survives given that all earlier ones did (DSpark Eq. 7), as a logit."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)
        nn.init.normal_(self.proj.weight, std=_INIT_STD)
        nn.init.zeros_(self.proj.bias)

    def forward(
        self, states: Float[Tensor, "*s D"], embedded: Float[Tensor, "*s R"]
    ) -> Float[Tensor, "*s"]:
        """Logit of the conditional acceptance rate, fp32."""
        joined = torch.cat([states.to(embedded.dtype), embedded], dim=-1)
        out: Tensor = self.proj(joined)
        return out.squeeze(-1).float()
