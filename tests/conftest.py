"""Fixtures that every kind of test shares."""

import os

# Before torch is imported anywhere: see data/machine.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shapes of the pure modules are checked on every call while testing.
CHECKED = [
    "train.objective.anchors",
    "train.objective.losses",
    "train.objective.metrics",
    "train.decode.verify",
    "train.models",
]
install_import_hook(CHECKED, "beartype.beartype")

# The first call into torch takes seconds, so a deadline would fail at random.
settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target (4 layers, width 64, bytes), written once."""
    from data.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The demo's target; fetched on first use."""
    from tests.support.processes import run_script

    folder = ROOT / "outputs" / "targets" / "smollm2-135m"
    if not (folder / "config.json").is_file():
        run_script("scripts/fetch_demo_target.py", cwd=ROOT)
    return folder
