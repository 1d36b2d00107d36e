"""The CUDA paths: the same bodies as on the CPU. Run with ``pytest -m gpu`` on such a machine."""

from pathlib import Path

import pytest
import torch

from data.config import TargetConfig
from data.target import Target
from data.tiny import MASK_ID
from tests.support.tiny import TAPS, tiny_draft, tiny_target
from train.decode.drafters import ModelDrafter
from train.decode.session import Session
from train.decode.verify import RandomChooser, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")


def cuda_target(folder: Path) -> Target:
    config = TargetConfig(path=str(folder), tap_layers=list(TAPS), mask_token_id=MASK_ID)
    config.precision = type(config.precision).fp32
    return Target(config, CUDA)


def test_draft_gives_the_cpus_logits(tiny_folder: Path) -> None:
    target = tiny_target(tiny_folder)
    draft = tiny_draft(target, scale=3.0)
    taps, ids = torch.randn(2, 12, len(TAPS), 64), torch.randint(0, 256, (2, 12))
    anchors = torch.tensor([[2, 5], [0, 7]])
    mask = torch.ones(2, 2, 4, dtype=torch.bool)
    expected, _ = draft.slot_logits(taps, ids, anchors, mask)
    moved = draft.to(CUDA)
    moved.frozen = draft.frozen.to(CUDA, torch.float32)
    found, _ = moved.slot_logits(taps.to(CUDA), ids.to(CUDA), anchors.to(CUDA), mask.to(CUDA))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_greedy_decoding_is_plain_decodings(tiny_folder: Path) -> None:
    target = cuda_target(tiny_folder)
    draft = tiny_draft(target, scale=5.0)
    draft.frozen = draft.frozen.to(CUDA, torch.float32)
    drafter = ModelDrafter(draft.to(CUDA), Sampling())
    for start in range(5):
        ids = [(start + 7 * j) % 256 for j in range(9)]
        plain = Session(target, None, Sampling()).decode(ids, 24, RandomChooser(0))
        found = Session(target, drafter, Sampling()).decode(ids, 24, RandomChooser(0))
        assert found.tokens == plain.tokens
