"""One optimizer step: one denominator over all ranks and micro-batches, then the micro-batches."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch, BatchHead
from data.cache.stored import StoredBatch
from data.target import FrozenHead
from train.config import ObjectiveConfig
from train.loop.reduce import sum_over_ranks
from train.objective.anchors import Blocks, draw_blocks, slot_weights
from train.objective.losses import Terms, TermWeights, objective
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
    frozen: FrozenHead,
    batch: Batch,
    blocks: Blocks,
    config: ObjectiveConfig,
    denominator: float,
) -> Terms:
    """Forward pass and objective of one micro-batch."""
    logits, confidence = model(batch.taps, batch.token_ids, blocks.anchor_pos, blocks.slot_mask)
    flat = flat_positions(batch, blocks)
    # Blocks overlap: the target's law is computed once per distinct position.
    distinct, inverse = flat.unique(return_inverse=True)
    with torch.no_grad():
        target_probs = target_law(frozen, batch, distinct)[inverse]
    weights = slot_weights(blocks.slot_mask, config.decay_scale)[blocks.slot_mask]
    return objective(
        logits,
        target_probs,
        labels=batch.token_ids.flatten()[flat + 1],
        weights=weights,
        confidence_logits=confidence,
        term_weights=TermWeights(config.ce_weight, config.l1_weight, config.confidence_weight),
        denominator=denominator,
    )


def target_law(frozen: FrozenHead, batch: Batch, flat: Tensor) -> Tensor:
    """The target's law at some flat positions ``row * T + t``, fp32 ``[n, V]``.

    From the stored last state, else from its top-k: raw, the tail dropped, which makes acceptance
    a strict lower bound; renormalised or bucketed tails bias it more.
    """
    if batch.last is not None:
        return frozen.logits(batch.last.flatten(0, 1)[flat]).softmax(-1)
    if batch.topk is None:
        raise ValueError("a batch without last state and without top-k")
    probs = batch.topk.logprobs.flatten(0, 1)[flat].exp()
    law = probs.new_zeros(len(flat), frozen.head.shape[0])
    return law.scatter_(-1, batch.topk.ids.flatten(0, 1)[flat], probs)


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
    frozen: FrozenHead,
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
    block_size = accelerator.unwrap_model(model).shape.block_size
    blocks = [draw_blocks(h, config.num_anchors, block_size, seed) for h in heads]
    local = sum(float(slot_weights(b.slot_mask, config.decay_scale).double().sum()) for b in blocks)
    denominator = sum_over_ranks(accelerator, local)
    sums: dict[str, Tensor] = {}
    for i, (host_batch, host_blocks) in enumerate(zip(micro_batches, blocks, strict=True)):
        batch, block = host_batch.to(accelerator.device), host_blocks.to(accelerator.device)
        last = i == len(blocks) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            terms = micro_batch_terms(model, frozen, batch, block, config, max(denominator, 1e-9))
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
