"""One optimizer step: one denominator over all ranks and micro-batches, then the micro-batches."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch, BatchHead, TopK
from data.cache.stored import StoredBatch
from train.config import ObjectiveConfig
from train.loop.reduce import sum_over_ranks
from train.models.draft import Draft
from train.objective.anchors import Blocks, draw_blocks, slot_weights
from train.objective.fused import FrozenLogits, Slots, TargetLaws, fused_objective
from train.objective.losses import Terms, confidence_terms
from train.objective.metrics import metric_sums


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did on this rank.

    Attributes:
        sums: additive metrics, see `train.objective.metrics`, and the terms of the loss.
        denominator: sum of slot weights over all ranks.
    """

    sums: dict[str, Tensor]
    denominator: float


def micro_batch_terms(
    model: nn.Module,
    draft: Draft,
    batch: Batch,
    blocks: Blocks,
    config: ObjectiveConfig,
    denominator: float,
) -> Terms:
    """Forward pass and objective of one micro-batch.

    Args:
        model: the draft, as the accelerator wrapped it.
        draft: the draft itself.
        batch: the rows.
        blocks: their blocks.
        config: weights of the terms.
        denominator: of the optimizer step.
    """
    flat = flat_positions(batch, blocks)
    # Blocks overlap: a target law and a bias are computed once per distinct position.
    distinct, position = flat.unique(return_inverse=True)
    out = model(
        batch.taps, batch.token_ids, blocks.anchor_pos, blocks.slot_mask, distinct, position
    )
    weights = slot_weights(blocks.slot_mask, config.decay_scale)[blocks.slot_mask]
    labels = batch.token_ids.flatten()[flat + 1]
    fused = fused_objective(
        out.states,
        None if draft.head_weight is None else out.embedded,
        draft.head_weight,
        Slots(position, labels, weights / denominator),
        target_laws(batch, distinct),
        FrozenLogits(draft.frozen.head, draft.frozen.transform),
        config.ce_weight,
        config.l1_weight,
        shared=True,
    )
    confidence = confidence_terms(out.confidence, fused.accept, weights)
    return Terms(
        loss=fused.loss + config.confidence_weight * confidence.bce_sum / denominator,
        ce_sum=(weights * fused.ce).sum(),
        l1_sum=(weights * fused.l1).sum(),
        confidence_sum=confidence.bce_sum.detach(),
        accept_rate=fused.accept,
        confidence=confidence.rate,
    )


def target_laws(batch: Batch, flat: Tensor) -> TargetLaws:
    """The target's laws at some flat positions ``row * T + t``: from the stored last state, else
    from its top-k, raw, the tail dropped.
    """
    if batch.last is not None:
        return TargetLaws(batch.last.flatten(0, 1)[flat])
    if batch.topk is None:
        raise ValueError("a batch without last state and without top-k")
    return TargetLaws(None, TopK(*(t.flatten(0, 1)[flat] for t in vars(batch.topk).values())))


def flat_positions(batch: Batch, blocks: Blocks) -> Tensor:
    """Index ``row * T + anchor + k`` of the token before each counted slot's label, int64 [S]."""
    B, T = batch.token_ids.shape
    K = blocks.slot_mask.shape[-1]
    device = blocks.anchor_pos.device
    rows = torch.arange(B, device=device).view(B, 1, 1) * T
    slots = torch.arange(K, device=device)
    return (rows + blocks.anchor_pos.unsqueeze(-1) + slots)[blocks.slot_mask]


def accumulate_step(
    model: nn.Module,
    heads: Sequence[BatchHead],
    micro_batches: Iterable[Batch | StoredBatch],
    config: ObjectiveConfig,
    seed: int,
    accelerator: Accelerator,
) -> StepResult:
    """Adds the gradient of one optimizer step to the parameters.

    The denominator comes from the masks of all micro-batches of all ranks before the first
    forward pass, so that a token weighs the same in whichever micro-batch it lies.
    """
    draft = accelerator.unwrap_model(model)
    block_size = draft.shape.block_size
    blocks = [draw_blocks(h, config.num_anchors, block_size, seed) for h in heads]
    local = sum(float(slot_weights(b.slot_mask, config.decay_scale).double().sum()) for b in blocks)
    denominator = sum_over_ranks(accelerator, local)
    sums: dict[str, Tensor] = {}
    for i, (host_batch, host_blocks) in enumerate(zip(micro_batches, blocks, strict=True)):
        batch, block = host_batch.to(accelerator.device), host_blocks.to(accelerator.device)
        last = i == len(blocks) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            terms = micro_batch_terms(model, draft, batch, block, config, max(denominator, 1e-9))
            # DDP averages over ranks; the denominator is already the sum over them.
            accelerator.backward(terms.loss * accelerator.num_processes)
        found = metric_sums(terms.accept_rate, terms.confidence, block.slot_mask)
        found |= {
            "ce_sum": terms.ce_sum,
            "l1_sum": terms.l1_sum,
            "confidence_sum": terms.confidence_sum,
        }
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
    sums["weight_sum"] = torch.tensor(local, device=accelerator.device)
    return StepResult(sums, denominator)
