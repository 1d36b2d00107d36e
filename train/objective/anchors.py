"""Where blocks start, and which of their slots count: functions of (seed, epoch, row) alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from data.batch import BatchHead


def draw_anchors(
    loss_mask: np.ndarray, num_anchors: int, seed: int, epoch: int, row_key: int
) -> np.ndarray:
    """Anchor positions of one row, sorted, without replacement; int64 [n], n <= num_anchors.

    A position may be an anchor when it and the next one are supervised. The generator is keyed,
    not advanced: ranks, packing and resuming do not change what is drawn.
    """
    candidates = np.flatnonzero(loss_mask[:-1] & loss_mask[1:])
    if len(candidates) <= num_anchors:
        return candidates
    key = np.array([(seed << 32) ^ epoch, row_key], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    return np.sort(generator.choice(candidates, num_anchors, replace=False))


def count_slots(loss_mask: np.ndarray, anchor_pos: np.ndarray, block_size: int) -> np.ndarray:
    """Which slots count, bool [n, K]: the label exists and all labels so far are supervised."""
    labels = anchor_pos[:, None] + 1 + np.arange(block_size)
    padded = np.concatenate([loss_mask, np.zeros(block_size + 1, dtype=np.bool_)])
    return np.logical_and.accumulate(padded[labels], axis=1)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, padded to the row with most of them.

    Attributes:
        anchor_pos: padding has position 0.
        slot_mask: slots that count; all False in padding.
    """

    anchor_pos: Int[Tensor, "B N"]
    slot_mask: Bool[Tensor, "B N K"]

    def to(self, device: torch.device) -> "Blocks":
        """The blocks on another device."""
        return Blocks(self.anchor_pos.to(device), self.slot_mask.to(device))


def draw_blocks(batch: BatchHead, num_anchors: int, block_size: int, seed: int) -> Blocks:
    """Draws the blocks of every row of a batch (on the CPU)."""
    anchors: list[Tensor] = []
    slots: list[Tensor] = []
    masks: Sequence[np.ndarray] = [
        row[:n].numpy() for row, n in zip(batch.loss_mask.cpu(), batch.lengths, strict=True)
    ]
    for mask, epoch, row_key in zip(masks, batch.epochs, batch.row_keys, strict=True):
        drawn = draw_anchors(mask, num_anchors, seed, epoch, row_key)
        anchors.append(torch.from_numpy(drawn))
        slots.append(torch.from_numpy(count_slots(mask, drawn, block_size)))
    if not any(len(a) for a in anchors):
        empty = torch.zeros(len(masks), 1, dtype=torch.long)
        return Blocks(empty, torch.zeros(len(masks), 1, block_size, dtype=torch.bool))
    return Blocks(
        torch.nn.utils.rnn.pad_sequence(anchors, batch_first=True),
        torch.nn.utils.rnn.pad_sequence(slots, batch_first=True),
    )


def slot_weights(slot_mask: Bool[Tensor, "*s K"], decay_scale: float | None) -> Tensor:
    """Weight exp(-k/decay_scale) of every counted slot, 0 elsewhere; fp32, same shape."""
    if decay_scale is None:
        return slot_mask.float()
    k = torch.arange(slot_mask.shape[-1], device=slot_mask.device, dtype=torch.float32)
    return slot_mask.float() * torch.exp(-k / decay_scale)
