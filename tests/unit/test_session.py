"""Rounds with the real tiny target: greedy output is plain decoding's, token for token."""

from pathlib import Path

import pytest

from data.tiny import STOP_ID
from tests.support.tiny import tiny_draft, tiny_target
from train.decode.drafters import Drafter, LookupDrafter, ModelDrafter
from train.decode.session import Session
from train.decode.verify import RandomChooser, Sampling

GREEDY = Sampling()


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 256 for j in range(5 + i % 11)] for i in range(count)]


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_greedy_output_is_plain_decodings(tiny_folder: Path, kind: str) -> None:
    target = tiny_target(tiny_folder)
    drafter: Drafter = LookupDrafter(4)
    if kind == "draft":
        drafter = ModelDrafter(tiny_draft(target, scale=5.0), GREEDY)
    plain, drafted = Session(target, None, GREEDY), Session(target, drafter, GREEDY)
    accepted = 0
    for ids in prompts(20):
        expected = plain.decode(ids, 24, RandomChooser(0))
        found = drafted.decode(ids, 24, RandomChooser(0))
        assert found.tokens == expected.tokens
        assert len(found.tokens) == 24 or found.tokens[-1] == STOP_ID
        assert sum(r.committed for r in found.rounds) == len(found.tokens) - 1
        accepted += sum(r.accepted for r in found.rounds)
    assert accepted > 0 or kind == "draft"
