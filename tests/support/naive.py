"""What training must compute, for one row and one block at a time: loops, no product code."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.target import FrozenHead
from train.models.draft import Draft, DraftShape
from train.objective.losses import TermWeights


@dataclass(frozen=True)
class NaiveNet:
    """Weights by the engines' names, in fp64; ``shape`` and ``frozen`` are read as data only."""

    weights: Mapping[str, Tensor]
    shape: DraftShape
    frozen: FrozenHead

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


@dataclass(frozen=True)
class NaiveBlock:
    """One block; logits and confidence of the slots whose previous token exists."""

    states: list[Tensor]
    logits: list[Tensor]
    confidence: list[Tensor]


def naive_net(draft: Draft, requires_grad: bool = False) -> NaiveNet:
    weights = {
        name: tensor.detach().double().requires_grad_(requires_grad)
        for name, tensor in draft.state_dict().items()
    }
    return NaiveNet(weights, draft.shape, draft.frozen)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def softmax(logits: Tensor) -> Tensor:
    exps = torch.exp(logits - logits.detach().max())
    return exps / exps.sum()


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Turns the pairs (i, i + E/2) by position * theta^(-2i/E)."""
    half = len(x) // 2
    out: list[Tensor] = [x[0]] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return torch.stack(out)


def head_logits(frozen: FrozenHead, state: Tensor) -> Tensor:
    """The target's logits of a final-normed state: scale first, then soft-cap."""
    logits = frozen.head.double() @ state * frozen.transform.scale
    cap = frozen.transform.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def split_heads(x: Tensor, size: int) -> list[Tensor]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def block_states(
    net: NaiveNet, taps: Tensor, token_ids: Sequence[int], anchor: int
) -> list[Tensor]:
    """Final-normed states of the K slots of the block at ``anchor``."""
    shape, eps = net.shape, net.shape.backbone.rms_norm_eps
    context = [
        rms_norm(
            net.weight("fc.weight") @ torch.cat(list(taps[t].double())),
            net.weight("hidden_norm.weight"),
            eps,
        )
        for t in range(anchor)
    ]
    ids = [token_ids[anchor]] + [shape.mask_token_id] * (shape.block_size - 1)
    x = [net.frozen.embedding[i].double() * net.frozen.embedding_scale for i in ids]
    for layer in range(shape.backbone.num_layers):
        x = layer_states(net, f"layers.{layer}.", context, x, anchor)
    return [rms_norm(v, net.weight("norm.weight"), eps) for v in x]


def layer_states(
    net: NaiveNet, prefix: str, context: list[Tensor], x: list[Tensor], anchor: int
) -> list[Tensor]:
    config = net.shape.backbone

    def weight(name: str) -> Tensor:
        return net.weight(f"{prefix}{name}.weight")

    normed = [rms_norm(v, weight("input_layernorm"), config.rms_norm_eps) for v in x]
    keys, values = [], []
    for position, source in enumerate(context + normed):  # slot k of the block stands at anchor + k
        heads = split_heads(weight("self_attn.k_proj") @ source, config.head_dim)
        scaled = [rms_norm(h, weight("self_attn.k_norm"), config.rms_norm_eps) for h in heads]
        keys.append([rotate(h, position, config.rope_theta) for h in scaled])
        values.append(split_heads(weight("self_attn.v_proj") @ source, config.head_dim))
    out = []
    for k, residual in enumerate(x):
        queries = split_heads(weight("self_attn.q_proj") @ normed[k], config.head_dim)
        mixed = []
        for h, query in enumerate(queries):
            scaled_query = rms_norm(query, weight("self_attn.q_norm"), config.rms_norm_eps)
            turned = rotate(scaled_query, anchor + k, config.rope_theta)
            group = h * config.num_kv_heads // config.num_heads
            scores = torch.stack([turned @ key[group] for key in keys]) / math.sqrt(config.head_dim)
            probs = softmax(scores)
            mixed.append(
                torch.stack([p * v[group] for p, v in zip(probs, values, strict=True)]).sum(0)
            )
        attended = residual + weight("self_attn.o_proj") @ torch.cat(mixed)
        inner = rms_norm(attended, weight("post_attention_layernorm"), config.rms_norm_eps)
        gate = weight("mlp.gate_proj") @ inner
        gated = gate / (1 + torch.exp(-gate)) * (weight("mlp.up_proj") @ inner)
        out.append(attended + weight("mlp.down_proj") @ gated)
    return out


