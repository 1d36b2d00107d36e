"""Terms of the objective and metrics: by hand, by law, and against loops in fp64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.naive import accept_rate, naive_terms, softmax
from train.objective.losses import Terms, TermWeights, objective
from train.objective.metrics import metric_sums, summarise, tau_sums

PAPER = TermWeights(ce=0.1, l1=0.9, confidence=1.0)
LN2 = math.log(2)


def laws(vocab: int) -> st.SearchStrategy[Tensor]:
    """Probabilities, zeros among them."""
    weights = st.lists(st.integers(0, 1000), min_size=vocab, max_size=vocab).filter(any)
    return weights.map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


pairs = st.integers(1, 9).flatmap(lambda v: st.tuples(laws(v), laws(v)))


@given(pairs)
def test_accept_rate_is_one_minus_half_the_l1_distance(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    rate = float(accept_rate(p, q))
    assert -1e-12 <= rate <= 1 + 1e-12
    assert rate == float(accept_rate(q, p))
    assert rate == pytest.approx(1 - float((p - q).abs().sum()) / 2, abs=1e-9)
    assert (rate > 1 - 1e-9) == torch.allclose(p, q, rtol=0, atol=1e-9)


# One slot over three tokens: draft (1/2, 1/4, 1/4), target (1/4, 1/4, 1/2), label 1.
DRAFT = torch.tensor([[2 * LN2, LN2, LN2]])
TARGET = torch.tensor([[0.25, 0.25, 0.5]])
LABEL = torch.tensor([1])


def one_slot(weights: TermWeights, confidence: Tensor | None = None, weight: float = 2.0) -> Terms:
    return objective(DRAFT, TARGET, LABEL, torch.tensor([weight]), confidence, weights, 4.0)


def test_cross_entropy_by_hand() -> None:
    terms = one_slot(TermWeights(ce=3.0, l1=0.0, confidence=0.0))
    assert float(terms.ce_sum) == pytest.approx(2 * math.log(4))
    assert float(terms.loss) == pytest.approx(3 * 2 * math.log(4) / 4)


def test_l1_distance_by_hand() -> None:
    terms = one_slot(TermWeights(ce=0.0, l1=3.0, confidence=0.0))
    assert float(terms.l1_sum) == pytest.approx(2 * 0.5)
    assert float(terms.loss) == pytest.approx(3 * 2 * 0.5 / 4)
    assert terms.accept_rate.tolist() == pytest.approx([0.75])


def test_confidence_bce_by_hand() -> None:
    logit = torch.tensor([math.log(3 / 2)])  # predicts 0.6, the slot survives with 0.75
    terms = one_slot(TermWeights(ce=0.0, l1=1e-9, confidence=3.0), logit)
    bce = -(0.75 * math.log(0.6) + 0.25 * math.log(0.4))
    assert float(terms.confidence_sum) == pytest.approx(2 * bce)
    assert float(terms.loss) == pytest.approx(3 * 2 * bce / 4)
    assert terms.confidence is not None
    assert terms.confidence.tolist() == pytest.approx([0.6])


def random_slots(
    seed: int, slots: int = 6, vocab: int = 7
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(slots, vocab, generator=generator)
    target = (2 * torch.randn(slots, vocab, generator=generator)).softmax(-1)
    labels = torch.randint(0, vocab, (slots,), generator=generator)
    weights = torch.rand(slots, generator=generator)
    return logits, target, labels, weights, torch.randn(slots, generator=generator)


@pytest.mark.parametrize(
    "term_weights",
    [
        PAPER,
        TermWeights(1.0, 0.0, 0.0),
        TermWeights(0.0, 1.0, 0.0),
        TermWeights(0.3, 0.0, 2.0),
        TermWeights(0.0, 1.0, 1.0),
    ],
)
def test_objective_and_gradients_equal_naive_loops(term_weights: TermWeights) -> None:
    logits, target, labels, weights, confidence = random_slots(0)
    logits.requires_grad_()
    confidence.requires_grad_()
    terms = objective(logits, target, labels, weights, confidence, term_weights, 3.0)
    wide = logits.detach().double().requires_grad_()
    wide_confidence = confidence.detach().double().requires_grad_()
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for s in range(len(labels)):
        found = naive_terms(wide[s], target[s].double(), int(labels[s]), wide_confidence[s])
        sums = [a + float(weights[s]) * b for a, b in zip(sums, found, strict=True)]
    used = (term_weights.ce, term_weights.l1, term_weights.confidence)
    expected = sum((w * s for w, s in zip(used, sums, strict=True)), sums[0] * 0) / 3.0
    close(terms.loss, expected)
    for value, total, weight in zip(
        (terms.ce_sum, terms.l1_sum, terms.confidence_sum), sums, used, strict=True
    ):
        close(value, total if weight else total * 0)
    terms.loss.backward()
    expected.backward()
    close(logits.grad, wide.grad)
    mine = torch.zeros_like(confidence) if confidence.grad is None else confidence.grad
    close(mine, wide_confidence.grad)


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradient_has_the_closed_form() -> None:
    # training-costs.md section 2: G = a p + b p (s - S) - a onehot(y).
    logits, target, labels, weights, _ = random_slots(1)
    logits.requires_grad_()
    objective(
        logits, target, labels, weights, None, TermWeights(0.1, 0.9, 0.0), 3.0
    ).loss.backward()
    p = logits.detach().double().softmax(-1)
    s = torch.sign(p - target.double())
    a, b = 0.1 * weights.unsqueeze(-1) / 3.0, 0.9 * weights.unsqueeze(-1) / 3.0
    onehot = torch.nn.functional.one_hot(labels, p.shape[-1])
    close(logits.grad, a * p + b * p * (s - (s * p).sum(-1, keepdim=True)) - a * onehot)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, target, labels, weights, confidence = random_slots(2)
    narrow = objective(
        logits.bfloat16(), target, labels, weights, confidence.bfloat16(), PAPER, 3.0
    )
    wide = objective(
        logits.bfloat16().float(),
        target,
        labels,
        weights,
        confidence.bfloat16().float(),
        PAPER,
        3.0,
    )
    assert torch.equal(narrow.loss, wide.loss)


@pytest.mark.parametrize(
    ("term_weights", "ce_moves"),
    [(TermWeights(0.0, 0.0, 1.0), False), (TermWeights(1.0, 0.0, 0.0), True)],
)
def test_a_term_of_weight_zero_has_no_gradient(term_weights: TermWeights, ce_moves: bool) -> None:
    logits, target, labels, weights, confidence = random_slots(3)
    logits.requires_grad_()
    confidence.requires_grad_()
    terms = objective(logits, target, labels, weights, confidence, term_weights, 1.0)
    terms.loss.backward()
    assert (logits.grad is not None and bool(logits.grad.any())) == ce_moves
    assert (confidence.grad is not None) == (term_weights.confidence > 0)
    # Rates are reported whatever is trained.
    torch.testing.assert_close(terms.accept_rate, accept_rate(logits.detach().softmax(-1), target))


def test_without_a_confidence_head_nothing_is_reported_of_it() -> None:
    terms = one_slot(TermWeights(0.1, 0.9, 0.0))
    assert terms.confidence is None
    assert float(terms.confidence_sum) == 0


def test_the_targets_side_carries_no_gradient() -> None:
    logits, target, labels, weights, confidence = random_slots(4)
    logits.requires_grad_()
    target.requires_grad_()
    terms = objective(logits, target, labels, weights, confidence, PAPER, 1.0)
    terms.loss.backward()
    assert target.grad is None
    assert not terms.accept_rate.requires_grad


def test_confidence_learns_without_moving_what_it_predicts() -> None:
    logits, target, labels, weights, confidence = random_slots(5)
    logits.requires_grad_()
    confidence.requires_grad_()
    objective(logits, target, labels, weights, confidence, PAPER, 1.0).loss.backward()
    with_confidence = logits.grad
    logits.grad = None
    objective(
        logits, target, labels, weights, None, TermWeights(0.1, 0.9, 0.0), 1.0
    ).loss.backward()
    assert with_confidence is not None
    assert logits.grad is not None
    assert torch.equal(with_confidence, logits.grad)


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_saturated_logits_stay_finite(size: float) -> None:
    logits = torch.tensor([[size, -size, 0.0], [-size, size, size]], requires_grad=True)
    confidence = torch.tensor([size, -size], requires_grad=True)
    target = softmax(torch.tensor([-size, 0.0, size])).repeat(2, 1)
    terms = objective(logits, target, torch.tensor([1, 0]), torch.ones(2), confidence, PAPER, 2.0)
    terms.loss.backward()
    assert terms.loss.isfinite()
    for tensor in (logits, confidence):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert tensor.grad.any()


def test_no_counted_slot_gives_loss_zero_and_gradient_zero() -> None:
    states = torch.randn(0, 4, requires_grad=True)
    head = torch.randn(3, 4, requires_grad=True)
    terms = objective(
        states @ head.T,
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(0),
        states @ head[0],
        PAPER,
        1e-9,
    )
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0
    assert head.grad is not None
    assert not head.grad.any()


def test_a_perfect_draft_commits_the_whole_block_and_the_bonus_token() -> None:
    slot_mask = torch.ones(2, 3, 5, dtype=torch.bool)
    figures = summarise(metric_sums(torch.ones(30), None, slot_mask))
    assert figures["tau_teacher_forced"] == 6.0
    assert figures["accept_rate_by_slot"] == [1.0] * 5


def test_tau_multiplies_rates_and_leaves_cut_blocks_out() -> None:
    slot_mask = torch.tensor([[[True, True], [True, False], [False, False]]])
    rates = torch.tensor([0.5, 0.5, 0.25])
    sums = metric_sums(rates, torch.tensor([0.5, 0.25, 1.0]), slot_mask)
    figures = summarise(sums)
    assert figures["tau_teacher_forced"] == pytest.approx(1 + 0.5 + 0.25)
    assert figures["accept_rate_by_slot"] == pytest.approx([(0.5 + 0.25) / 2, 0.5])
    assert figures["confidence_bias"] == pytest.approx((0 - 0.25 + 0.75) / 3)
    assert figures["confidence_error"] == pytest.approx((0 + 0.25 + 0.75) / 3)


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_tau_lies_between_one_and_block_size_plus_one(block_size: int, seed: int) -> None:
    rates = torch.rand(4, block_size, generator=torch.Generator().manual_seed(seed))
    total, blocks = tau_sums(rates, torch.ones(4, block_size, dtype=torch.bool))
    assert 1 <= float(total) / int(blocks) <= block_size + 1


def test_sums_add_up_over_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    slot_mask = torch.rand(4, 3, 2, generator=generator) < 0.7
    rates = torch.rand(int(slot_mask.sum()), generator=generator)
    confidence = torch.rand(len(rates), generator=generator)
    whole = summarise(metric_sums(rates, confidence, slot_mask))
    cut = int(slot_mask[:1].sum())
    first = metric_sums(rates[:cut], confidence[:cut], slot_mask[:1])
    second = metric_sums(rates[cut:], confidence[cut:], slot_mask[1:])
    added = summarise({name: first[name] + second[name] for name in first})
    assert added.keys() == whole.keys()
    for name, value in whole.items():
        assert added[name] == pytest.approx(value)


def test_without_slots_no_figure_is_made_up() -> None:
    slot_mask = torch.zeros(2, 1, 3, dtype=torch.bool)
    figures = summarise(metric_sums(torch.zeros(0), torch.zeros(0), slot_mask))
    assert figures == {"accept_rate_by_slot": [0.0, 0.0, 0.0]}
