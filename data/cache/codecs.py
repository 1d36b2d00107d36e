"""Hidden states to stored bytes and back. `bf16` is exact for a target that runs in bf16."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def encode_bf16(states: Float[Tensor, "..."]) -> np.ndarray:
    """Bits of the states in bf16, as uint16 of the same shape, on the CPU."""
    bits = states.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
    return bits.numpy().view(np.uint16)


def decode_bf16(bits: np.ndarray) -> Float[Tensor, "..."]:
    """The bf16 states of stored bits; shares memory with a writable array."""
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
