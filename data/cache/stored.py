"""A batch as the store has it, which becomes states where they are needed: host or device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch, BatchHead, TopK
from data.cache.codecs import StateCodec
from data.cache.format import LAST, TAPS


@dataclass(frozen=True)
class StoredBatch(BatchHead):
    """Rows padded with zeros, their states encoded.

    Attributes:
        token_ids: int32 ``[B, T]``.
        arrays: ``[B, T, ...]`` by array name, in the stored types.
        taps, last: codecs of the states; ``last`` is None in a cache without it.
    """

    token_ids: Tensor
    arrays: dict[str, Tensor]
    taps: StateCodec
    last: StateCodec | None

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoded states."""
        return sum(t.numel() * t.element_size() for t in self.arrays.values())

    def to(self, device: torch.device) -> Batch:
        """Moves what is stored and decodes it there: fewer bytes travel than states have."""
        arrays = {name: t.to(device, non_blocking=True) for name, t in self.arrays.items()}
        topk = None
        if "topk_ids" in arrays:
            # Stored unsigned, held signed: the upper half of the ids came out negative.
            ids = arrays["topk_ids"]
            mask = (1 << 8 * ids.element_size()) - 1
            topk = TopK(
                ids.long() & mask,
                arrays["topk_logprobs"].float(),
                arrays["logsumexp"],
            )
        return Batch(
            loss_mask=self.loss_mask.to(device, non_blocking=True),
            lengths=self.lengths,
            row_keys=self.row_keys,
            epochs=self.epochs,
            token_ids=self.token_ids.to(device, non_blocking=True).long(),
            taps=_decode(self.taps, TAPS, arrays),
            last=None if self.last is None else _decode(self.last, LAST, arrays),
            topk=topk,
        )


def _decode(codec: StateCodec, name: str, arrays: dict[str, Tensor]) -> Tensor:
    stored = {c.suffix: arrays[name + c.suffix] for c in codec.components()}
    B, T = next(iter(stored.values())).shape[:2]
    states: Tensor = codec.decode({k: t.flatten(0, 1) for k, t in stored.items()})
    return states.reshape(B, T, *states.shape[1:])
