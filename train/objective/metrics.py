"""What is reported while training, as sums that add up over micro-batches and ranks.

All of it is teacher-forced: the block's earlier tokens are the row's own. It is not the accepted
length of real decoding, and is never called that.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def tau_sums(
    rates: Float[Tensor, "*s K"], slot_mask: Bool[Tensor, "*s K"]
) -> tuple[Tensor, Tensor]:
    """Sum over *complete* blocks of 1 + sum_k prod_{j<=k} a_j, and the number of those blocks.

    A block that the end of the answer cuts says nothing of the slots behind it, so it is left out.
    """
    complete = slot_mask.all(-1)
    survival = rates.cumprod(-1).sum(-1) + 1
    return (survival * complete).sum(), complete.sum()


def metric_sums(
    rates: Float[Tensor, " S"],
    confidence: Float[Tensor, " S"] | None,
    slot_mask: Bool[Tensor, "B N K"],
) -> dict[str, Tensor]:
    """Additive sums of one micro-batch; `summarise` turns totals into figures.

    Args:
        rates: acceptance rate of the counted slots, in the order of ``slot_mask``.
        confidence: predicted acceptance of the same slots.
        slot_mask: which slots count.
    """
    full = torch.zeros(slot_mask.shape, device=rates.device)
    full[slot_mask] = rates
    tau, blocks = tau_sums(full, slot_mask)
    sums = {
        "slot_accept_sum": full.sum((0, 1)),
        "slot_count": slot_mask.sum((0, 1)),
        "tau_sum": tau,
        "block_count": blocks,
    }
    if confidence is not None:
        sums["confidence_bias_sum"] = (confidence - rates).sum()
        sums["confidence_error_sum"] = (confidence - rates).abs().sum()
    return sums


def summarise(totals: dict[str, Tensor]) -> dict[str, float | list[float]]:
    """Figures from summed `metric_sums`; a figure without any slot is left out."""
    out: dict[str, float | list[float]] = {}
    counts = totals["slot_count"].clamp_min(1)
    slots = totals["slot_count"].sum()
    out["accept_rate_by_slot"] = [float(v) for v in totals["slot_accept_sum"] / counts]
    if totals["block_count"] > 0:
        out["tau_teacher_forced"] = float(totals["tau_sum"] / totals["block_count"])
    if "confidence_bias_sum" in totals and slots > 0:
        out["confidence_bias"] = float(totals["confidence_bias_sum"] / slots)
        out["confidence_error"] = float(totals["confidence_error_sum"] / slots)
    return out
