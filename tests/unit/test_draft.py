"""The draft equals the naive model, and decodes what it was trained to compute."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.errors import ConfigError
from data.target import LogitTransform, Target, read_layer
from tests.support.naive import naive_block, naive_net
from tests.support.tiny import TAPS, tiny_draft, tiny_shape, tiny_target
from train.config import DraftConfig
from train.decode.drafters import ModelDrafter
from train.decode.verify import Sampling
from train.export.portable import expected_tensors, portable_config
from train.models.draft import Draft, DraftShape
from train.models.rope import rope_tables, rope_theta, rotate

VARIANTS: list[dict[str, Any]] = [
    {},
    {"head_rank": 0},
    {"confidence": False},
    {"head_rank": 0, "confidence": False, "num_layers": 1, "block_size": 2},
]
LENGTHS, ANCHORS = (9, 6), [[0, 3, 7], [1, 4, 0]]


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def random_rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Taps and tokens of two rows of unequal length, padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(2, max(LENGTHS), len(TAPS), 64, generator=generator)
    ids = torch.randint(1, 256, (2, max(LENGTHS)), generator=generator)
    for row, length in enumerate(LENGTHS):
        taps[row, length:], ids[row, length:] = 0, 0
    return taps, ids


def counted(block_size: int) -> Tensor:
    """Slots with a label inside the row; the last anchor of the second row is padding."""
    slot_mask = torch.tensor(
        [
            [[p + k + 1 < length for k in range(block_size)] for p in anchors]
            for length, anchors in zip(LENGTHS, ANCHORS, strict=True)
        ]
    )
    slot_mask[1, 2] = False
    return slot_mask


def require_naive(draft: Draft) -> None:
    taps, ids = random_rows()
    slot_mask = counted(draft.shape.block_size)
    with torch.no_grad():
        logits, confidence = draft.slot_logits(taps, ids, torch.tensor(ANCHORS), slot_mask)
        states = draft.states(taps, ids, torch.tensor(ANCHORS))
    at, net = 0, naive_net(draft)
    for row, anchors in enumerate(ANCHORS):
        for n, anchor in enumerate(anchors):
            block = naive_block(net, taps[row], ids[row].tolist(), anchor)
            for k, counts in enumerate(slot_mask[row, n]):
                same(states[row, n, k], block.states[k])
                if counts:
                    same(logits[at], block.logits[k])
                    if confidence is not None:
                        same(confidence[at], block.confidence[k])
                    at += 1
    assert at == len(logits)
    assert (confidence is not None) == draft.shape.confidence


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_forward_equals_the_naive_model(target: Target, options: dict[str, Any]) -> None:
    require_naive(tiny_draft(target, scale=4.0, **options))


def test_norm_weights_embedding_scale_and_soft_cap_take_part(target: Target) -> None:
    draft = tiny_draft(target, scale=4.0)
    draft.frozen = replace(
        draft.frozen, embedding_scale=3.0, transform=LogitTransform(scale=0.5, softcap=2.0)
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    require_naive(draft)


class Forced:
    """Chooses given tokens and keeps the laws that it was asked to draw from."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens: Iterator[int] = iter(tokens)

    def categorical(self, probs: Tensor) -> int:
        assert probs.dim() == 1
        return next(self._tokens)

    def accept(self, probability: float) -> bool:
        raise AssertionError(f"drafting verifies nothing ({probability})")


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_decoding_in_pieces_equals_training(target: Target, options: dict[str, Any]) -> None:
    draft = tiny_draft(target, scale=4.0, **options)
    taps, ids = random_rows()
    tokens, drafter = ids[0].tolist(), ModelDrafter(draft, Sampling(temperature=1.0))
    drafter.extend(torch.ones(3, len(TAPS), 64))  # of a request before
    drafter.start()
    end = 0
    for anchor in (1, 3, 4):
        drafter.extend(taps[0, end:anchor])
        end = anchor
        size = draft.shape.block_size
        forced = Forced(tokens[anchor + 1 :])
        proposal = drafter.propose(tokens[: anchor + 1], 100, forced)
        slot_mask = torch.ones(1, 1, size, dtype=torch.bool)
        with torch.no_grad():
            logits, confidence = draft.slot_logits(
                taps[:1], ids[:1], torch.tensor([[anchor]]), slot_mask
            )
        assert proposal.tokens == tokens[anchor + 1 : anchor + 1 + size]
        assert proposal.probs is not None
        torch.testing.assert_close(proposal.probs, logits.softmax(-1), rtol=1e-4, atol=1e-6)
        if confidence is None:
            assert proposal.confidence == []
        else:
            found = torch.tensor(proposal.confidence)
            torch.testing.assert_close(found, confidence.sigmoid(), rtol=1e-4, atol=1e-6)


