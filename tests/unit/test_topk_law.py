"""A law of which only the likeliest tokens are kept: how training sees and judges it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from data.batch import Batch
from data.cache.read import CacheReader
from data.config import Codec
from data.target import LogitTransform
from tests.support.cached import Case, header_of, make_case, mixed_rows, write_cache
from tests.support.naive import accept_rate
from train.loop.step import target_laws
from train.objective.fused import FrozenLogits, target_law
from train.objective.losses import TermWeights, objective

CPU = torch.device("cpu")
WIDTH, VOCAB = 16, 259
HEAD = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0))
FROZEN = FrozenLogits(HEAD, LogitTransform())
ROWS = [3, 7, 2]


def batch_of(folder: Path, last: Codec | None, k: int) -> tuple[Batch, Case]:
    case = make_case(header_of(Codec.bf16, last, WIDTH, topk=k), mixed_rows())
    reader = CacheReader(write_cache(folder, case))
    return reader.read_batch(ROWS, [0] * len(ROWS)).to(CPU), case


def positions(batch: Batch) -> list[tuple[int, int, int]]:
    """(batch row, token, flat position) of some tokens, not in order."""
    T = batch.token_ids.shape[1]
    found = [(b, t, b * T + t) for b, n in enumerate(batch.lengths) for t in range(n)]
    return found[::-2]


@pytest.mark.parametrize("k", [1, 9, 200, VOCAB])
def test_law_is_the_kept_probabilities_and_nothing_else(tmp_path: Path, k: int) -> None:
    batch, case = batch_of(tmp_path, None, k)
    places = positions(batch)
    laws = target_laws(batch, torch.tensor([flat for _, _, flat in places]))
    law = target_law(laws, FROZEN, torch.arange(len(places)))
    assert law.shape == (len(places), VOCAB)
    assert law.dtype == torch.float32
    mass = float(law.sum(-1).mean())
    assert mass < 0.6 if k < 10 else mass > 0.9
    for (b, t, _), mine in zip(places, law, strict=True):
        exact = case.logits(ROWS[b])[t].softmax(-1)
        best = exact.topk(k)
        expected = torch.zeros(VOCAB).scatter(0, best.indices, best.values)
        # A log-probability is kept in fp16: 11 significant bits of up to -log p.
        slack = 2**-11 * (1 + exact.min().log().abs())
        torch.testing.assert_close(mine, expected, rtol=float(slack), atol=0.0)


def test_stored_last_state_goes_before_the_kept_law(tmp_path: Path) -> None:
    batch, case = batch_of(tmp_path, Codec.bf16, 3)
    places = positions(batch)
    laws = target_laws(batch, torch.tensor([flat for _, _, flat in places]))
    law = target_law(laws, FROZEN, torch.arange(len(places)))
    for (b, t, _), mine in zip(places, law, strict=True):
        state = case.last(ROWS[b])[t].bfloat16().float()
        torch.testing.assert_close(mine, (HEAD @ state).softmax(-1), rtol=1e-5, atol=1e-7)


def test_batch_without_any_law_is_an_error() -> None:
    nothing: Any = SimpleNamespace(last=None, topk=None)
    with pytest.raises(ValueError, match="without last state and without top-k"):
        target_laws(nothing, torch.tensor([0]))


def random_slots(seed: int, slots: int, vocab: int, kept: int) -> tuple[Tensor, ...]:
    """Draft logits, laws without their tails, labels, weights, confidences; fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    law = (2 * normal(slots, vocab)).softmax(-1)
    best = law.topk(kept)
    law = torch.zeros_like(law).scatter(-1, best.indices, best.values)
    labels = torch.randint(0, vocab, (slots,), generator=generator)
    return 2 * normal(slots, vocab), law, labels, normal(slots).abs(), normal(slots)


@given(
    seed=st.integers(0, 99),
    slots=st.integers(1, 5),
    kept=st.integers(0, 7),
    weights=st.tuples(*[st.sampled_from([0.0, 0.1, 0.9, 2.0])] * 3),
)
def test_objective_of_a_law_without_its_tail(
    seed: int, slots: int, kept: int, weights: tuple[float, float, float]
) -> None:
    logits, law, labels, w, confidence = random_slots(seed, slots, 7, kept)
    ours, own = logits.float().requires_grad_(), logits.clone().requires_grad_()
    mine, theirs = confidence.float().requires_grad_(), confidence.clone().requires_grad_()
    terms = objective(ours, law.float(), labels, w.float(), mine, TermWeights(*weights), 3.0)

    p = own.softmax(-1)
    rate = torch.minimum(p, law).sum(-1)
    ce = -(w * p[torch.arange(slots), labels].log()).sum()
    l1 = (w * (p - law).abs().sum(-1)).sum()
    target, guess = rate.detach(), theirs.sigmoid()
    bce = -(w * (target * guess.log() + (1 - target) * (1 - guess).log())).sum()
    loss = (weights[0] * ce + weights[1] * l1 + weights[2] * bce) / 3.0

    def close(found: Tensor | None, expected: Tensor) -> None:
        zero = torch.zeros_like(expected)
        mine = zero if found is None else found.double()
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)

    close(terms.loss.detach(), loss.detach())
    close(terms.accept_rate, target)
    assert bool((terms.accept_rate <= law.sum(-1) + 1e-6).all())
    found = (terms.ce_sum, terms.l1_sum, terms.confidence_sum)
    for weight, value, expected in zip(weights, found, (ce, l1, bce), strict=True):
        close(value, expected.detach() if weight else 0 * expected.detach())
    if any(weights):
        terms.loss.backward()
        loss.backward()
        for leaf, reference in ((ours, own), (mine, theirs)):
            assert reference.grad is not None
            close(leaf.grad, reference.grad)


def test_acceptance_of_kept_tokens_is_a_lower_bound() -> None:
    logits, law, labels, w, _ = random_slots(1, 40, 50, 50)
    draft = logits.softmax(-1)
    before = torch.zeros(40)
    for k in (0, 1, 5, 20, 50):
        best = law.topk(k)
        kept = torch.zeros_like(law).scatter(-1, best.indices, best.values)
        weights = TermWeights(0.0, 1.0, 0.0)
        rate = objective(
            logits.float(), kept.float(), labels, w.float(), None, weights, 1.0
        ).accept_rate
        torch.testing.assert_close(rate.double(), accept_rate(draft, kept), rtol=0, atol=1e-6)
        assert bool((rate >= before - 1e-6).all())
        before = rate
    torch.testing.assert_close(
        before.double(), 1 - (draft - law).abs().sum(-1) / 2, rtol=0, atol=1e-6
    )
