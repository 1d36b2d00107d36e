"""The objective in plain autograd, over counted slots only: the reference for any faster one.

Every term is ``sum(w * term) / denominator``, where the denominator is the sum of the weights over
the whole optimizer step (all ranks, all micro-batches) and is known before the first forward pass.
All values and all losses are fp32; the target's side carries no gradient.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax


@dataclass(frozen=True)
class TermWeights:
    """Weights of the terms (DSpark Eq. 12). A term of weight 0 has no gradient and needs no input;
    only the distance of the two laws is always computed, because acceptance is always reported.
    """

    ce: float
    l1: float
    confidence: float


@dataclass(frozen=True)
class Terms:
    """Sums over the counted slots.

    Attributes:
        loss: what is minimised: weighted sum of the terms, over the denominator.
        ce_sum: weighted sum of the cross-entropy.
        l1_sum: weighted sum of ``sum |p_d - p_t|``.
        confidence_sum: weighted sum of the confidence BCE.
        accept_rate: chance that the slot's draft survives verification (no gradient).
        confidence: predicted chance, or None without a head (no gradient).
    """

    loss: Float[Tensor, ""]
    ce_sum: Float[Tensor, ""]
    l1_sum: Float[Tensor, ""]
    confidence_sum: Float[Tensor, ""]
    accept_rate: Float[Tensor, " S"]
    confidence: Float[Tensor, " S"] | None


@dataclass(frozen=True)
class ConfidenceTerms:
    """What the confidence head gives.

    Attributes:
        bce_sum: weighted sum of its BCE; 0 without a head.
        rate: predicted chance (no gradient); None without a head.
    """

    bce_sum: Float[Tensor, ""]
    rate: Float[Tensor, " S"] | None


def confidence_terms(
    logits: Float[Tensor, " S"] | None,
    accepted: Float[Tensor, " S"],
    weights: Float[Tensor, " S"],
) -> ConfidenceTerms:
    """BCE of the confidence head against the chance of survival (DSpark Eq. 11).

    Args:
        logits: of the head, or None without one.
        accepted: chance that the slot's draft survives; constant.
        weights: slot weights.
    """
    if logits is None:
        return ConfidenceTerms(accepted.new_zeros(()), None)
    wide = logits.to(accepted.dtype)
    bce = binary_cross_entropy_with_logits(wide, accepted, reduction="none")
    return ConfidenceTerms((weights * bce).sum(), wide.detach().sigmoid())


def objective(
    draft_logits: Float[Tensor, "S V"],
    target_probs: Float[Tensor, "S V"],
    labels: Int[Tensor, " S"],
    weights: Float[Tensor, " S"],
    confidence_logits: Float[Tensor, " S"] | None,
    term_weights: TermWeights,
    denominator: float,
) -> Terms:
    """Cross-entropy, L1 distance and confidence BCE of the counted slots (DSpark Eq. 9-12).

    Args:
        draft_logits: base logits plus sequential bias.
        target_probs: the target's law at each slot; constant.
        labels: the row's own next tokens.
        weights: slot weights, see `train.objective.anchors.slot_weights`.
        confidence_logits: or None without a confidence head.
        term_weights: see `TermWeights`.
        denominator: sum of the weights of the optimizer step, positive.
    """
    log_probs = log_softmax(draft_logits.float(), dim=-1)
    zero = log_probs.new_zeros(())
    target_probs = target_probs.detach().float()
    with torch.set_grad_enabled(term_weights.l1 > 0 and torch.is_grad_enabled()):
        l1 = (log_probs.exp() - target_probs).abs().sum(-1)
    # sum min(p, q); a law without its tail (cached top-k) sums to less than 1.
    mass = target_probs.sum(-1)
    accepted = ((1 + mass - l1.detach()) / 2).clamp(0, 1)
    l1_sum = (weights * l1).sum() if term_weights.l1 > 0 else zero
    ce_sum = zero
    if term_weights.ce > 0:
        ce_sum = -(weights * log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).sum()
    weighted = confidence_logits if term_weights.confidence > 0 else None
    found = confidence_terms(confidence_logits, accepted, weights)
    confidence_sum = zero if weighted is None else found.bce_sum
    confidence = found.rate
    loss = (
        term_weights.ce * ce_sum
        + term_weights.l1 * l1_sum
        + term_weights.confidence * confidence_sum
    ) / denominator
    return Terms(
        loss,
        ce_sum.detach(),
        l1_sum.detach(),
        confidence_sum.detach(),
        accepted,
        confidence,
    )
