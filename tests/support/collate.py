"""Batches of rows that are in memory; the product reads rows straight into their batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.batch import Batch, CachedRow


def collate(rows: Sequence[CachedRow], epochs: Sequence[int]) -> Batch:
    """Pads rows on the right with zeros into one batch."""

    def pad(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    last = [r.last for r in rows if r.last is not None]
    return Batch(
        loss_mask=pad([r.loss_mask for r in rows]),
        lengths=tuple(len(r.token_ids) for r in rows),
        row_keys=tuple(r.row_key for r in rows),
        epochs=tuple(epochs),
        token_ids=pad([r.token_ids for r in rows]),
        taps=pad([r.taps for r in rows]),
        last=pad(last) if last else None,
    )
