"""Before a build: what would be stored must give the target's own logits, taps and embeddings.

Last state captured before the final norm, layer numbers off by one, a forgotten soft-cap or scale,
a head left random: each trains without an error and is then useless. Here each one is refused.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Row
from data.config import CacheConfig
from data.errors import CacheError
from data.target import FrozenHead, Target, read_frozen_head

log = logging.getLogger(__name__)
# A tap read through our hook and through transformers is the same tensor; bf16 leaves room for a
# different attention path.
_TAP_TOLERANCE = 2e-2


@dataclass(frozen=True)
class SelfCheck:
    """Stored state x head against the target's own logits.

    Attributes:
        mean_tv: mean total variation between the two laws, in [0, 1].
        top1: share of tokens with the same likeliest token.
        tokens: tokens compared.
    """

    mean_tv: float
    top1: float
    tokens: int


def self_check(target: Target, rows: Sequence[Row], config: CacheConfig) -> SelfCheck:
    """Compares on the first rows, up to ``config.self_check_tokens`` tokens.

    Raises:
        CacheError: says which of logits, taps or embeddings does not fit.
    """
    frozen = read_frozen_head(target.folder).to(target.device, target.model.dtype)
    tv, top1, tokens = 0.0, 0, 0
    for row in rows:
        n = min(len(row), max(config.self_check_tokens - tokens, 0))
        if n == 0:
            break
        ids = torch.tensor([row.token_ids[:n]], device=target.device)
        output = target.forward(ids)
        logits, hidden_states = target.own_forward(ids)
        stored = output.last.to(torch.bfloat16)  # what an exact cache holds
        mine = frozen.logits(stored.to(target.model.dtype))
        tv += float((mine.softmax(-1) - logits.softmax(-1)).abs().sum(-1).mul(0.5).sum())
        top1 += int((mine.argmax(-1) == logits.argmax(-1)).sum())
        tokens += n
        _require_taps(target, output.taps, hidden_states)
        _require_embedding(frozen, ids, hidden_states[0])
    result = SelfCheck(tv / tokens, top1 / tokens, tokens)
    if not result.mean_tv <= config.self_check_tv:
        raise CacheError(
            f"self-check: the stored last state does not give the target's logits: mean total "
            f"variation {result.mean_tv:.4f} > cache.self_check_tv={config.self_check_tv}, "
            f"same top-1 on {result.top1:.1%} of {tokens} tokens\n  fix: the target changes its "
            "logits in a way that is not known here (final norm, scale, soft-cap); it cannot be "
            "distilled from its last state"
        )
    log.info(
        "self-check: mean TV %.5f, same top-1 on %.1f %% of %d tokens",
        result.mean_tv,
        100 * result.top1,
        tokens,
    )
    return result


def _require_taps(target: Target, taps: Tensor, hidden_states: Sequence[Tensor]) -> None:
    for m, layer in enumerate(target.tap_layers):
        own, ours = hidden_states[layer + 1].float(), taps[:, :, m].float()
        error = float((own - ours).norm() / own.norm().clamp_min(1e-6))
        if not error <= _TAP_TOLERANCE:
            raise CacheError(
                f"self-check: tap of layer {layer} differs from the target's hidden_states"
                f"[{layer + 1}] by {error:.1%}\n  fix: this target numbers its layers differently"
            )


def _require_embedding(frozen: FrozenHead, ids: Tensor, first_input: Tensor) -> None:
    own = first_input.float()
    ours = frozen.embedding[ids].float() * frozen.embedding_scale
    if not torch.allclose(own, ours, rtol=1e-2, atol=1e-4):
        raise CacheError(
            "self-check: the embedding read from the target's files differs from the one in use\n"
            "  fix: the target scales its embedding in a way that is not known here"
        )
