"""Checkpoints: safetensors and JSON only, complete or absent, newest few kept."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import atomic_folder
from data.fingerprint import Fingerprint
from data.target import FrozenHead
from train.errors import CheckpointError
from train.models.draft import Draft, DraftShape

_PREFIX = "step-"
_DELETE = "delete that folder; the run goes on from the checkpoint before it"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


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
    final = folder / f"{_PREFIX}{state.step:08d}"
    try:
        with atomic_folder(final) as partial:
            save_file(_cpu(draft.state_dict()), partial / "draft.safetensors", {"format": "pt"})
            save_file(_optimizer_tensors(draft, optimizer), partial / "optimizer.safetensors")
            (partial / "shape.json").write_text(draft.shape.to_json())
            fingerprint.save(partial / "fingerprint.json")
            text = json.dumps({"step": state.step, "config": state.config}, indent=1)
            (partial / "state.json").write_text(text + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{final}: could not be written ({error})\n  fix: make room; earlier checkpoints stay"
        ) from error
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
    """Step and configuration of a checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        value = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return TrainState(int(value["step"]), value["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / 'state.json'}: damaged ({error!r})\n  fix: {_DELETE}"
        ) from error


def load_shape(path: Path) -> DraftShape:
    """Shape of a checkpoint's draft.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return DraftShape.from_json((path / "shape.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / 'shape.json'}: damaged ({error!r})\n  fix: {_DELETE}"
        ) from error


def load_draft(path: Path, frozen: FrozenHead) -> Draft:
    """The draft of a checkpoint, fp32, on the CPU.

    Raises:
        CheckpointError: the tensors are damaged or do not fit the recorded shape.
    """
    draft = Draft(load_shape(path), frozen)
    load_draft_tensors(path, draft)
    return draft


def load_draft_tensors(path: Path, draft: Draft) -> None:
    """Loads a checkpoint's tensors into a draft of the same shape."""
    try:
        draft.load_state_dict(load_file(path / "draft.safetensors"))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path / 'draft.safetensors'}: {error}\n  fix: {_DELETE}") from error


def load_optimizer(path: Path, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
    """Restores the moments, bit for bit.

    Raises:
        CheckpointError: damaged, or of another set of parameters.
    """
    try:
        tensors = load_file(path / "optimizer.safetensors")
        state: dict[int, dict[str, Tensor]] = {}
        for i, (name, _) in enumerate(draft.named_parameters()):
            state[i] = {field: tensors[f"{name}:{field}"] for field in _MOMENTS}
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path / 'optimizer.safetensors'}: {error}") from error
    current = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _optimizer_tensors(draft: Draft, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    tensors = {}
    for i, (name, parameter) in enumerate(draft.named_parameters()):
        # A parameter that no term trains has no moments yet: they are zeros.
        zeros = torch.zeros_like(parameter)
        fresh = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        for field, value in state.get(i, fresh).items():
            tensors[f"{name}:{field}"] = value.detach().cpu().contiguous()
    return tensors


def _cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
