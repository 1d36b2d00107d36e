"""Where blocks start and which slots count, by hand."""

import math

import numpy as np
import pytest
import torch

from data.batch import Batch, CachedRow
from tests.support.collate import collate
from train.objective.anchors import count_slots, draw_anchors, draw_blocks, slot_weights

EVERY = 100


def mask(text: str) -> np.ndarray:
    return np.array([c == "1" for c in text])


def batch(*masks: str, epochs: list[int] | None = None, first_key: int = 0) -> Batch:
    rows = [
        CachedRow(
            token_ids=torch.arange(len(text)),
            loss_mask=torch.from_numpy(mask(text)),
            taps=torch.zeros(len(text), 1, 2),
            last=torch.zeros(len(text), 2),
            row_key=first_key + i,
        )
        for i, text in enumerate(masks)
    ]
    return collate(rows, epochs or [0] * len(rows))


@pytest.mark.parametrize(
    ("text", "anchors"),
    [
        ("0111", [1, 2]),
        ("01110011", [1, 2, 6]),
        ("0101010", []),
        ("0000", []),
        ("11", [0]),
        ("1", []),
        ("0", []),
    ],
)
def test_an_anchor_and_the_token_after_it_are_supervised(text: str, anchors: list[int]) -> None:
    assert draw_anchors(mask(text), EVERY, 0, 0, 0).tolist() == anchors


def test_a_masked_label_ends_the_block_for_good() -> None:
    slots = count_slots(mask("11101111"), np.array([0, 1, 4]), 5)
    assert slots.tolist() == [
        [True, True, False, False, False],
        [True, False, False, False, False],
        [True, True, True, False, False],
    ]


def test_slots_behind_the_end_of_the_row_do_not_count() -> None:
    slots = count_slots(mask("1111"), np.array([0, 1, 2]), 3)
    assert slots.tolist() == [[True, True, True], [True, True, False], [True, False, False]]


def test_draw_blocks_gives_the_anchors_and_slots_of_two_spans() -> None:
    blocks = draw_blocks(batch("0111001110", "011"), EVERY, 2, seed=0)
    assert blocks.anchor_pos.tolist() == [[1, 2, 6, 7], [1, 0, 0, 0]]
    assert blocks.slot_mask.tolist() == [
        [[True, True], [True, False], [True, True], [True, False]],
        [[True, False], [False, False], [False, False], [False, False]],
    ]


def test_padding_that_looks_supervised_is_never_drawn() -> None:
    padded = batch("0111", "01111111")
    padded.loss_mask[0] = True
    padded.loss_mask[0, 0] = False
    blocks = draw_blocks(padded, EVERY, 3, seed=0)
    assert blocks.slot_mask[0].sum(-1).tolist() == [2, 1, 0, 0, 0, 0]
    assert blocks.anchor_pos[0].tolist() == [1, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("wanted", [4, 5, 100])
def test_no_more_candidates_than_wanted_gives_all(wanted: int) -> None:
    assert draw_anchors(mask("011111"), wanted, 3, 1, 7).tolist() == [1, 2, 3, 4]


def test_draws_are_sorted_distinct_candidates() -> None:
    supervised = mask("0" * 5 + "1" * 40 + "0" * 5)
    for row_key in range(50):
        drawn = draw_anchors(supervised, 12, 0, 0, row_key)
        assert len(drawn) == 12
        assert (np.diff(drawn) > 0).all()
        assert drawn.min() >= 5
        assert drawn.max() <= 43


def test_every_candidate_is_drawn_equally_often() -> None:
    counts = np.zeros(11)
    for row_key in range(3000):
        counts[draw_anchors(mask("1" * 11), 3, 0, 0, row_key)] += 1
    assert counts[10] == 0
    # 900 of 3000 expected, standard deviation 25.
    assert abs(counts[:10] - 900).max() < 110


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"epoch": 1}, {"row_key": 1}, {"row_key": 2**63 - 1}]
)
def test_a_draw_depends_on_seed_epoch_and_row(other: dict[str, int]) -> None:
    keys = {"seed": 0, "epoch": 0, "row_key": 0}
    first = draw_anchors(mask("1" * 200), 20, **keys)
    assert np.array_equal(first, draw_anchors(mask("1" * 200), 20, **keys))
    assert not np.array_equal(first, draw_anchors(mask("1" * 200), 20, **{**keys, **other}))


def test_seed_and_epoch_are_not_mixed_up() -> None:
    first = draw_anchors(mask("1" * 200), 20, seed=1, epoch=0, row_key=0)
    assert not np.array_equal(first, draw_anchors(mask("1" * 200), 20, 0, 1, 0))


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    alone = draw_blocks(batch("1" * 50, epochs=[3], first_key=9), 5, 4, seed=2)
    torch.manual_seed(123)  # nor on the global generator
    beside = draw_blocks(batch("1" * 50, "1" * 90, epochs=[3, 0], first_key=9), 5, 4, seed=2)
    assert torch.equal(alone.anchor_pos[0], beside.anchor_pos[0])
    assert torch.equal(alone.slot_mask[0], beside.slot_mask[0])


def test_without_supervision_no_slot_counts() -> None:
    blocks = draw_blocks(batch("0000", "010"), EVERY, 3, seed=0)
    assert blocks.anchor_pos.tolist() == [[0], [0]]
    assert blocks.slot_mask.shape == (2, 1, 3)
    assert not blocks.slot_mask.any()


def test_slot_weights_decay_from_one_and_are_zero_where_nothing_counts() -> None:
    slot_mask = torch.tensor([[[True, True, True], [True, False, False]]])
    expected = [[1, math.exp(-1 / 4), math.exp(-2 / 4)], [1, 0, 0]]
    torch.testing.assert_close(slot_weights(slot_mask, 4.0)[0], torch.tensor(expected))


def test_without_decay_all_counted_slots_weigh_one() -> None:
    slot_mask = torch.tensor([[True, True, False]])
    assert slot_weights(slot_mask, None).tolist() == [[1.0, 1.0, 0.0]]
