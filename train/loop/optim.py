"""Optimizer and learning rate: the rate is a function of the step, so nothing is resumed."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.config import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over fp32 masters, in one fused kernel."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )


def lr_at(step: int, total_steps: int, peak: float, warmup_ratio: float) -> float:
    """Rate of 0-based ``step``: linear rise to the peak, then half a cosine that would reach 0
    one step after the last.
    """
    warmup = max(1, round(total_steps * warmup_ratio))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / (max(0, total_steps - warmup) + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every parameter group the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def total_steps(num_rows: int, config: OptimConfig) -> int:
    """Optimizer steps of the run."""
    if config.steps is not None:
        return config.steps
    return max(1, num_rows * config.epochs // config.rows_per_step)
