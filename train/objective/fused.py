"""The objective with its gradient made in forward: no tensor of all positions times vocabulary.

Every denominator is known from masks before the first forward pass, so that the gradient with
respect to the logits is known as soon as the logits are. Slots are worked on in chunks, ordered by
their target position: several blocks share a position, whose target law and (for a head that
depends on the previous token alone) sequential bias are computed once. `losses.objective` is the
plain reference, and says what is computed.

For logits z, q = softmax(z) and the target's law p of one slot of weight w (DSpark Eq. 9, 10):

    CE = -log q_label            dCE/dz = q - onehot(label)
    L1 = sum |q - p|             dL1/dz = q * (s - sum q s),  s = sign(q - p)
    accept = sum min(p, q) = (1 + sum p - L1) / 2,  a constant
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.batch import TopK
from data.target import LogitTransform
from train.models.precision import widen

# Slots of one matrix product, and slots whose rows of logits stay in the CPU's cache.
_CHUNK, _TILE = 256, 8


@dataclass(frozen=True)
class TargetLaws:
    """Where the target's law comes from, by distinct position.

    Attributes:
        last: final-normed states of the distinct positions; None when only top-k is known.
        topk: or the kept part of the laws, raw.
    """

    last: Float[Tensor, "P D"] | None
    topk: TopK | None = None


@dataclass(frozen=True)
class Slots:
    """The counted slots, each with the distinct position of its target law.

    Attributes:
        position: index into the distinct positions.
        labels: the row's own next tokens.
        weights: slot weights over the denominator.
    """

    position: Int[Tensor, " S"]
    labels: Int[Tensor, " S"]
    weights: Float[Tensor, " S"]


@dataclass(frozen=True)
class FrozenLogits:
    """From a final-normed state to logits: the target's head, scale and soft-cap."""

    head: Float[Tensor, "V D"]
    transform: LogitTransform

    def __call__(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Logits in at least fp32; the result may be written into."""
        logits = widen(states.to(self.head.dtype) @ self.head.T)
        if self.transform.scale != 1.0:
            logits.mul_(self.transform.scale)
        if (cap := self.transform.softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def backward_(
        self, grad: Float[Tensor, "n V"], logits: Float[Tensor, "n V"]
    ) -> Float[Tensor, "n D"]:
        """Gradient of the states from that of the logits, which is written over."""
        if (cap := self.transform.softcap) is not None:
            grad.mul_(1 - (logits / cap).square())
        if self.transform.scale != 1.0:
            grad.mul_(self.transform.scale)
        return widen(grad.to(self.head.dtype) @ self.head)


@dataclass(frozen=True)
class FusedTerms:
    """What the fused objective gives.

    Attributes:
        loss: ``sum w (ce_weight CE + l1_weight L1)``; the only one with a gradient.
        ce, l1: of every slot, unweighted.
        accept: chance that the slot's draft survives verification.
    """

    loss: Float[Tensor, ""]
    ce: Float[Tensor, " S"]
    l1: Float[Tensor, " S"]
    accept: Float[Tensor, " S"]


def fused_objective(
    states: Float[Tensor, "S D"],
    features: Float[Tensor, "F R"] | None,
    weight: Float[Tensor, "V R"] | None,
    slots: Slots,
    laws: TargetLaws,
    frozen: FrozenLogits,
    ce_weight: float,
    l1_weight: float,
    shared: bool,
) -> FusedTerms:
    """Loss and gradient of the slots' laws in one pass over the vocabulary.

    Args:
        states: final-normed states of the counted slots.
        features: what the sequential head's last matrix is applied to; None without a head.
        weight: that matrix.
        slots: see `Slots`.
        laws: see `TargetLaws`.
        frozen: the target's head.
        ce_weight: weight of the cross-entropy.
        l1_weight: weight of ``sum |q - p|``.
        shared: whether there is one feature a distinct position (F = P), because it depends on the
            previous token alone, or one a slot (F = S).
    """
    job = _Job(slots, laws, frozen, ce_weight, l1_weight, shared)
    loss, ce, l1, accept = _Fused.apply(states, features, weight, job)  # type: ignore[no-untyped-call]
    return FusedTerms(loss, ce, l1, accept)


@dataclass(frozen=True)
class _Job:
    slots: Slots
    laws: TargetLaws
    frozen: FrozenLogits
    ce_weight: float
    l1_weight: float
    shared: bool

    def chunks(self) -> Iterator[Tensor]:
        """Slots in the order of their positions; slots of one position stay together."""
        order = self.slots.position.argsort(stable=True)
        sorted_positions = self.slots.position[order]
        begin, total = 0, len(order)
        while begin < total:
            end = min(begin + _CHUNK, total)
            if end < total:  # back to the border of a position, unless one fills the chunk
                border = int((sorted_positions < sorted_positions[end]).sum())
                end = border if border > begin else end
            yield order[begin:end]
            begin = end


def target_law(
    laws: TargetLaws, frozen: FrozenLogits, positions: Int[Tensor, " g"]
) -> Float[Tensor, "g V"]:
    """The target's law of some distinct positions: from the stored last state, else from its top-k.

    Of a top-k the rest is dropped, which makes acceptance a strict lower bound; renormalised or
    bucketed tails bias it more.
    """
    if laws.last is not None:
        return frozen(laws.last[positions]).softmax(-1)
    if laws.topk is None:
        raise ValueError("neither a last state nor top-k")
    probs = widen(laws.topk.logprobs[positions]).exp()
    law = probs.new_zeros(len(positions), len(frozen.head))
    return law.scatter_(-1, laws.topk.ids[positions], probs)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        states: Tensor,
        features: Tensor | None,
        weight: Tensor | None,
        job: _Job,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        count = len(states)
        # Masters are fp32; products are in the type of the head.
        narrow = None if weight is None else weight.to(job.frozen.head.dtype)
        ce, l1, accept = (torch.zeros(count, dtype=wide, device=states.device) for _ in range(3))
        d_states = torch.zeros(states.shape, dtype=wide, device=states.device)
        d_features = None if features is None else torch.zeros_like(features, dtype=wide)
        d_weight = None if weight is None else torch.zeros_like(weight, dtype=wide)
        for chosen in job.chunks():
            positions, inverse = job.slots.position[chosen].unique_consecutive(return_inverse=True)
            logits = job.frozen(states[chosen])
            base = logits.clone() if job.frozen.transform.softcap is not None else logits
            group = positions if job.shared else chosen
            if features is not None and narrow is not None:
                bias = widen(features[group].to(narrow.dtype) @ narrow.T)
                logits += bias[inverse] if job.shared else bias
            law = target_law(job.laws, job.frozen, positions).to(logits.dtype)
            rows = (job.slots.labels[chosen], job.slots.weights[chosen].to(wide), inverse)
            ce[chosen], l1[chosen], accept[chosen] = _rows(logits, law, *rows, job)
            # `logits` now holds the gradient of the loss with respect to them.
            if features is not None and narrow is not None:
                grad = logits
                if job.shared:
                    grad = logits.new_zeros(len(positions), logits.shape[1])
                    grad.index_add_(0, inverse, logits)
                grad = grad.to(narrow.dtype)
                d_features[group] += widen(grad @ narrow)  # type: ignore[index]
                d_weight += widen(grad.T @ features[group].to(narrow.dtype))  # type: ignore[operator]
            d_states[chosen] = job.frozen.backward_(logits, base)
        ctx.save_for_backward(d_states, d_features, d_weight)
        ctx.types = (states.dtype, features, weight)
        weights = job.slots.weights.to(wide)
        loss = (weights * (job.ce_weight * ce + job.l1_weight * l1)).sum()
        ctx.mark_non_differentiable(ce, l1, accept)
        return loss, ce, l1, accept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        d_states, d_features, d_weight = ctx.saved_tensors
        dtype, features, weight = ctx.types
        return (
            (d_states * grad).to(dtype),
            None if d_features is None else (d_features * grad).to(features.dtype),
            None if d_weight is None else (d_weight * grad).to(weight.dtype),
            None,
        )


def _rows(
    logits: Tensor, law: Tensor, labels: Tensor, weights: Tensor, inverse: Tensor, job: _Job
) -> tuple[Tensor, Tensor, Tensor]:
    """CE, L1 and acceptance of a chunk; its logits become their gradient."""
    found = []
    tile = _TILE if logits.device.type == "cpu" else len(logits)
    for begin in range(0, len(logits), tile):
        part = slice(begin, begin + tile)
        z, p = logits[part], law[inverse[part]]
        label = labels[part].unsqueeze(-1)
        total = z.logsumexp(-1, keepdim=True)
        ce = (total - z.gather(-1, label)).squeeze(-1)
        q = z.sub_(total).exp_()
        mass = p.sum(-1)
        sign = p.neg_().add_(q)  # q - p
        l1 = sign.abs().sum(-1)
        sign.sign_()
        inner = torch.linalg.vecdot(q, sign).unsqueeze(-1)
        w = weights[part].unsqueeze(-1)
        scale = sign.sub_(inner).mul_(job.l1_weight * w).add_(job.ce_weight * w)
        q.mul_(scale).scatter_add_(-1, label, -job.ce_weight * w)
        found.append((ce, l1, ((1 + mass - l1) / 2).clamp_(0, 1)))
    ce, l1, accept = (torch.cat(column) for column in zip(*found, strict=True))
    return ce, l1, accept
