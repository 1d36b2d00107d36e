"""The collectives of the trainer: one reduction before a step's first forward, one for metrics."""

import torch
from accelerate import Accelerator
from torch import Tensor


def sum_over_ranks(accelerator: Accelerator, value: float) -> float:
    """Sum of one number over all ranks, in double precision."""
    total = torch.tensor([value], dtype=torch.float64, device=accelerator.device)
    return float(accelerator.reduce(total, reduction="sum")[0])


def sum_metrics(accelerator: Accelerator, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums of all entries over all ranks, in one collective."""
    flat = torch.cat([v.double().flatten() for v in sums.values()])
    total = accelerator.reduce(flat, reduction="sum").cpu()
    parts = total.split([v.numel() for v in sums.values()])
    return {k: p.view(v.shape) for (k, v), p in zip(sums.items(), parts, strict=True)}
