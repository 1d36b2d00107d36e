"""The training loop, top to bottom: load a step, accumulate, clip, step, log, checkpoint."""

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from data.cache.read import CacheReader
from data.config import Decode
from data.errors import ConfigError
from data.files import sole_writer
from data.fingerprint import Fingerprint
from data.loader import StepLoader
from data.prefetch import WaitStats
from data.progress import Meter
from data.sampler import RowSampler
from train.config import PipelineConfig, to_plain
from train.errors import CheckpointError
from train.loop.checkpoint import (
    TrainState,
    list_checkpoints,
    load_draft_tensors,
    load_optimizer,
    load_state,
    save_checkpoint,
)
from train.loop.optim import lr_at, make_optimizer, set_lr, total_steps
from train.loop.reduce import sum_metrics
from train.loop.step import StepResult, accumulate_step
from train.loop.tracking import Figures, Tracker
from train.models.draft import Draft
from train.objective.metrics import summarise

log = logging.getLogger(__name__)

_MAX_SKIPPED_IN_A_ROW = 5
# Groups that decide the weights; the others may change between a run and its continuation.
_FREE_KEYS = ("target.path", "optim.rows_per_micro_batch")
_FIXED_GROUPS = ("target", "draft", "objective", "optim")


@dataclass(frozen=True)
class FitSummary:
    """How training ended."""

    steps: int
    steps_done_now: int
    skipped: int
    seconds: float
    checkpoint: Path
    figures: Figures


def fit(
    draft: Draft,
    reader: CacheReader,
    config: PipelineConfig,
    fingerprint: Fingerprint,
    accelerator: Accelerator,
    accepted: Callable[[], None] = lambda: None,
) -> FitSummary:
    """Trains until the last step; goes on from the newest checkpoint of the run folder.

    ``accepted`` is called on the main rank once checkpoint and configuration are found to fit.

    Raises:
        ConfigError: the batch cannot be shared by the ranks.
        CheckpointError: the checkpoint was made with another configuration, or steps keep failing.
    """
    optim = config.optim
    ranks = accelerator.num_processes
    if optim.rows_per_step % ranks:
        raise ConfigError(
            f"optim.rows_per_step={optim.rows_per_step}",
            f"cannot be shared evenly by {ranks} ranks",
            f"take a multiple of {ranks}",
        )
    end = total_steps(len(reader), optim)
    folder = config.run_dir / "checkpoints"
    draft.to(accelerator.device).train()
    optimizer = make_optimizer(draft.parameters(), optim)
    first = _resume(folder, draft, optimizer, config, fingerprint)
    if accelerator.is_main_process:
        accepted()
    model, optimizer = accelerator.prepare(draft, optimizer)
    loader = StepLoader(
        reader,
        RowSampler(len(reader), config.run.seed),
        optim.rows_per_step,
        optim.rows_per_micro_batch,
        accelerator.process_index,
        ranks,
        config.cache.prefetch_bytes,
        config.cache.prefetch_threads,
        config.cache.decode is Decode.loader,
    )
    guard = StepGuard(optimizer)
    clock = _Clock(first, loader.stats)
    figures: Figures = {}
    main_rank = accelerator.is_main_process
    run = config.run
    with (
        sole_writer(folder) if main_rank else contextlib.nullcontext(),
        Tracker(config.run_dir, run.name, run.wandb, to_plain(config), first, main_rank) as tracker,
        Meter("train", end, "steps", done=first) as meter,
    ):
        for step, loaded in enumerate(loader.steps(first, end), first):
            rate = lr_at(step, end, optim.lr, optim.warmup_ratio)
            set_lr(optimizer, rate)
            result = accumulate_step(
                model,
                loaded.heads,
                loaded.batches,
                config.objective,
                run.seed,
                accelerator,
            )
            norm = float(accelerator.clip_grad_norm_(model.parameters(), optim.clip))
            guard.step(norm, step, [row for rows in loader.rows_of(step) for row, _ in rows])
            done = step + 1
            if done % run.log_every == 0 or done in (1, end):
                figures = _figures(result, accelerator, config) | clock.figures(done)
                figures |= {"lr": rate, "grad_norm": norm, "steps_skipped": guard.skipped}
                tracker.log(done, figures)
            meter.add(1, _note(figures))
            if done % run.checkpoint_every == 0 or done == end:
                _save(folder, draft, optimizer, done, config, fingerprint, accelerator)
    checkpoint = list_checkpoints(folder)[-1]
    return FitSummary(end, end - first, guard.skipped, clock.elapsed_s, checkpoint, figures)


