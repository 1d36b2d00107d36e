"""The draft's transformer: Qwen3-style layers whose keys and values also come from the context.

Module names are the engines' tensor names: a state dict is exported as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from train.models.attention import grouped_attention
from train.models.precision import widen
from train.models.rope import rotate

Rope = tuple[Tensor, Tensor]
ContextKeysValues = tuple[Tensor, Tensor]
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class BackboneConfig:
    """Shape of the draft's transformer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
        """Normalises; the result has the type of ``x``."""
        wide = widen(x)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class BlockAttention(nn.Module):
    """Attention of block slots over context and block, one projection for the keys of both."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        D, E = config.hidden_size, config.head_dim
        self.head_dim = E
        self.q_proj = nn.Linear(D, config.num_heads * E, bias=False)
        self.k_proj = nn.Linear(D, config.num_kv_heads * E, bias=False)
        self.v_proj = nn.Linear(D, config.num_kv_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_heads * E, D, bias=False)
        self.q_norm = RMSNorm(E, config.rms_norm_eps)
        self.k_norm = RMSNorm(E, config.rms_norm_eps)
        self.attend: Attention = grouped_attention

    def keys_values(self, x: Float[Tensor, "*s D"], rope: Rope) -> ContextKeysValues:
        """Keys (normed and rotated) and values of context features or block states."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), *rope)
        return keys, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Float[Tensor, "B N K D"],
        rope: Rope,
        context: ContextKeysValues,
        visible: Bool[Tensor, "B N C"] | None,
    ) -> Float[Tensor, "B N K D"]:
        """Attends from every slot; see `train.models.attention.block_attention`."""
        query = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim)
        query = rotate(self.q_norm(query), *rope)
        out = self.attend(query, *context, *self.keys_values(x, rope), visible)
        projected: Tensor = self.o_proj(out.flatten(-2))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
        """Gated linear unit."""
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Float[Tensor, "B N K D"],
        rope: Rope,
        context: ContextKeysValues,
        visible: Bool[Tensor, "B N C"] | None,
    ) -> Float[Tensor, "B N K D"]:
        """One layer over block states."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context, visible)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
