"""Where arithmetic is wider than storage."""

import torch
from jaxtyping import Float
from torch import Tensor


def widen(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """At least fp32: bf16 is widened, fp64 (used to prove formulas) is kept."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