def naive_block(net: NaiveNet, taps: Tensor, token_ids: Sequence[int], anchor: int) -> NaiveBlock:
    """States, and teacher-forced logits: slot k's previous token is the row's own at anchor + k."""
    states = block_states(net, taps, token_ids, anchor)
    logits, confidence = [], []
    for k, state in enumerate(states):
        if anchor + k >= len(token_ids):
            break
        slot_logits, joined = head_logits(net.frozen, state), state
        if net.shape.head_rank:
            embedded = net.weight("markov_head.markov_w1.weight")[token_ids[anchor + k]]
            slot_logits = slot_logits + net.weight("markov_head.markov_w2.weight") @ embedded
            joined = torch.cat([state, embedded])
        logits.append(slot_logits)
        if net.shape.confidence:
            weight, bias = (net.weight(f"confidence_head.proj.{n}") for n in ("weight", "bias"))
            confidence.append((weight[0] * joined).sum() + bias[0])
    return NaiveBlock(states, logits, confidence)


def naive_anchors(loss_mask: Sequence[bool]) -> list[int]:
    """Every position that may be an anchor."""
    return [p for p in range(len(loss_mask) - 1) if loss_mask[p] and loss_mask[p + 1]]


def naive_count(loss_mask: Sequence[bool], anchor: int, block_size: int) -> int:
    """How many slots count: they are the first ones of the block."""
    count = 0
    while count < block_size and anchor + count + 1 < len(loss_mask):
        if not loss_mask[anchor + count + 1]:
            break
        count += 1
    return count


def naive_terms(
    logits: Tensor, target_probs: Tensor, label: int, confidence: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, L1 distance and confidence BCE of one slot."""
    probs = softmax(logits)
    ce = -torch.log(probs[label])
    l1, accepted = torch.zeros((), dtype=probs.dtype), 0.0
    for p, q in zip(probs, target_probs, strict=True):
        l1 = l1 + torch.abs(p - q)
        accepted += min(float(p.detach()), float(q))
    if confidence is None:
        return ce, l1, torch.zeros((), dtype=probs.dtype)
    c = 1 / (1 + torch.exp(-confidence))
    return ce, l1, -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c))


def naive_row_loss(
    net: NaiveNet,
    row: tuple[Tensor, Sequence[int], Sequence[bool], Tensor],
    term_weights: TermWeights,
    decay_scale: float | None,
) -> tuple[Tensor, float]:
    """Weighted sum of all terms of one row (every possible anchor), and the sum of its weights.

    ``row`` is taps, token ids, loss mask, last states.
    """
    taps, token_ids, loss_mask, last = row
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for anchor in naive_anchors(loss_mask):
        block = naive_block(net, taps, token_ids, anchor)
        for k in range(naive_count(loss_mask, anchor, net.shape.block_size)):
            weight = 1.0 if decay_scale is None else math.exp(-k / decay_scale)
            target_probs = softmax(head_logits(net.frozen, last[anchor + k].double()))
            ce, l1, bce = naive_terms(
                block.logits[k],
                target_probs,
                token_ids[anchor + k + 1],
                block.confidence[k] if block.confidence else None,
            )
            terms = term_weights.ce * ce + term_weights.l1 * l1 + term_weights.confidence * bce
            total = total + weight * terms
            weight_sum += weight
    return total, weight_sum


def accept_rate(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Chance that one draft token survives verification: the overlap of two laws (DSpark Eq. 8)."""
    return torch.minimum(draft_probs, target_probs).sum(-1)
