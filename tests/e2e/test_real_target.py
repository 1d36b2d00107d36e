"""Losslessness on the demo's real target, in fp32: token-identical to plain greedy decoding."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.chat import encode_prompt
from data.config import Precision, TargetConfig
from data.corpus import locate, read_prompts
from data.target import Target, read_frozen_head
from train.config import DraftConfig
from train.decode.drafters import Drafter, LookupDrafter, ModelDrafter, Proposal
from train.decode.session import Session
from train.decode.verify import Chooser, RandomChooser, Sampling
from train.models.draft import Draft, DraftShape

pytestmark = [pytest.mark.slow, pytest.mark.real]
GREEDY = Sampling()
NEW_TOKENS = 12
CPU = torch.device("cpu")


class ScriptedDrafter:
    """Proposes a known continuation with every fourth token wrong: all outcomes occur."""

    def __init__(self, answer: list[int], prompt_length: int) -> None:
        self._answer, self._prompt_length = answer, prompt_length

    @property
    def block_size(self) -> int:
        return 5

    def start(self) -> None:
        pass

    def extend(self, taps: torch.Tensor) -> None:
        pass

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:  # noqa: ARG002
        done = len(tokens) - self._prompt_length
        known = self._answer[done : done + min(limit, self.block_size)]
        return Proposal([t + ((done + i) % 4 == 3) for i, t in enumerate(known)], None)


@pytest.fixture(scope="module")
def target(real_folder: Path) -> Target:
    config = TargetConfig(path=str(real_folder), mask_token_id=16)
    return Target(config, CPU, Precision.fp32, (1, 8, 15, 22, 27))


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    read = read_prompts(locate("pkg://data/demo/test.jsonl"), 20)
    return [
        encode_prompt(target.tokenizer, [{"role": "user", "content": p.turns[0]}]) for p in read
    ]


@pytest.fixture(scope="module")
def plain(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    session = Session(target, None, GREEDY)
    return [session.decode(ids, NEW_TOKENS, RandomChooser(0)).tokens for ids in prompts]


def test_plain_decoding_is_transformers_greedy_generation(
    target: Target, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    for ids, expected in itertools.islice(zip(prompts, plain, strict=True), 3):
        output = target.model.generate(
            torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert output[0, len(ids) :].tolist() == expected


def trained_like_draft(target: Target) -> Draft:
    frozen = read_frozen_head(target.folder).to(CPU, torch.float32)
    config = DraftConfig(num_layers=2, head_rank=16)
    shape = DraftShape.of_target(target.text_config, target.tap_layers, 16, config)
    torch.manual_seed(0)
    draft = Draft(shape, frozen)
    draft.init_norm_from_target()
    return draft


def drafters(
    target: Target, kind: str, prompts: list[list[int]], plain: list[list[int]]
) -> Iterator[Drafter]:
    model = ModelDrafter(trained_like_draft(target), GREEDY)
    for ids, answer in zip(prompts, plain, strict=True):
        if kind == "model":
            yield model
        else:
            yield LookupDrafter(7) if kind == "lookup" else ScriptedDrafter(answer, len(ids))


@pytest.mark.parametrize("kind", ["model", "lookup", "scripted"])
def test_greedy_output_is_plain_decodings(
    target: Target, prompts: list[list[int]], plain: list[list[int]], kind: str
) -> None:
    accepted = rejected = 0
    for drafter, ids, expected in zip(
        drafters(target, kind, prompts, plain), prompts, plain, strict=True
    ):
        decoded = Session(target, drafter, GREEDY).decode(ids, NEW_TOKENS, RandomChooser(0))
        assert decoded.tokens == expected
        accepted += sum(r.accepted for r in decoded.rounds)
        rejected += sum(r.drafted - r.accepted for r in decoded.rounds)
    assert rejected > 0
    assert accepted > 0 or kind == "model"
