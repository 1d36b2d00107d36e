"""Checkpoints: bit for bit, complete or absent, and errors that name the file."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.tiny import TAPS, tiny_draft, tiny_target
from train.config import OptimConfig
from train.errors import CheckpointError
from train.loop.checkpoint import (
    TrainState,
    find_checkpoint,
    list_checkpoints,
    load_draft,
    load_draft_tensors,
    load_optimizer,
    load_state,
    save_checkpoint,
)
from train.loop.optim import make_optimizer
from train.models.draft import Draft

FINGERPRINT = Fingerprint({"tokenizer": "bytes"})


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def train_step(
    draft: Draft, optimizer: torch.optim.Optimizer, step: int, weight: float = 1
) -> None:
    generator = torch.Generator().manual_seed(step)
    taps = torch.randn(1, 6, len(TAPS), 64, generator=generator)
    ids = torch.randint(0, 256, (1, 6), generator=generator)
    slots = torch.ones(1, 1, 4, dtype=torch.bool)
    logits, confidence = draft.slot_logits(taps, ids, torch.tensor([[1]]), slots)
    loss = logits.logsumexp(-1).mean() - logits[:, 3].mean()
    if weight:
        assert confidence is not None
        loss = loss + (confidence - weight).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trained(
    target: Target, steps: int = 3, weight: float = 1
) -> tuple[Draft, torch.optim.Optimizer]:
    draft = tiny_draft(target)
    optimizer = make_optimizer(draft.parameters(), OptimConfig(lr=1e-2))
    for step in range(steps):
        train_step(draft, optimizer, step, weight)
    return draft, optimizer


def save(
    folder: Path, draft: Draft, optimizer: torch.optim.Optimizer, step: int = 3, keep: int = 2
) -> Path:
    state = TrainState(step, {"optim.lr": 1e-2, "draft.head": "vanilla"})
    return save_checkpoint(folder, draft, optimizer, state, FINGERPRINT, keep)


def restore(path: Path, target: Target) -> tuple[Draft, torch.optim.Optimizer]:
    draft = tiny_draft(target, seed=9)
    load_draft_tensors(path, draft)
    optimizer = make_optimizer(draft.parameters(), OptimConfig(lr=1e-2))
    load_optimizer(path, draft, optimizer)
    return draft, optimizer


def require_equal(one: Draft, other: Draft) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_next_step_after_loading_is_the_same_bit_for_bit(
    target: Target, tmp_path: Path
) -> None:
    draft, optimizer = trained(target)
    other, other_optimizer = restore(save(tmp_path, draft, optimizer), target)
    require_equal(other, draft)
    before = other.fc.weight.detach().clone()
    for step in (3, 4):
        train_step(draft, optimizer, step)
        train_step(other, other_optimizer, step)
    require_equal(other, draft)
    assert not torch.equal(other.fc.weight, before)


def test_a_parameter_that_nothing_trains_does_not_keep_a_run_from_going_on(
    target: Target, tmp_path: Path
) -> None:
    # objective.confidence_weight=0 leaves the confidence head without any moments.
    draft, optimizer = trained(target, weight=0)
    other, other_optimizer = restore(save(tmp_path, draft, optimizer), target)
    train_step(draft, optimizer, 3, weight=0)
    train_step(other, other_optimizer, 3, weight=0)
    require_equal(other, draft)


def test_load_draft_needs_the_folder_alone(target: Target, tmp_path: Path) -> None:
    draft, optimizer = trained(target)
    path = save(tmp_path, draft, optimizer)
    loaded = load_draft(path, draft.frozen)
    assert loaded.shape == draft.shape
    require_equal(loaded, draft)


def test_step_config_and_fingerprint_come_back(target: Target, tmp_path: Path) -> None:
    path = save(tmp_path, *trained(target, steps=1), step=17)
    assert load_state(path) == TrainState(17, {"optim.lr": 1e-2, "draft.head": "vanilla"})
    assert Fingerprint.load(path / "fingerprint.json").fields == FINGERPRINT.fields


def test_rotation_keeps_the_newest(target: Target, tmp_path: Path) -> None:
    draft, optimizer = trained(target, steps=1)
    for step in (2, 10, 100):
        save(tmp_path, draft, optimizer, step, keep=2)
    assert [load_state(p).step for p in list_checkpoints(tmp_path)] == [10, 100]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000010", "step-00000100"]


def test_a_checkpoint_of_the_same_step_is_replaced(target: Target, tmp_path: Path) -> None:
    draft, optimizer = trained(target, steps=1)
    save(tmp_path, draft, optimizer)
    train_step(draft, optimizer, 5)
    require_equal(load_draft(save(tmp_path, draft, optimizer), draft.frozen), draft)
    assert len(list_checkpoints(tmp_path)) == 1


def test_a_partial_folder_is_never_listed_and_swept_by_the_next_save(
    target: Target, tmp_path: Path
) -> None:
    draft, optimizer = trained(target, steps=1)
    first = save(tmp_path, draft, optimizer, step=1)
    killed = tmp_path / ".step-00000002.123.partial"
    shutil.copytree(first, killed)
    empty = tmp_path / "step-00000009"
    empty.mkdir()
    assert list_checkpoints(tmp_path) == [first]
    second = save(tmp_path, draft, optimizer, step=2)
    assert list_checkpoints(tmp_path) == [first, second]
    assert not killed.exists()


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writing more than ``limit`` bytes into one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_leaves_earlier_checkpoints(
    target: Target, tmp_path: Path
) -> None:
    draft, optimizer = trained(target, steps=1)
    first = save(tmp_path, draft, optimizer, step=1)
    with file_size_limit(10_000), pytest.raises(CheckpointError, match="step-00000002"):
        save(tmp_path, draft, optimizer, step=2)
    assert list(tmp_path.iterdir()) == [first]
    require_equal(load_draft(first, draft.frozen), draft)


def test_a_failed_write_leaves_no_trace(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    draft, optimizer = trained(target, steps=1)
    first = save(tmp_path, draft, optimizer, step=1)
    monkeypatch.setattr(Fingerprint, "save", fail)
    with pytest.raises(CheckpointError, match="no space left"):
        save(tmp_path, draft, optimizer, step=2)
    assert list(tmp_path.iterdir()) == [first]


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "incomplete"])
def test_damage_is_an_error_that_names_the_file(
    target: Target, tmp_path: Path, name: str, damage: str
) -> None:
    path = save(tmp_path, *trained(target, steps=1))
    file = path / name
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 64)
    elif damage == "missing":
        file.unlink()
    else:
        tensors = load_file(file)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, file)
    with pytest.raises(CheckpointError, match=name):
        restore(path, target)


def test_tensors_of_another_shape_are_refused(target: Target, tmp_path: Path) -> None:
    path = save(tmp_path, *trained(target, steps=1))
    with pytest.raises(CheckpointError, match=r"draft\.safetensors"):
        load_draft_tensors(path, tiny_draft(target, head_rank=4))


def test_find_checkpoint_gives_the_newest_or_the_named(target: Target, tmp_path: Path) -> None:
    draft, optimizer = trained(target, steps=1)
    first = save(tmp_path / "checkpoints", draft, optimizer, step=1)
    second = save(tmp_path / "checkpoints", draft, optimizer, step=2)
    assert find_checkpoint(tmp_path, "last") == second
    assert find_checkpoint(tmp_path, str(first)) == first


def test_find_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint yet\n  fix: .*train"):
        find_checkpoint(tmp_path, "last")
    with pytest.raises(CheckpointError, match=r"elsewhere: no checkpoint \(state\.json"):
        find_checkpoint(tmp_path, str(tmp_path / "elsewhere"))
