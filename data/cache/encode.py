"""From states of the target to the arrays that are stored, on the device that computed them."""

import numpy as np
import torch
from torch import Tensor

from data.cache.format import LAST, TAPS, Header
from data.target import Target

# Rows of logits that exist at once: [256, V] in fp32.
_LOGIT_ROWS = 256


class StateEncoder:
    """Encodes what a header asks for."""

    def __init__(self, target: Target, header: Header) -> None:
        self.target, self.header = target, header
        self._codecs = {TAPS: header.codec(TAPS)}
        if header.last is not None:
            self._codecs[LAST] = header.codec(LAST)

    @torch.inference_mode()
    def encode(self, taps: Tensor, last: Tensor) -> tuple[dict[str, np.ndarray], bool]:
        """Arrays of consecutive tokens, and whether all of their states can be used.

        Args:
            taps: ``[n, M, D]``.
            last: ``[n, D]``.
        """
        found: dict[str, Tensor] = {}
        states = {TAPS: taps, LAST: last}
        finite = bool(last.isfinite().all())
        for name, codec in self._codecs.items():
            stored = codec.encode(states[name])
            finite = finite and bool(codec.finite(stored).all())
            found |= {name + suffix: tensor for suffix, tensor in stored.items()}
        if self.header.topk:
            found |= self._topk(last)
        return {name: _host(tensor, name) for name, tensor in found.items()}, finite

    def _topk(self, last: Tensor) -> dict[str, Tensor]:
        pieces = []
        for rows in last.split(_LOGIT_ROWS):
            logits = self.target.logits(rows)
            total = logits.logsumexp(-1)
            values, ids = logits.topk(self.header.topk)
            pieces.append((ids, (values - total.unsqueeze(-1)).half(), total))
        ids, logprobs, total = (torch.cat(column) for column in zip(*pieces, strict=True))
        wide = self.header.vocab_size > 1 << 16
        # The bits of an unsigned id in a signed tensor of its width.
        ids = ids.to(torch.int32) if wide else ids.to(torch.int32).to(torch.int16)
        return {"topk_ids": ids, "topk_logprobs": logprobs, "logsumexp": total}


def _host(tensor: Tensor, name: str) -> np.ndarray:
    array = tensor.cpu().contiguous().numpy()
    unsigned = array.dtype == np.int16 or name == "topk_ids"
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}")) if unsigned else array
