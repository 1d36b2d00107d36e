"""Checkpoints: safetensors and JSON only, complete or absent, newest few kept."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import fsync_dir, fsync_file
from data.fingerprint import Fingerprint
from data.target import FrozenHead
from train.errors import CheckpointError
from train.models.draft import Draft, DraftShape

_PREFIX = "step-"


@dataclass(frozen=True)
class TrainState:
    """What a run needs to go on, beside the tensors.

    Attributes:
        step: optimizer steps done.
        config: the configuration that was trained with, as plain JSON values.
    """

    step: int
    config: dict[str, Any]


def save_checkpoint(
    folder: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    fingerprint: Fingerprint,
    keep: int,
) -> Path:
    """Writes ``folder/step-N`` under a temporary name and renames it; drops the oldest ones."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{_PREFIX}{state.step:08d}"
    partial = folder / f".{final.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file(_cpu(draft.state_dict()), partial / "draft.safetensors", {"format": "pt"})
        save_file(_optimizer_tensors(draft, optimizer), partial / "optimizer.safetensors")
        (partial / "shape.json").write_text(draft.shape.to_json())
        fingerprint.save(partial / "fingerprint.json")
        text = json.dumps({"step": state.step, "config": state.config}, indent=1)
        (partial / "state.json").write_text(text + "\n")
        for path in partial.iterdir():
            fsync_file(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{final}: could not be written ({error})\n  fix: make room; earlier checkpoints stay"
        ) from error
    fsync_dir(folder)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    for stale in folder.glob(".*.partial"):
        shutil.rmtree(stale)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{_PREFIX}*") if (p / "state.json").is_file())


def find_checkpoint(run_dir: Path, name: str) -> Path:
    """``last`` of a run, or a checkpoint's folder.

    Raises:
        CheckpointError: there is none.
    """
    if name != "last":
        path = Path(name)
        if not (path / "state.json").is_file():
            raise CheckpointError(f"{path}: no checkpoint (state.json is missing)")
        return path
    found = list_checkpoints(run_dir / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{run_dir / 'checkpoints'}: no checkpoint yet\n  fix: run 'dspark train' with the "
            "same run.name first"
        )
    return found[-1]


def load_state(path: Path) -> TrainState:
    """Step and configuration of a checkpoint."""
    value = json.loads((path / "state.json").read_text())
    return TrainState(int(value["step"]), value["config"])


def load_draft(path: Path, frozen: FrozenHead) -> Draft:
    """The draft of a checkpoint, fp32, on the CPU.

    Raises:
        CheckpointError: the tensors are damaged or do not fit the recorded shape.
    """
    draft = Draft(DraftShape.from_json((path / "shape.json").read_text()), frozen)
    load_draft_tensors(path, draft)
    return draft


def load_draft_tensors(path: Path, draft: Draft) -> None:
    """Loads a checkpoint's tensors into a draft of the same shape."""
    try:
        draft.load_state_dict(load_file(path / "draft.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(
            f"{path / 'draft.safetensors'}: {error}\n  fix: delete that folder; the run goes on "
            "from the checkpoint before it"
        ) from error


def load_optimizer(path: Path, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
    """Restores the moments, bit for bit.

    Raises:
        CheckpointError: damaged, or of another set of parameters.
    """
    try:
        tensors = load_file(path / "optimizer.safetensors")
        state: dict[int, dict[str, Tensor]] = {}
        for i, (name, _) in enumerate(draft.named_parameters()):
            state[i] = {
                field: tensors[f"{name}:{field}"] for field in ("step", "exp_avg", "exp_avg_sq")
            }
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path / 'optimizer.safetensors'}: {error}") from error
    current = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _optimizer_tensors(draft: Draft, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = [name for name, _ in draft.named_parameters()]
    tensors = {}
    for i, entry in optimizer.state_dict()["state"].items():
        for field, value in entry.items():
            tensors[f"{names[i]}:{field}"] = value.detach().cpu().contiguous()
    return tensors


def _cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
