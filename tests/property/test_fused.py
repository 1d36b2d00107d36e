"""The fused objective is the plain one: values and gradients, all shapes, laws and transforms."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.batch import TopK
from data.target import LogitTransform
from train.objective import fused
from train.objective.fused import (
    FrozenLogits,
    FusedTerms,
    Slots,
    TargetLaws,
    fused_objective,
)

D, R = 6, 3


@dataclass(frozen=True)
class Case:
    """Inputs of the objective; ``shared`` features belong to positions, not to slots."""

    states: Tensor
    features: Tensor | None
    weight: Tensor | None
    slots: Slots
    laws: TargetLaws
    frozen: FrozenLogits
    shared: bool

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.states, self.features, self.weight) if t is not None]

    def fused(self, ce: float, l1: float) -> FusedTerms:
        return fused_objective(
            self.states,
            self.features,
            self.weight,
            self.slots,
            self.laws,
            self.frozen,
            ce,
            l1,
            self.shared,
        )

    def target(self) -> Tensor:
        if self.laws.last is not None:
            head = self.frozen.head
            return self.frozen.transform(self.laws.last @ head.T).softmax(-1)[self.slots.position]
        topk = self.laws.topk
        assert topk is not None
        dense = torch.zeros(len(topk.ids), len(self.frozen.head), dtype=self.states.dtype)
        dense.scatter_(-1, topk.ids, topk.logprobs.to(dense.dtype).exp())
        return dense[self.slots.position]

    def plain(self, ce: float, l1: float) -> FusedTerms:
        """The same in plain autograd."""
        logits = self.frozen.transform(self.states @ self.frozen.head.T)
        if self.features is not None and self.weight is not None:
            features = self.features[self.slots.position] if self.shared else self.features
            logits = logits + features @ self.weight.T
        log_q, p = logits.log_softmax(-1), self.target()
        ces = -log_q.gather(-1, self.slots.labels.unsqueeze(-1)).squeeze(-1)
        l1s = (log_q.exp() - p).abs().sum(-1)
        accept = torch.minimum(log_q.exp(), p).sum(-1)
        loss = (self.slots.weights * (ce * ces + l1 * l1s)).sum()
        return FusedTerms(loss, ces.detach(), l1s.detach(), accept.detach())


def make_case(
    seed: int,
    count: int,
    positions: int,
    vocabulary: int,
    *,
    head: str = "shared",
    topk: int = 0,
    transform: LogitTransform | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    states = (normal(count, D) * scale).requires_grad_()
    features = weight = None
    if head != "none":
        features = normal(positions if head == "shared" else count, R).requires_grad_()
        weight = normal(vocabulary, R).requires_grad_()
    position = torch.randint(0, positions, (count,), generator=generator)
    labels = torch.randint(0, vocabulary, (count,), generator=generator)
    weights = torch.rand(count, generator=generator, dtype=torch.float64)
    frozen = FrozenLogits(normal(vocabulary, D), transform or LogitTransform())
    laws = TargetLaws(normal(positions, D) * scale)
    if topk:
        assert laws.last is not None
        full = (laws.last @ frozen.head.T).double().log_softmax(-1)
        values, ids = full.topk(min(topk, vocabulary), -1)
        laws = TargetLaws(None, TopK(ids, values.float(), torch.zeros(positions)))
    slots = Slots(position, labels, weights)
    return Case(states, features, weight, slots, laws, frozen, head == "shared")


def gradients(case: Case, terms: FusedTerms) -> list[Tensor]:
    return list(torch.autograd.grad(terms.loss, case.leaves))


def require_same(case: Case, ce: float, l1: float, tolerance: float) -> None:
    mine, plain = case.fused(ce, l1), case.plain(ce, l1)
    for name in ("loss", "ce", "l1", "accept"):
        found, expected = getattr(mine, name), getattr(plain, name)
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, check_dtype=False
        )
    for found, expected in zip(gradients(case, mine), gradients(case, plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


transforms = st.sampled_from([None, LogitTransform(0.25, None), LogitTransform(0.5, 3.0)])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(0, 40),
    positions=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    head=st.sampled_from(["none", "shared", "own"]),
    topk=st.sampled_from([0, 1, 5]),
    transform=transforms,
    chunk=st.sampled_from([1, 7, 256]),
    weights=st.sampled_from([(0.1, 0.9), (1.0, 0.0), (0.0, 1.0)]),
)
def test_fused_equals_plain(
    seed: int,
    count: int,
    positions: int,
    vocabulary: int,
    head: str,
    topk: int,
    transform: LogitTransform | None,
    chunk: int,
    weights: tuple[float, float],
) -> None:
    if topk:
        transform = None  # the cached law already went through it
    case = make_case(seed, count, positions, vocabulary, head=head, topk=topk, transform=transform)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_CHUNK", chunk)
        # fp64 throughout: what differs is the order of sums. Top-k laws are fp32.
        require_same(case, *weights, 1e-6 if topk else 1e-9)


@pytest.mark.parametrize("head", ["none", "shared", "own"])
def test_fp32_is_close(head: str) -> None:
    case = make_case(3, 300, 120, 500, head=head, dtype=torch.float32)
    require_same(case, 0.1, 0.9, 5e-6)


def test_bf16_is_close_to_the_fp32_oracle() -> None:
    narrow = make_case(4, 300, 120, 500, dtype=torch.bfloat16)
    assert narrow.laws.last is not None
    assert narrow.features is not None
    assert narrow.weight is not None
    wide = Case(
        narrow.states.detach().float().requires_grad_(),
        narrow.features.detach().float().requires_grad_(),
        narrow.weight.detach().float().requires_grad_(),
        narrow.slots,
        TargetLaws(narrow.laws.last.float()),
        FrozenLogits(narrow.frozen.head.float(), narrow.frozen.transform),
        narrow.shared,
    )
    mine, oracle = narrow.fused(0.1, 0.9), wide.plain(0.1, 0.9)
    torch.testing.assert_close(mine.loss.double(), oracle.loss.double(), rtol=1e-2, atol=1e-2)
    for found, expected in zip(gradients(narrow, mine), gradients(wide, oracle), strict=True):
        error = (found.float() - expected).norm() / expected.norm()
        # Logits are rounded to 8 bits, and so is their gradient before it is multiplied again.
        assert error < 3e-2


def test_gradcheck() -> None:
    case = make_case(5, 9, 4, 11, transform=LogitTransform(0.5, 3.0))

    def loss(*leaves: Tensor) -> Tensor:
        states, features, weight = leaves
        slots, laws, frozen = case.slots, case.laws, case.frozen
        return fused_objective(
            states, features, weight, slots, laws, frozen, 0.3, 0.7, shared=True
        ).loss

    assert torch.autograd.gradcheck(loss, tuple(case.leaves), eps=1e-7, atol=1e-5)


def test_saturated_logits_stay_finite() -> None:
    case = make_case(6, 20, 8, 30, scale=200.0, dtype=torch.float32)
    terms = case.fused(0.1, 0.9)
    assert terms.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients(case, terms))
    assert ((terms.accept >= 0) & (terms.accept <= 1)).all()


def test_no_tensor_of_all_slots_times_vocabulary_is_made() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor):
                    self.largest = max(self.largest, tensor.numel())
            return out

    case = make_case(7, 2000, 900, 700, dtype=torch.float32)
    with Watch() as watch:  # type: ignore[no-untyped-call]
        gradients(case, case.fused(0.1, 0.9))
    assert watch.largest <= fused._CHUNK * 700