def test_a_limit_shortens_the_proposal_and_changes_nothing_else(target: Target) -> None:
    drafter = ModelDrafter(tiny_draft(target, scale=4.0), Sampling(temperature=1.0))
    taps, ids = random_rows()
    tokens = ids[0].tolist()
    drafter.extend(taps[0, :3])
    short = drafter.propose(tokens[:4], 2, Forced(tokens[4:]))
    long = drafter.propose(tokens[:4], 4, Forced(tokens[4:]))
    assert short.tokens == long.tokens[:2]
    assert short.probs is not None
    assert long.probs is not None
    torch.testing.assert_close(short.probs, long.probs[:2])


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_tensors_have_the_engines_names_and_shapes(target: Target, options: dict[str, Any]) -> None:
    draft = tiny_draft(target, **options)
    found = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    assert found == expected_tensors(portable_config(draft.shape))


@pytest.mark.parametrize("rank", [0, 8])
def test_a_draft_in_bf16_computes_confidence(target: Target, rank: int) -> None:
    draft = tiny_draft(target, head_rank=rank).to(torch.bfloat16)
    taps, ids = random_rows()
    with torch.no_grad():
        logits, confidence = draft.slot_logits(taps, ids, torch.tensor(ANCHORS), counted(4))
    assert logits.dtype == torch.float32
    assert confidence is not None
    assert confidence.shape == logits.shape[:1]


def test_frozen_tensors_are_neither_trained_nor_saved(target: Target) -> None:
    draft = tiny_draft(target)
    frozen = {draft.frozen.embedding.data_ptr(), draft.frozen.head.data_ptr()}
    assert not frozen & {p.data_ptr() for p in draft.parameters()}
    assert not frozen & {t.data_ptr() for t in draft.state_dict().values()}
    assert not list(draft.buffers())
    assert not draft.frozen.embedding.requires_grad
    assert not draft.frozen.head.requires_grad


def test_init_norm_from_target_copies_the_targets_norm(target: Target) -> None:
    draft = tiny_draft(target)
    norm = torch.rand(64)
    draft.frozen = replace(draft.frozen, final_norm=norm)
    draft.init_norm_from_target()
    assert torch.equal(draft.norm.weight, norm)
    assert draft.norm.weight.requires_grad


def test_init_norm_refuses_a_norm_of_another_form(target: Target) -> None:
    draft = tiny_draft(target)
    draft.frozen = replace(draft.frozen, final_norm=None)
    with pytest.raises(ConfigError, match="init_norm_from_target=false"):
        draft.init_norm_from_target()


def test_shape_survives_json(target: Target) -> None:
    shape = tiny_shape(target, head_rank=3, intermediate_size=48)
    assert shape.backbone.intermediate_size == 48
    assert DraftShape.from_json(shape.to_json()) == shape


def test_shape_refuses_an_unknown_activation() -> None:
    config = SimpleNamespace(hidden_act="relu2")
    with pytest.raises(ConfigError, match="relu2"):
        DraftShape.of_target(config, TAPS, 0, DraftConfig())


def test_rope_turns_pairs_half_a_head_apart() -> None:
    theta = 100.0  # two frequencies: 1 and 1/10
    cos, sin = rope_tables(torch.tensor([0, 3]), 4, theta)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(2, 1, 4)
    turned = rotate(x, cos, sin)[:, 0]
    c, s, c10, s10 = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    expected = [c - 3 * s, 2 * c10 - 4 * s10, 3 * c + s, 4 * c10 + 2 * s10]
    torch.testing.assert_close(turned, torch.tensor([[1.0, 2.0, 3.0, 4.0], expected]))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_theta": 5e5},
        {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {}},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
    ],
)
def test_plain_rope_is_read(parameters: dict[str, Any]) -> None:
    assert rope_theta(SimpleNamespace(rope_parameters=parameters)) == 5e5


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 2, 3]},
        {"rope_type": "default"},
    ],
)
def test_other_rope_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rope"):
        rope_theta(SimpleNamespace(rope_parameters=parameters))


def test_layers_start_from_the_targets(target: Target) -> None:
    draft = tiny_draft(target, num_layers=2)
    own = dict(target.decoder.named_parameters())
    before = draft.markov_head.markov_w1.weight.clone() if draft.markov_head else None
    draft.init_layers([read_layer(target.folder, 2), read_layer(target.folder, 0)])
    for d, layer in enumerate((2, 0)):
        for name, parameter in draft.layers[d].named_parameters():
            assert torch.equal(parameter, own[f"layers.{layer}.{name}"].float()), name
    norm = own["layers.2.input_layernorm.weight"].float()
    assert torch.equal(draft.hidden_norm.weight, norm)
    assert draft.markov_head is not None
    assert torch.equal(draft.markov_head.markov_w1.weight, before)  # type: ignore[arg-type]


def test_layer_that_does_not_exist_or_fit_is_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="target layer 99"):
        read_layer(target.folder, 99)
    narrow = tiny_draft(target, num_layers=1, intermediate_size=16)
    with pytest.raises(ConfigError, match=r"gate_proj.weight is .* the draft's \(16, 64\)"):
        narrow.init_layers([read_layer(target.folder, 0)])


def test_projection_starts_as_the_average_of_the_taps(target: Target) -> None:
    draft = tiny_draft(target)
    draft.init_fc_as_average()
    taps = torch.randn(3, 5, len(TAPS), 64)
    torch.testing.assert_close(draft.fc(taps.flatten(-2)), taps.mean(-2))
