"""Writes the tiny random target of the smoke experiment.

python scripts/make_tiny_target.py [FOLDER]
"""

import sys
from pathlib import Path

from data.tiny import make_tiny_target

DEFAULT_FOLDER = Path("outputs/targets/tiny")


def main() -> None:
    """Writes the target unless it is there."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER
    if not (folder / "config.json").is_file():
        make_tiny_target(folder)
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
