"""Run folders on the target of the smoke experiment."""

import json
from pathlib import Path

from tests.support.processes import dspark

SMOKE = "experiment=smoke"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepare(folder: Path, smoke: Path, *stages: str) -> None:
    """A fresh run folder on the same target, brought to a stage."""
    (folder / "outputs").mkdir(parents=True)
    (folder / "outputs" / "targets").symlink_to(smoke / "outputs" / "targets")
    for stage in stages:
        dspark(*stage.split(), cwd=folder)
