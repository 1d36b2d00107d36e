"""What a block sees, by perturbing one input at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.target import Target
from tests.support.tiny import TAPS, tiny_draft, tiny_target
from train.models.draft import Draft

LENGTH, SLOTS = 10, 4
ANCHORS = [0, 1, 4, 8]


@dataclass
class Setup:
    draft: Draft
    taps: Tensor
    ids: Tensor
    anchors: Tensor

    def states(self) -> Tensor:
        return self.draft.states(self.taps, self.ids, self.anchors)[0]


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture
def setup(target: Target) -> Setup:
    draft = tiny_draft(target, scale=5.0, block_size=SLOTS)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, LENGTH, len(TAPS), 64, generator=generator)
    ids = torch.randint(0, 256, (1, LENGTH), generator=generator)
    return Setup(draft, taps, ids, torch.tensor([ANCHORS]))


@torch.no_grad()
def test_taps_reach_exactly_the_blocks_behind_them(setup: Setup) -> None:
    base = setup.states()
    for j in range(LENGTH):
        for layer in range(len(TAPS)):
            kept = setup.taps[0, j, layer].clone()
            setup.taps[0, j, layer] += 1
            changed = (setup.states() != base).flatten(2).any(-1)
            expected = torch.tensor([[j < p] * SLOTS for p in ANCHORS])
            assert torch.equal(changed, expected), (j, layer)
            setup.taps[0, j, layer] = kept


@torch.no_grad()
def test_a_token_reaches_only_the_block_it_anchors(setup: Setup) -> None:
    base = setup.states()
    for j in range(LENGTH):
        kept = int(setup.ids[0, j])
        setup.ids[0, j] = (kept + 1) % 256
        changed = (setup.states() != base).any(-1)
        expected = torch.tensor([[j == p] * SLOTS for p in ANCHORS])
        assert torch.equal(changed, expected), j
        setup.ids[0, j] = kept


@torch.no_grad()
def test_a_previous_token_changes_the_logits_of_its_own_slot(setup: Setup) -> None:
    places = [(p, k) for p in ANCHORS for k in range(SLOTS) if p + k < LENGTH]
    slot_mask = torch.tensor([[[p + k < LENGTH for k in range(SLOTS)] for p in ANCHORS]])
    inputs = (setup.taps, setup.ids, setup.anchors, slot_mask)
    base, base_confidence = setup.draft.slot_logits(*inputs)
    for j in range(LENGTH):
        kept = int(setup.ids[0, j])
        setup.ids[0, j] = (kept + 1) % 256
        logits, confidence = setup.draft.slot_logits(*inputs)
        expected = [j in (p, p + k) for p, k in places]
        assert (logits != base).any(-1).tolist() == expected, j
        assert confidence is not None
        assert base_confidence is not None
        assert (confidence != base_confidence).tolist() == expected, j
        setup.ids[0, j] = kept


@torch.no_grad()
def test_moving_one_block_leaves_the_others(setup: Setup) -> None:
    base = setup.states()
    setup.anchors = torch.tensor([[0, 3, 4, 8]])
    changed = (setup.states() != base).flatten(1).any(-1)
    assert changed.tolist() == [False, True, False, False]


@torch.no_grad()
def test_padding_of_rows_and_anchors_changes_nothing(setup: Setup) -> None:
    slot_mask = torch.ones(1, 4, SLOTS, dtype=torch.bool)
    slot_mask[0, 3, 2:] = False
    logits, confidence = setup.draft.slot_logits(setup.taps, setup.ids, setup.anchors, slot_mask)
    garbage = torch.full((1, 5, len(TAPS), 64), 1e3)
    padded = setup.draft.slot_logits(
        torch.cat([setup.taps, garbage], 1),
        torch.nn.functional.pad(setup.ids, (0, 5), value=7),
        torch.nn.functional.pad(setup.anchors, (0, 3)),
        torch.nn.functional.pad(slot_mask, (0, 0, 0, 3)),
    )
    # Other matrix sizes, so not bit for bit.
    torch.testing.assert_close(padded[0], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded[1], confidence, rtol=1e-4, atol=1e-4)


def test_slots_see_all_of_their_own_block_and_nothing_of_others(target: Target) -> None:
    # One layer only: what is seen is seen directly.
    draft = tiny_draft(target, scale=5.0, block_size=SLOTS, num_layers=1)
    anchors = torch.tensor([[2, 5]])
    offset = torch.zeros(1, 2, SLOTS, 64, requires_grad=True)

    def add_offset(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0] + offset, *arguments[1:])

    draft.layers[0].register_forward_pre_hook(add_offset)
    taps, ids = torch.randn(1, 8, len(TAPS), 64), torch.arange(8).unsqueeze(0)
    states = draft.states(taps, ids, anchors)
    for n in range(2):
        for k in range(SLOTS):
            (gradient,) = torch.autograd.grad(states[0, n, k, 0], offset, retain_graph=True)
            expected = torch.zeros(2, SLOTS, dtype=torch.bool)
            expected[n] = True
            assert torch.equal(gradient[0].any(-1), expected), (n, k)


@torch.no_grad()
def test_mask_slots_are_filled_with_the_mask_tokens_embedding(setup: Setup) -> None:
    base = setup.states()
    embedding = setup.draft.frozen.embedding
    mask = setup.draft.shape.mask_token_id
    assert mask not in setup.ids
    embedding[mask] += 1
    changed = (setup.states() != base).any(-1)
    embedding[mask] -= 1
    assert changed.all()