class StepGuard:
    """Steps the optimizer unless the gradient is not finite; ends the run when that persists."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.skipped = 0
        self._in_a_row = 0

    def step(self, grad_norm: float, step: int, rows: list[int]) -> None:
        """Steps or skips, and clears the gradient.

        Raises:
            CheckpointError: too many steps in a row were skipped.
        """
        if math.isfinite(grad_norm):
            self._optimizer.step()
            self._in_a_row = 0
        else:
            self.skipped += 1
            self._in_a_row += 1
            log.warning("step %d skipped: gradient not finite (rows %s of the cache)", step, rows)
        self._optimizer.zero_grad(set_to_none=True)
        if self._in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise CheckpointError(
                f"{self._in_a_row} steps in a row had a gradient that is not finite\n"
                "  fix: lower optim.lr, or check the cache with 'dspark cache mode=verify'"
            )


class _Clock:
    """Splits the time of the loop into waiting for data and the rest."""

    def __init__(self, first_step: int, stats: WaitStats) -> None:
        self._first, self._stats = first_step, stats
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def figures(self, done: int) -> Figures:
        seconds = self.elapsed_s
        return {
            "steps_per_s": (done - self._first) / seconds,
            "data_wait_share": self._stats.wait_s / seconds,
            "data_gb_per_s": self._stats.bytes / seconds / 1e9,
        }


def _save(
    folder: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    step: int,
    config: PipelineConfig,
    fingerprint: Fingerprint,
    accelerator: Accelerator,
) -> None:
    if accelerator.is_main_process:
        state = TrainState(step, _fixed_config(config))
        save_checkpoint(folder, draft, optimizer, state, fingerprint, config.run.keep_checkpoints)
    accelerator.wait_for_everyone()


def _resume(
    folder: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    config: PipelineConfig,
    fingerprint: Fingerprint,
) -> int:
    """Restores the newest checkpoint, if there is one; returns the steps it has done."""
    found = list_checkpoints(folder)
    if not found:
        return 0
    state = load_state(found[-1])
    _require_same_config(state.config, _fixed_config(config), config.run.allow_change, found[-1])
    fingerprint.require_match(
        Fingerprint.load(found[-1] / "fingerprint.json"),
        "this run",
        str(found[-1]),
        config.run.allow_mismatch,
    )
    load_draft_tensors(found[-1], draft)
    load_optimizer(found[-1], draft, optimizer)
    log.info("going on from %s", found[-1])
    return state.step


def _fixed_config(config: PipelineConfig) -> dict[str, Any]:
    plain = to_plain(config)
    flat = {f"{g}.{k}": v for g in _FIXED_GROUPS for k, v in plain[g].items()}
    flat |= {f"run.{k}": plain["run"][k] for k in ("seed", "precision")}
    flat["cache.max_length"] = plain["cache"]["max_length"]
    # A path names the target, the fingerprint says what it is; micro-batches change no result.
    return {k: v for k, v in flat.items() if k not in _FREE_KEYS}


def _require_same_config(
    stored: dict[str, Any], current: dict[str, Any], allow: list[str], path: Path
) -> None:
    keys = sorted(k for k in stored.keys() | current.keys() if stored.get(k) != current.get(k))
    refused = [k for k in keys if k not in allow]
    if refused:
        lines = "\n".join(f"  {k}: was {stored.get(k)}, is {current.get(k)}" for k in refused)
        raise CheckpointError(
            f"{path} was trained with another configuration:\n{lines}\n  fix: give another "
            f"run.name, or accept it with 'run.allow_change=[{','.join(refused)}]'"
        )


def _figures(result: StepResult, accelerator: Accelerator, config: PipelineConfig) -> Figures:
    totals = sum_metrics(accelerator, result.sums)
    weight = max(float(totals["weight_sum"]), 1e-9)
    objective = config.objective
    ce, l1 = float(totals["ce_sum"]) / weight, float(totals["l1_sum"]) / weight
    confidence = float(totals["confidence_sum"]) / weight
    loss = (
        objective.ce_weight * ce
        + objective.l1_weight * l1
        + objective.confidence_weight * confidence
    )
    losses: Figures = {"loss": loss, "ce": ce, "l1": l1, "confidence_bce": confidence}
    return losses | summarise(totals)


def _note(figures: Figures) -> str:
    if "loss" not in figures:
        return ""
    tau = figures.get("tau_teacher_forced", float("nan"))
    return f"loss {figures['loss']:.3f}, tau (teacher-forced) {tau:.2f}"
