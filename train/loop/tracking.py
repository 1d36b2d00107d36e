"""Where figures go: JSON Lines always, Weights & Biases on request."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from data.corpus import read_jsonl
from data.files import write_atomic
from train.config import WandbMode

Figures = dict[str, float | list[float]]


class Tracker:
    """Writes one line per logged step to ``metrics.jsonl`` of the run folder.

    A resumed run drops the lines behind the step from which it goes on, so that every step has
    one line. Only the main rank writes.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        mode: WandbMode,
        config: dict[str, Any],
        first_step: int,
        is_main_rank: bool,
    ) -> None:
        self._file: TextIO | None = None
        self._wandb: Any = None
        if not is_main_rank:
            return
        path = run_dir / "metrics.jsonl"
        kept = []
        if path.exists():
            lines = read_jsonl(path, skip_torn=True)
            kept = [json.dumps(v) + "\n" for _, v in lines if v["step"] <= first_step]
        write_atomic(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")
        if mode is not WandbMode.disabled:
            import wandb  # takes a second, and is not needed otherwise

            self._wandb = wandb.init(
                project="dspark",
                name=name,
                id=name,
                resume="allow",
                dir=run_dir,
                mode=mode.value,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)

    def log(self, step: int, figures: Figures) -> None:
        """Records the figures of a step."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        if self._wandb is not None:
            flat: dict[str, float] = {}
            for name, value in figures.items():
                if isinstance(value, list):
                    flat |= {f"{name}/{i}": v for i, v in enumerate(value)}
                else:
                    flat[name] = value
            self._wandb.log(flat, step=step)
