"""Real processes: the command, scripts, several ranks, and SIGKILL at a moment of choice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


def environment(**more: str) -> dict[str, str]:
    """One thread a process: tests compare bits, and share two cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


def run_script(script: str, *arguments: str, cwd: Path) -> str:
    """Runs a script of the project; returns its output."""
    command = [sys.executable, str(ROOT / script), *arguments]
    return _run(command, cwd)


def dspark(
    *arguments: str,
    cwd: Path,
    expect: int = 0,
    env: Mapping[str, str] | None = None,
    **variables: str,
) -> str:
    """Runs the command in a folder; returns stdout and stderr together."""
    command = [sys.executable, "-m", "train.cli", *arguments]
    return _run(command, cwd, expect, {**(env or {}), **variables})


def torchrun(ranks: int, *arguments: str, cwd: Path) -> str:
    """Runs the command on several gloo ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launcher, *rendezvous, "-m", "train.cli", *arguments]
    return _run(command, cwd)


def kill_when(
    condition: Callable[[], bool], arguments: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S
) -> bool:
    """Starts the command and sends SIGKILL as soon as the condition holds.

    Returns whether it was killed; False means that it ended by itself before.
    """
    command = [sys.executable, "-m", "train.cli", *arguments]
    with (cwd / "killed.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment(PYTHONPATH=str(ROOT)), stdout=log, stderr=log
        )
        deadline = time.monotonic() + timeout_s
        while process.poll() is None:
            if condition():
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            if time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"nothing to kill within {timeout_s} s: {command}")
            time.sleep(0.01)
    if process.returncode:
        raise AssertionError((cwd / "killed.log").read_text()[-3000:])
    return False


def _run(command: list[str], cwd: Path, expect: int = 0, more: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment(PYTHONPATH=str(ROOT), **(more or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if result.returncode != expect:
        raise AssertionError(f"{command} ended with {result.returncode}:\n{result.stdout[-4000:]}")
    return result.stdout
