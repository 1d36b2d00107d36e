"""Learning rate and number of steps, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from train.config import OptimConfig
from train.loop.optim import lr_at, make_optimizer, set_lr, total_steps


def test_rate_rises_linearly_to_the_peak_and_falls_as_half_a_cosine() -> None:
    rates = [lr_at(step, 10, 2.0, 0.2) for step in range(10)]
    falling = [1 + math.cos(math.pi * i / 9) for i in range(1, 9)]
    assert rates == pytest.approx([1.0, 2.0, *falling])


def test_rate_reaches_zero_behind_the_last_step_and_stays_there() -> None:
    assert 0 < lr_at(9, 10, 2.0, 0.2) < 0.1
    assert lr_at(10, 10, 2.0, 0.2) == pytest.approx(0, abs=1e-12)
    assert lr_at(25, 10, 2.0, 0.2) == pytest.approx(0, abs=1e-12)


def test_a_single_step_has_the_peak_rate() -> None:
    assert lr_at(0, 1, 2.0, 0.04) == 2.0


@given(st.integers(1, 300), st.floats(0, 0.99))
def test_rate_is_continuous_and_never_above_the_peak(total: int, warmup_ratio: float) -> None:
    rates = [lr_at(step, total, 1.0, warmup_ratio) for step in range(total)]
    warmup = max(1, round(total * warmup_ratio))
    assert max(rates) == 1.0 == rates[min(warmup, total) - 1]
    assert min(rates) >= 0
    steepest = max(1 / warmup, math.pi / 2 / (total - warmup + 1))
    jumps = [abs(a - b) for a, b in zip([0.0, *rates], rates, strict=False)]
    assert max(jumps) <= steepest + 1e-9


@pytest.mark.parametrize(
    ("rows", "per_step", "epochs", "steps", "expected"),
    [(100, 10, 3, None, 30), (105, 10, 1, None, 10), (7, 10, 1, None, 1), (100, 10, 3, 4, 4)],
)
def test_total_steps(
    rows: int, per_step: int, epochs: int, steps: int | None, expected: int
) -> None:
    config = OptimConfig(rows_per_step=per_step, epochs=epochs, steps=steps)
    assert total_steps(rows, config) == expected


def test_the_optimizer_is_adamw_with_the_configured_values() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 1.0]))
    config = OptimConfig(lr=0.5, weight_decay=0.1, beta1=0.8, beta2=0.7)
    optimizer = make_optimizer([parameter], config)
    expected = torch.ones(2)
    first, second = torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate((torch.tensor([2.0, -1.0]), torch.tensor([1.0, 3.0])), 1):
        parameter.grad = gradient
        set_lr(optimizer, 0.25)
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.7 * second + 0.3 * gradient**2
        update = first / (1 - 0.8**step) / ((second / (1 - 0.7**step)).sqrt() + 1e-8)
        expected = expected * (1 - 0.25 * 0.1) - 0.25 * update
    torch.testing.assert_close(parameter.detach(), expected)
