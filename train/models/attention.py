"""Attention of draft blocks: every slot sees the context before its anchor and its own block.

`block_attention` never forms scores between different blocks. `dense_attention` is the plain
reference: one SDPA over the whole context and all blocks under a boolean mask.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from train.models.precision import widen

_GROUP = 16  # blocks of one group: larger ones see more context than they need


def context_visible(anchor_pos: Int[Tensor, "B N"], num_context: int) -> Bool[Tensor, "B N C"]:
    """Context tokens that the block of each anchor sees: strictly before the anchor.

    The target's state *at* the anchor is not known when a block is drafted.
    """
    positions = torch.arange(num_context, device=anchor_pos.device)
    return positions < anchor_pos.unsqueeze(-1)


def block_attention(
    query: Float[Tensor, "B N K H E"],
    context_key: Float[Tensor, "B C G E"],
    context_value: Float[Tensor, "B C G E"],
    block_key: Float[Tensor, "B N K G E"],
    block_value: Float[Tensor, "B N K G E"],
    visible: Bool[Tensor, "B N C"] | None,
) -> Float[Tensor, "B N K H E"]:
    """One softmax over the visible context and the slot's own block (both directions).

    Args:
        query: H is a multiple of G; query head h reads key/value head ``h // (H // G)``.
        context_key: keys of context tokens, shared by all blocks of a row.
        context_value: their values.
        block_key: keys of the block slots.
        block_value: their values.
        visible: see `context_visible`; None when every block sees the whole context (decoding).
    """
    B, N, K, H, E = query.shape
    G, C = block_key.shape[3], context_key.shape[1]
    # Query heads of one key/value head join the query length: keys are never repeated.
    q = query.reshape(B, N, K, G, H // G, E) * E**-0.5
    over_context = q.permute(0, 3, 4, 1, 2, 5).reshape(B, G, -1, E)
    context_scores = over_context @ context_key.permute(0, 2, 3, 1)
    context_scores = context_scores.view(B, G, H // G, N, K, C)
    if visible is not None:
        hidden = ~visible[:, None, None, :, None, :]
        context_scores = context_scores.masked_fill(hidden, float("-inf"))
    block_scores = torch.einsum("bnkgre,bnjge->bgrnkj", q, block_key)
    probs = widen(torch.cat([context_scores, block_scores], dim=-1)).softmax(-1)
    probs = probs.to(context_value.dtype)
    context_probs = probs[..., :C].reshape(B, G, -1, C)
    context_out = context_probs @ context_value.permute(0, 2, 1, 3)
    context_out = context_out.view(B, G, H // G, N, K, E).permute(0, 3, 4, 1, 2, 5)
    block_out = torch.einsum("bgrnkj,bnjge->bnkgre", probs[..., C:], block_value)
    return (context_out + block_out).reshape(B, N, K, H, E)


def grouped_attention(
    query: Float[Tensor, "B N K H E"],
    context_key: Float[Tensor, "B C G E"],
    context_value: Float[Tensor, "B C G E"],
    block_key: Float[Tensor, "B N K G E"],
    block_value: Float[Tensor, "B N K G E"],
    visible: Bool[Tensor, "B N C"] | None,
) -> Float[Tensor, "B N K H E"]:
    """The same as `block_attention`, a few blocks at a time, each over the context they can see.

    Anchors are sorted, so that the context of a group ends at its last anchor: half of the scores
    that a dense attention computes and masks are never made, and what is made stays in the cache.
    """
    N = query.shape[1]
    # On CUDA the end of a context would have to be waited for.
    if visible is None or query.is_cuda:
        return block_attention(query, context_key, context_value, block_key, block_value, visible)
    found = []
    for begin in range(0, N, _GROUP):
        part = slice(begin, begin + _GROUP)
        end = _context_end(visible[:, part])
        found.append(
            block_attention(
                query[:, part],
                context_key[:, :end],
                context_value[:, :end],
                block_key[:, part],
                block_value[:, part],
                visible[:, part, :end],
            )
        )
    return torch.cat(found, dim=1)


def _context_end(visible: Bool[Tensor, "B n C"]) -> int:
    """Context tokens up to the last one that any of some blocks sees."""
    return max(int(visible.any(0).any(0).sum()), 1)  # shapes stay simple; it is masked


def dense_attention(
    query: Float[Tensor, "B N K H E"],
    context_key: Float[Tensor, "B C G E"],
    context_value: Float[Tensor, "B C G E"],
    block_key: Float[Tensor, "B N K G E"],
    block_value: Float[Tensor, "B N K G E"],
    visible: Bool[Tensor, "B N C"] | None,
) -> Float[Tensor, "B N K H E"]:
    """The same as `block_attention`, computed as one dense masked attention (reference)."""
    B, N, K, H, E = query.shape
    C = context_key.shape[1]
    if visible is None:
        visible = torch.ones(B, N, C, dtype=torch.bool, device=query.device)
    own_block = torch.eye(N, dtype=torch.bool, device=query.device).repeat_interleave(K, 1)
    mask = torch.cat([visible, own_block.expand(B, N, N * K)], dim=-1)
    mask = mask.repeat_interleave(K, 1).unsqueeze(1)
    key = torch.cat([context_key, block_key.flatten(1, 2)], dim=1).transpose(1, 2)
    value = torch.cat([context_value, block_value.flatten(1, 2)], dim=1).transpose(1, 2)
    out = scaled_dot_product_attention(
        query.flatten(1, 2).transpose(1, 2), key, value, attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(B, N, K, H, E)
