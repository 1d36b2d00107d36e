"""What a codec costs on the actual target: measured before a build, stored, and limited.

Figures of other models cannot be trusted: every target has its own massive channels.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.batch import Row
from data.cache.codecs import StateCodec, needs_outliers
from data.cache.format import LAST, TAPS
from data.config import CacheConfig, Codec
from data.errors import CacheError
from data.target import Target

# Channels that hold most of the energy and so hide the error of all others.
_MASSIVE = 4
_ROWS = 256
Figures = dict[str, object]


@dataclass(frozen=True)
class Probe:
    """Exact states of some rows.

    Attributes:
        taps: bf16 ``[n, M, D]``.
        last: bf16 ``[n, D]``.
        answers: positions whose next token the target would generate, bool ``[n]``.
        seconds: of the target's passes.
    """

    taps: Tensor
    last: Tensor
    answers: Tensor
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Speed of the target's passes."""
        return len(self.last) / max(self.seconds, 1e-9)


def take_probe(target: Target, rows: Iterable[Row], tokens: int) -> Probe:
    """Runs the target over the first rows, up to a number of tokens.

    The first pass is not timed: it warms the machine up. Tokens whose states are not finite are
    left out: their rows will be.
    """
    taps, last, answers = [], [], []
    seconds, left = 0.0, tokens
    for i, row in enumerate(rows):
        n = min(len(row), left)
        if n == 0:
            break
        ids = torch.tensor([row.token_ids[:n]])
        if i == 0:
            target.forward(ids)
        start = time.perf_counter()
        output = target.forward(ids)
        # The copy waits for the device.
        taps.append(output.taps[0].to(torch.bfloat16).cpu())
        last.append(output.last[0].to(torch.bfloat16).cpu())
        seconds += time.perf_counter() - start
        answers.append(torch.tensor([*row.loss_mask[1:], False][:n]))
        left -= n
    states = torch.cat(taps), torch.cat(last)
    usable = states[0].isfinite().flatten(1).all(1) & states[1].isfinite().all(1)
    if not usable.any():
        usable[:] = True
    return Probe(states[0][usable], states[1][usable], torch.cat(answers)[usable], seconds)


def make_codec(kind: Codec, states: Tensor) -> StateCodec:
    """A codec for states like these; what it keeps exact is chosen on them.

    Args:
        kind: the codec.
        states: ``[n, *lead, D]``.
    """
    count = min(needs_outliers(kind), states.shape[-1])
    ids = StateCodec.choose_outliers(states, count) if count else None
    return StateCodec(kind, states.shape[-1], tuple(states.shape[1:-1]), ids)


def tap_figures(probe: Probe, codec: StateCodec) -> Figures:
    """Mean relative L2 error of a token by layer, with and without the largest channels."""
    exact = probe.taps.float()
    stored = codec.decode(codec.encode(probe.taps)).float()
    largest = exact.square().sum(0).topk(min(_MASSIVE, exact.shape[-1]), dim=-1).indices
    rest = torch.ones_like(exact[0]).scatter_(-1, largest, 0.0)
    return {
        "codec": codec.kind.value,
        "rel_l2": _relative(exact, stored),
        "rel_l2_without_4_largest": _relative(exact * rest, stored * rest),
    }


@torch.inference_mode()
def last_figures(target: Target, probe: Probe, codec: StateCodec) -> Figures:
    """Total variation and top-1 agreement of the laws of exact and stored last state, where the
    target would generate.
    """
    chosen = probe.last[probe.answers] if probe.answers.any() else probe.last
    tv, same = 0.0, 0
    for exact in chosen.split(_ROWS):
        stored = codec.decode(codec.encode(exact), exact.dtype)
        own, ours = (_logits(target, s) for s in (exact, stored))
        tv += float((own.softmax(-1) - ours.softmax(-1)).abs().sum()) / 2
        same += int((own.argmax(-1) == ours.argmax(-1)).sum())
    n = len(chosen)
    return {"codec": codec.kind.value, "mean_tv": tv / n, "top1": same / n, "tokens": n}


@torch.inference_mode()
def topk_figures(target: Target, probe: Probe, k: int) -> Figures:
    """Probability that the kept tokens hold, where the target would generate."""
    chosen = probe.last[probe.answers] if probe.answers.any() else probe.last
    k = min(k, target.text_config.vocab_size)
    mass = torch.cat(
        [_logits(target, s).softmax(-1).topk(k).values.sum(-1).cpu() for s in chosen.split(_ROWS)]
    )
    low = float(np.percentile(mass.numpy(), 5))
    return {"k": k, "mass": float(mass.mean()), "mass_p5": low, "tokens": len(chosen)}


def measure_choice(target: Target, probe: Probe, config: CacheConfig) -> dict[str, Figures]:
    """The figures of the codecs that a configuration chooses; exact ones cost nothing."""
    found: dict[str, Figures] = {}
    taps = make_codec(config.taps_codec, probe.taps)
    if taps.lossy:
        found[TAPS] = tap_figures(probe, taps)
    kind = config.last_codec
    if kind is not None and (last := make_codec(kind, probe.last)).lossy:
        found[LAST] = last_figures(target, probe, last)
    if config.topk:
        found["topk"] = topk_figures(target, probe, config.topk)
    return found


def require_fidelity(figures: dict[str, Figures], config: CacheConfig) -> None:
    """Refuses codecs that cost too much on this target.

    Raises:
        CacheError: names figure, limit and the choices.
    """
    if (found := figures.get(TAPS)) is not None:
        errors = found["rel_l2"]
        worst = float(np.max(errors)) if isinstance(errors, list) else float("nan")  # NaN counts
        if not worst <= config.max_tap_error:
            raise CacheError(
                f"cache.taps={config.taps}: mean relative error {worst:.1%} in the worst "
                f"tapped layer of this target, above cache.max_tap_error={config.max_tap_error}\n"
                "  fix: take a finer codec ('dspark cache mode=estimate' lists them with their "
                "errors), or raise the limit"
            )
    if (found := figures.get(LAST)) is not None:
        tv = found["mean_tv"]
        if not (isinstance(tv, float) and tv <= config.max_last_tv):
            raise CacheError(
                f"cache.last={config.last}: the laws computed from "
                f"it differ by a mean total variation of {tv} on this target, above "
                f"cache.max_last_tv={config.max_last_tv}\n  fix: take a finer codec "
                "('dspark cache mode=estimate' lists them with their errors), or raise the limit"
            )


def _relative(exact: Tensor, stored: Tensor) -> list[float]:
    error = (stored - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-12)
    return [float(e) for e in error.mean(0)]


def _logits(target: Target, states: Tensor) -> Tensor:
    """Logits in fp32: the rounding of bf16 logits alone differs by more than int8 states do."""
    return target.logits_fp32(states.to(target.device))
