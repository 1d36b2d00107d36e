"""The loss curve of 20 fp32 steps through the real data path equals the recorded one."""

import json
import tempfile
from pathlib import Path

import pytest
from accelerate import Accelerator

from data.cache.read import CacheReader
from data.loader import StepLoader
from data.sampler import RowSampler
from data.target import Target
from tests.support.tiny import random_rows, tiny_cache, tiny_draft, tiny_target
from train.config import ObjectiveConfig, OptimConfig
from train.loop.optim import lr_at, make_optimizer, set_lr
from train.loop.step import StepResult, accumulate_step
from train.objective.metrics import summarise

GOLDEN = Path(__file__).with_name("loss_curve.json")
STEPS, SEED = 20, 0
LENGTHS = [(4, 20), (9, 6), (3, 30), (12, 12), (5, 2), (7, 17), (2, 40), (6, 9), (8, 25), (3, 5)]
OPTIM = OptimConfig(lr=3e-3, warmup_ratio=0.1, rows_per_step=4, rows_per_micro_batch=2)
OBJECTIVE = ObjectiveConfig(num_anchors=8)
Curve = dict[str, list[float]]


def record_curve(target_folder: Path) -> Curve:
    """Loss and teacher-forced tau of every step."""
    target = tiny_target(target_folder)
    with tempfile.TemporaryDirectory() as scratch:
        cache = tiny_cache(target, random_rows(LENGTHS), Path(scratch) / "cache")
        return train_curve(target, CacheReader(cache))


def train_curve(target: Target, reader: CacheReader) -> Curve:
    draft = tiny_draft(target)
    draft.init_norm_from_target()
    optimizer = make_optimizer(draft.parameters(), OPTIM)
    accelerator = Accelerator(cpu=True)
    sampler = RowSampler(len(reader), SEED)
    loader = StepLoader(reader, sampler, OPTIM.rows_per_step, OPTIM.rows_per_micro_batch)
    curve: Curve = {"loss": [], "tau_teacher_forced": []}
    for step, loaded in enumerate(loader.steps(0, STEPS)):
        set_lr(optimizer, lr_at(step, STEPS, OPTIM.lr, OPTIM.warmup_ratio))
        heads, batches = loaded.heads, loaded.batches
        result = accumulate_step(draft, heads, batches, OBJECTIVE, SEED, accelerator)
        accelerator.clip_grad_norm_(draft.parameters(), OPTIM.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        curve["loss"].append(loss_of(result))
        tau = summarise(result.sums)["tau_teacher_forced"]
        assert isinstance(tau, float)
        curve["tau_teacher_forced"].append(tau)
    return curve


def loss_of(result: StepResult) -> float:
    ce, l1, confidence = (float(result.sums[f"{n}_sum"]) for n in ("ce", "l1", "confidence"))
    weighted = OBJECTIVE.ce_weight * ce + OBJECTIVE.l1_weight * l1
    return (weighted + OBJECTIVE.confidence_weight * confidence) / result.denominator


def test_loss_curve_is_the_recorded_one(tiny_folder: Path) -> None:
    recorded: Curve = json.loads(GOLDEN.read_text())
    found = record_curve(tiny_folder)
    for name, values in recorded.items():
        assert len(values) == STEPS
        assert found[name] == pytest.approx(values, rel=1e-4), (
            f"{name} has changed; if that is meant: python scripts/update_golden.py"
        )


def test_the_recorded_loss_falls() -> None:
    loss = json.loads(GOLDEN.read_text())["loss"]
    assert sum(loss[-4:]) < 0.9 * sum(loss[:4])
