"""Runs all stages of an experiment, one process a stage, and times them.

    python scripts/demo.py [demo|smoke] [key=value ...]

demo: a real target (fetched on first use), a quarter of an hour on two cores. smoke: a tiny random
target, one minute. Started again after a stop, every stage goes on where it stopped.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
TARGETS = {"demo": "fetch_demo_target.py", "smoke": "make_tiny_target.py"}
VERBS = ("regenerate", "cache", "train", "evaluate", "export")


def main() -> None:
    """Runs the stages in order; stops at the first that fails."""
    arguments = sys.argv[1:]
    experiment = arguments[0] if arguments and "=" not in arguments[0] else "demo"
    overrides = [a for a in arguments if "=" in a]
    if experiment not in TARGETS:
        sys.exit(f"unknown experiment {experiment}; there are {', '.join(TARGETS)}")
    seconds = {"target": run([str(SCRIPTS / TARGETS[experiment])])}
    for verb in VERBS:
        command = ["-m", "train.cli", verb, f"experiment={experiment}", *overrides]
        seconds[verb] = run(command)
    sys.stdout.write("\nwall time by stage\n")
    for stage, value in seconds.items():
        sys.stdout.write(f"  {stage:<11} {value:6.0f} s\n")
    sys.stdout.write(f"  {'all':<11} {sum(seconds.values()):6.0f} s\n")


def run(command: list[str]) -> float:
    """Runs one stage; returns its seconds."""
    sys.stdout.write(f"\n== {' '.join(command)}\n")
    sys.stdout.flush()
    start = time.monotonic()
    # The stages find the packages also when the project is not installed.
    path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    if result.returncode:
        sys.exit(result.returncode)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
