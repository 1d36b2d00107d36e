"""Laws, choices and verification of one block: by hand, and by enumeration of small cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.enumerate import EnumeratingChooser, law_of
from train.decode.verify import (
    RandomChooser,
    Sampling,
    Verdict,
    acceptance,
    law,
    residual,
    verify_chain,
)

# Probabilities 0.4, 0.3, 0.2, 0.1 in shuffled order.
LOGITS = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(0.0), [0, 1, 0, 0]),
        (Sampling(0.0, top_k=2, top_p=0.5), [0, 1, 0, 0]),
        (Sampling(1.0), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(0.5), [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        (Sampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, top_k=4), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(1.0, top_k=9), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(1.0, top_p=0.75), [2 / 9, 4 / 9, 0, 3 / 9]),
        (Sampling(1.0, top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, top_p=0.01), [0, 1, 0, 0]),
        # The nucleus is taken of what top-k leaves: 4/7 alone reaches 0.5.
        (Sampling(1.0, top_k=2, top_p=0.5), [0, 1, 0, 0]),
        # And of the tempered law: 16/30 alone reaches 0.5.
        (Sampling(0.5, top_p=0.5), [0, 1, 0, 0]),
    ],
    ids=str,
)
def test_law_by_hand(sampling: Sampling, expected: list[float]) -> None:
    torch.testing.assert_close(law(LOGITS, sampling), torch.tensor(expected).float())
    stacked = law(torch.stack([LOGITS, LOGITS.flip(0)]), sampling)
    torch.testing.assert_close(stacked[1], torch.tensor(expected).float().flip(0))


def test_ties_at_the_border_of_top_k_are_kept() -> None:
    probs = law(torch.tensor([1.0, 0.0, 1.0, 1.0]), Sampling(1.0, top_k=2))
    torch.testing.assert_close(probs, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3]))


@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=12),
    st.floats(0.1, 3.0),
    st.integers(0, 13),
    st.floats(0.01, 1.0),
)
def test_law_is_a_law_on_the_likeliest_tokens(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    full = law(torch.tensor(logits), Sampling(temperature))
    probs = law(torch.tensor(logits), Sampling(temperature, top_k, top_p))
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    kept = probs > 0
    assert kept.any()
    # Nothing that is dropped is likelier than anything that is kept.
    dropped = full[~kept]
    if len(dropped):
        assert dropped.max() <= full[kept].min()
    if top_k and len(set(torch.tensor(logits).tolist())) == len(logits):
        assert int(kept.sum()) <= top_k
    # Ratios among the kept ones are the full law's.
    torch.testing.assert_close(probs[kept], full[kept] / full[kept].sum(), rtol=1e-4, atol=1e-7)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.floats(0.05, 0.99))
def test_nucleus_is_the_smallest_that_reaches_top_p(weights: list[int], top_p: float) -> None:
    full = torch.tensor(weights).float() / sum(weights)
    kept = law(full.log(), Sampling(1.0, top_p=top_p)) > 0
    assert float(full[kept].sum()) >= top_p - 1e-5
    assert float(full[kept].sum() - full[kept].min()) < top_p + 1e-5


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.double() * counts.sum()
    used = expected > 0
    return float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())


def test_draws_follow_the_law_and_never_take_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.05, 0.25, 0.2, 0.0])
    chooser = RandomChooser(0)
    draws = torch.tensor([chooser.categorical(probs) for _ in range(4000)])
    counts = torch.bincount(draws, minlength=7).double()
    assert not counts[probs == 0].any()
    assert chi_square(counts, probs) < 16.3  # 3 degrees of freedom, 0.1 %


def test_acceptance_draws_follow_their_probability() -> None:
    chooser = RandomChooser(1)
    accepted = sum(chooser.accept(0.3) for _ in range(4000))
    assert abs(accepted - 1200) < 4 * math.sqrt(4000 * 0.3 * 0.7)
    assert all(chooser.accept(1.0) for _ in range(1000))
    assert not any(chooser.accept(0.0) for _ in range(1000))


def test_a_seed_fixes_all_choices() -> None:
    probs = torch.full((50,), 0.02)
    first, second, other = RandomChooser(5), RandomChooser(5), RandomChooser(6)
    draws = [first.categorical(probs) for _ in range(20)]
    assert draws == [second.categorical(probs) for _ in range(20)]
    assert draws != [other.categorical(probs) for _ in range(20)]


class Edge:
    """A generator at an end of its range (1.0: what rounding may make of the last numbers)."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, *_: object, **__: object) -> Tensor:
        return torch.tensor(self.value, dtype=torch.float64)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.6, 3), (1.0, 3)])
