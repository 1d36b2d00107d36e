"""What the tests of whole runs share."""

from pathlib import Path

import pytest

from tests.support.processes import run_script


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the smoke experiment has run."""
    folder = tmp_path_factory.mktemp("smoke")
    run_script("scripts/demo.py", "smoke", "run.wandb=offline", cwd=folder)
    return folder
