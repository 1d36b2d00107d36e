"""Records the loss curve that tests/golden compares with.

python scripts/update_golden.py
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Trains the tiny draft for 20 steps and writes the curve."""
    sys.path.insert(0, str(ROOT))  # `tests` is not installed
    from data.machine import configure_process

    configure_process()
    from data.tiny import make_tiny_target  # imports torch
    from tests.golden.test_loss_curve import GOLDEN, record_curve

    with tempfile.TemporaryDirectory() as scratch:
        curve = record_curve(make_tiny_target(Path(scratch) / "tiny"))
    GOLDEN.write_text(json.dumps(curve, indent=1) + "\n")
    sys.stdout.write(
        f"{GOLDEN.relative_to(ROOT)}: loss {curve['loss'][0]} to {curve['loss'][-1]}\n"
    )


if __name__ == "__main__":
    main()
