"""One optimizer step: one denominator, whatever the micro-batches; steps that must not be taken."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch, CachedRow
from data.target import Target
from tests.support.collate import collate
from tests.support.naive import naive_net, naive_row_loss
from tests.support.tiny import TAPS, tiny_draft, tiny_target
from train.config import ObjectiveConfig, OptimConfig
from train.errors import CheckpointError
from train.loop.fit import StepGuard
from train.loop.optim import make_optimizer
from train.loop.step import StepResult, accumulate_step
from train.models.draft import Draft
from train.objective.losses import TermWeights
from train.objective.metrics import summarise

OBJECTIVE = ObjectiveConfig(num_anchors=64)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def random_row(index: int, length: int, supervised: range) -> CachedRow:
    generator = torch.Generator().manual_seed(index)
    loss_mask = torch.zeros(length, dtype=torch.bool)
    loss_mask[list(supervised)] = True
    return CachedRow(
        token_ids=torch.randint(0, 256, (length,), generator=generator),
        loss_mask=loss_mask,
        taps=torch.randn(length, len(TAPS), 64, generator=generator),
        last=torch.randn(length, 64, generator=generator),
        row_key=1000 + index,
    )


ROWS = [
    random_row(0, 14, range(2, 14)),
    random_row(1, 5, range(3, 5)),
    random_row(2, 9, range(4, 8)),
    random_row(3, 6, range(1, 6)),
]


def batches(rows: Sequence[CachedRow], sizes: Sequence[int]) -> list[Batch]:
    assert sum(sizes) == len(rows)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        collate(rows[start : start + size], [0] * size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def step_of(
    draft: Draft,
    micro_batches: Sequence[Batch],
    config: ObjectiveConfig,
    seed: int,
    accelerator: Accelerator,
) -> StepResult:
    return accumulate_step(draft, micro_batches, micro_batches, config, seed, accelerator)


def gradients(
    draft: Draft,
    micro_batches: Sequence[Batch],
    accelerator: Accelerator,
    config: ObjectiveConfig = OBJECTIVE,
) -> tuple[dict[str, Tensor], StepResult]:
    draft.zero_grad(set_to_none=True)
    result = step_of(draft, micro_batches, config, 0, accelerator)
    found = {n: p.grad.clone() for n, p in draft.named_parameters() if p.grad is not None}
    return found, result


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[n].double() - expected[n].double()).norm() / expected[n].double().norm())
        for n in expected
    )


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (3, 1)])
def test_micro_batches_do_not_change_the_gradient(
    target: Target, accelerator: Accelerator, sizes: tuple[int, ...]
) -> None:
    draft = tiny_draft(target, scale=3.0)
    whole, expected = gradients(draft, batches(ROWS, (4,)), accelerator)
    parts, result = gradients(draft, batches(ROWS, sizes), accelerator)
    assert len(whole) == len(list(draft.parameters()))
    assert relative_error(parts, whole) < 1e-6
    assert result.denominator == pytest.approx(expected.denominator)
    assert summarise(result.sums).keys() == summarise(expected.sums).keys()
    for name, value in expected.sums.items():
        torch.testing.assert_close(result.sums[name], value, msg=name)


@pytest.mark.parametrize("decay_scale", [4.0, None])
def test_every_token_weighs_the_same_whatever_its_row(
    target: Target, accelerator: Accelerator, decay_scale: float | None
) -> None:
    # A long and a short row, one a micro-batch: the naive sum knows no micro-batches.
    rows = [random_row(0, 9, range(2, 9)), random_row(1, 5, range(2, 5))]
    draft = tiny_draft(target, scale=3.0, num_layers=1, block_size=3)
    config = replace(OBJECTIVE, decay_scale=decay_scale)
    found, result = gradients(draft, batches(rows, (1, 1)), accelerator, config)
    net = naive_net(draft, requires_grad=True)
    weights = TermWeights(config.ce_weight, config.l1_weight, config.confidence_weight)
    sums = [
        naive_row_loss(
            net, (r.taps, r.token_ids.tolist(), r.loss_mask.tolist(), r.last), weights, decay_scale
        )
        for r in rows
        if r.last is not None
    ]
    denominator = sum(weight for _, weight in sums)
    torch.stack([loss for loss, _ in sums]).sum().div(denominator).backward()
    expected = {n: w.grad for n, w in net.weights.items() if w.grad is not None}
    assert result.denominator == pytest.approx(denominator)
    assert relative_error(found, expected) < 1e-4


def test_a_micro_batch_without_supervision_contributes_nothing(
    target: Target, accelerator: Accelerator
) -> None:
    silent = random_row(7, 8, range(0))
    draft = tiny_draft(target, scale=3.0)
    expected, _ = gradients(draft, batches(ROWS, (4,)), accelerator)
    for sizes, rows in (((4, 1), [*ROWS, silent]), ((1, 4), [silent, *ROWS])):
        found, _ = gradients(draft, batches(rows, sizes), accelerator)
        assert relative_error(found, expected) < 1e-6


def test_a_step_without_supervision_has_gradient_zero(
    target: Target, accelerator: Accelerator
) -> None:
    rows = [random_row(7, 8, range(0)), random_row(8, 3, range(1))]
    draft = tiny_draft(target)
    found, result = gradients(draft, batches(rows, (1, 1)), accelerator)
    assert result.denominator == 0
    assert not any(g.any() for g in found.values())
    assert all(g.isfinite().all() for g in found.values())
    assert all(v.isfinite().all() for v in result.sums.values())


def test_one_step_moves_every_trained_tensor_and_no_frozen_one(
    target: Target, accelerator: Accelerator
) -> None:
    draft = tiny_draft(target)
    embedding, head = draft.frozen.embedding.clone(), draft.frozen.head.clone()
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    optimizer = make_optimizer(draft.parameters(), OptimConfig())
    gradients(draft, batches(ROWS, (2, 2)), accelerator)
    optimizer.step()
    for name, parameter in draft.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert torch.equal(draft.frozen.embedding, embedding)
    assert torch.equal(draft.frozen.head, head)


def test_the_gradient_of_a_step_is_added_to_what_is_there(
    target: Target, accelerator: Accelerator
) -> None:
    draft = tiny_draft(target, scale=3.0)
    once, _ = gradients(draft, batches(ROWS, (4,)), accelerator)
    step_of(draft, batches(ROWS, (4,)), OBJECTIVE, 0, accelerator)
    twice = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
    assert relative_error(twice, {n: 2 * g for n, g in once.items()}) < 1e-6


def test_anchors_change_with_seed_and_epoch(target: Target, accelerator: Accelerator) -> None:
    draft, config = tiny_draft(target, scale=3.0), replace(OBJECTIVE, num_anchors=2)

    def gradient(epoch: int, seed: int) -> Tensor:
        draft.zero_grad(set_to_none=True)
        batch = replace(collate(ROWS[:1], [0]), epochs=(epoch,))
        step_of(draft, [batch], config, seed, accelerator)
        assert draft.fc.weight.grad is not None
        return draft.fc.weight.grad

    assert torch.equal(gradient(0, 0), gradient(0, 0))
    assert not torch.equal(gradient(0, 0), gradient(1, 0))
    assert not torch.equal(gradient(0, 0), gradient(0, 1))


def guarded() -> tuple[StepGuard, nn.Parameter]:
    parameter = nn.Parameter(torch.zeros(1))
    return StepGuard(torch.optim.SGD([parameter], lr=1.0)), parameter


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_cleared(norm: float) -> None:
    guard, parameter = guarded()
    parameter.grad = torch.ones(1)
    guard.step(norm, 0, [1])
    assert float(parameter.detach()) == 0
    assert parameter.grad is None
    assert guard.skipped == 1
    parameter.grad = torch.ones(1)
    guard.step(1.0, 1, [1])
    assert float(parameter.detach()) == -1
    assert parameter.grad is None
    assert guard.skipped == 1


def test_five_skipped_steps_in_a_row_end_the_run() -> None:
    guard, _ = guarded()
    for step in range(4):
        guard.step(math.nan, step, [])
    guard.step(1.0, 4, [])
    for step in range(4):
        guard.step(math.nan, step, [])
    with pytest.raises(CheckpointError, match=r"5 steps in a row.*not finite"):
        guard.step(math.nan, 9, [])
