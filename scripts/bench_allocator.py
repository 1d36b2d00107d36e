"""What `data.machine.configure_process` buys on this machine: time of the objective on a CPU.

    python scripts/bench_allocator.py

Child processes alternate between glibc's defaults and our settings; medians of the rounds. The work
is the objective's forward and backward pass over 448 slots of a vocabulary of 49,152.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS, STEPS, SLOTS, VOCAB = 3, 8, 448, 49_152
# Any MALLOC_ variable counts as the user's own choice; this one is glibc's default anyway.
DEFAULTS = {"MALLOC_TOP_PAD_": "131072"}


def main() -> None:
    """Measures in child processes and prints the table."""
    if sys.argv[1:] == ["child"]:
        child()
        return
    root = str(Path(__file__).resolve().parents[1])
    results: dict[str, list[list[float]]] = {"glibc defaults": [], "ours": []}
    for _ in range(ROUNDS):
        for name, found in results.items():
            more = DEFAULTS if name == "glibc defaults" else {}
            output = subprocess.run(
                [sys.executable, __file__, "child"],
                env={**os.environ, "PYTHONPATH": root, **more},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            found.append([float(value) for value in output.split()])
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in results.items()
    }
    sys.stdout.write(f"{'':<15} wall s  user s  system s  (a step; medians of {ROUNDS})\n")
    for name, (wall, user, system) in medians.items():
        sys.stdout.write(f"{name:<15} {wall:6.3f}  {user:6.3f}  {system:8.3f}\n")
    ratio = medians["glibc defaults"][0] / medians["ours"][0]
    sys.stdout.write(f"wall time, defaults over ours: {ratio:.2f}\n")


def child() -> None:
    """Prints wall, user and system seconds of one step."""
    from data.machine import configure_process

    configure_process()
    import torch

    from train.objective.losses import TermWeights, objective

    torch.manual_seed(0)
    logits = torch.randn(SLOTS, VOCAB, requires_grad=True)
    target = torch.randn(SLOTS, VOCAB).softmax(-1)
    labels, weights = torch.randint(0, VOCAB, (SLOTS,)), torch.ones(SLOTS)
    confidence = torch.zeros(SLOTS, requires_grad=True)

    def step() -> None:
        terms = objective(
            logits, target, labels, weights, confidence, TermWeights(0.1, 0.9, 1.0), 1.0
        )
        terms.loss.backward()

    step()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(STEPS):
        step()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    figures = (wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)
    sys.stdout.write(" ".join(str(value / STEPS) for value in figures) + "\n")


if __name__ == "__main__":
    main()
