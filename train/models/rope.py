"""Rotary position embedding in the half-rotation ("neox") layout that the engines serve."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from data.errors import ConfigError
from train.models.precision import widen


def rope_theta(text_config: Any) -> float:  # noqa: ANN401 - configs are model-specific
    """The target's base frequency.

    Raises:
        ConfigError: a rotary form that the draft does not implement: an inherited field that
            training does not use would be applied by the engine.
    """
    parameters = dict(text_config.rope_parameters)
    if isinstance(parameters.get("full_attention"), dict):
        parameters = dict(parameters["full_attention"])
    kind = parameters.pop("rope_type", "default")
    theta = parameters.pop("rope_theta", None)
    partial = parameters.pop("partial_rotary_factor", 1.0)
    if kind != "default" or theta is None or partial != 1.0 or parameters:
        raise ConfigError(
            f"target's rope_parameters={text_config.rope_parameters}",
            "the draft implements plain rotary embedding over the whole head only",
            "give the draft its own: draft.rope_theta=1e6 (it need not be the target's)",
        )
    return float(theta)


def rope_tables(
    positions: Int[Tensor, "*s"], head_dim: int, theta: float
) -> tuple[Float[Tensor, "*s E"], Float[Tensor, "*s E"]]:
    """Cosine and sine of every position, fp32."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / head_dim)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "*s heads E"], cos: Float[Tensor, "*#s E"], sin: Float[Tensor, "*#s E"]
) -> Float[Tensor, "*s heads E"]:
    """Rotates every head by its position; computed in fp32, returned in the type of ``x``."""
    wide = widen(x)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)
