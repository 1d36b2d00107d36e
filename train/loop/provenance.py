"""What made a run: code version, library versions, machine, resolved configuration."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.files import write_atomic
from train.config import PipelineConfig, to_plain

_PACKAGES = ("torch", "transformers", "accelerate", "zarr", "numpy", "safetensors", "hydra-core")


def record_run(config: PipelineConfig, verb: str) -> None:
    """Writes ``config/<verb>.yaml`` and ``provenance/<verb>.json`` into the run folder.

    Environment variables and the command line's values are not recorded: they may hold secrets.
    """
    for name in ("config", "provenance"):
        (config.run_dir / name).mkdir(parents=True, exist_ok=True)
    plain = to_plain(config)
    write_atomic(config.run_dir / "config" / f"{verb}.yaml", OmegaConf.to_yaml(plain))
    record = json.dumps(describe_environment(), indent=1) + "\n"
    write_atomic(config.run_dir / "provenance" / f"{verb}.json", record)


def describe_environment() -> dict[str, Any]:
    """Versions and machine, as plain JSON values."""
    return {
        "git": _git(),
        "packages": {name: version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def _git() -> dict[str, str | bool] | None:
    """Commit and whether files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        commit = _run(["git", "-C", str(root), "rev-parse", "HEAD"])
        changed = _run(["git", "-C", str(root), "status", "--porcelain"])
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.strip()