def test_the_ends_of_the_range_give_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, uniform: float, token: int
) -> None:
    probs = torch.tensor([0.0, 0.6, 0.0, 0.4000002, 0.0])
    monkeypatch.setattr(torch, "rand", Edge(uniform))
    assert RandomChooser(0).categorical(probs) == token


class Scripted:
    """Answers in the given order, and keeps what it was asked."""

    def __init__(self, accepts: list[bool], token: int) -> None:
        self._accepts, self._token = iter(accepts), token
        self.asked: list[float] = []
        self.drawn_from: Tensor = torch.zeros(0)

    def categorical(self, probs: Tensor) -> int:
        self.drawn_from = probs
        return self._token

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return next(self._accepts)


P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]])
Q = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.2, 0.4]])


def test_a_chain_that_stands_is_followed_by_the_bonus_token() -> None:
    chooser = Scripted([True, True], token=2)
    assert verify_chain([1, 2], Q, P, chooser) == Verdict(2, 2)
    assert chooser.asked == pytest.approx([0.3 / 0.6, 1.0])
    torch.testing.assert_close(chooser.drawn_from, P[2])


def test_the_first_rejection_ends_the_chain_with_the_residual() -> None:
    chooser = Scripted([True, False, True], token=2)
    assert verify_chain([0, 0], Q, P, chooser) == Verdict(1, 2)
    assert chooser.asked == pytest.approx([1.0, 0.1 / 0.4])
    torch.testing.assert_close(chooser.drawn_from, torch.tensor([0.0, 0.0, 1.0]).double())


def test_an_empty_chain_draws_from_the_target() -> None:
    chooser = Scripted([], token=1)
    assert verify_chain([], torch.zeros(0, 3), P[:1], chooser) == Verdict(0, 1)
    torch.testing.assert_close(chooser.drawn_from, P[0])


def test_greedy_laws_accept_the_targets_choice_and_replace_any_other() -> None:
    def onehot(*tokens: int) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens), 3).float()

    # No choice is left: a seed that matters would show.
    for seed in range(5):
        verdict = verify_chain([2, 0], onehot(2, 0), onehot(2, 1, 0), RandomChooser(seed))
        assert verdict == Verdict(1, 1)


weights = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any)


@given(weights, weights)
def test_residual_is_a_law_where_the_target_exceeds_the_draft(a: list[int], b: list[int]) -> None:
    p, q = torch.tensor(a).float() / sum(a), torch.tensor(b).float() / sum(b)
    rest = residual(p, q)
    assert float(rest.sum()) == pytest.approx(1, abs=1e-6)
    if not torch.equal(p, q):
        assert not rest[p <= q].any()


def test_equal_laws_leave_the_target_as_residual() -> None:
    torch.testing.assert_close(residual(P[0], P[0]), P[0].double())


@given(weights, weights)
def test_one_verified_token_has_the_targets_law(a: list[int], b: list[int]) -> None:
    p, q = torch.tensor(a).double() / sum(a), torch.tensor(b).double() / sum(b)

    def one_token(chooser: EnumeratingChooser) -> int:
        token = chooser.categorical(q)
        verdict = verify_chain([token], q.unsqueeze(0), torch.stack([p, p]), chooser)
        return token if verdict.accepted else verdict.next_token

    found = law_of(one_token)
    assert [found.get(v, 0.0) for v in range(4)] == pytest.approx(p.tolist(), abs=1e-9)


def test_acceptance_is_the_clipped_ratio() -> None:
    assert acceptance(P[0], Q[0], 1) == pytest.approx(0.5)
    assert acceptance(P[0], Q[0], 0) == 1.0
