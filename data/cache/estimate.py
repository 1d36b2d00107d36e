"""What a cache would cost, before it is built: bytes, hours, and the fidelity of each codec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numcodecs.zstd import compress
from rich.table import Table

from data.batch import Row
from data.cache.fidelity import (
    Figures,
    Probe,
    last_figures,
    make_codec,
    take_probe,
    tap_figures,
    topk_figures,
)
from data.cache.format import (
    Header,
    array_specs,
    raw_token_bytes,
    token_bytes,
)
from data.cache.metadata import ZSTD_LEVEL
from data.cache.start import RowIndex, make_plan, new_header
from data.cache.store import Store
from data.config import CacheConfig, Codec
from data.target import Target

_ALTERNATIVES: tuple[tuple[Codec, Codec | None, int], ...] = (
    (Codec.bf16, Codec.bf16, 0),
    (Codec.bf16_zstd, Codec.bf16_zstd, 0),
    (Codec.int8_h64, Codec.bf16, 0),
    (Codec.int8_h64, Codec.int8_out32, 0),
    (Codec.int8_h64, Codec.int8_h64_out8, 0),
    (Codec.int6_h64, Codec.int8_h64_out8, 0),
    (Codec.nf4_h64, Codec.int8_h64_out8, 0),
    (Codec.int4_h64, Codec.int8_h64_out8, 0),
    (Codec.int4_h64, None, 64),
)


# Tap error: mean relative L2 of a token over the tapped layers; then without the four largest
# channels. Law: mean total variation and top-1 agreement against the exact last state.
_COLUMNS = (
    "taps", "last state", "B/token", "of raw", "GB", "fits", "tap err", "w/o 4", "law TV", "top-1",
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One way to store the states, and its price.

    Attributes:
        token_bytes: of one token, ids and mask included; compression as measured.
        total_bytes: of the whole cache.
        of_raw: share of the plain bf16 states.
        figures: see `data.cache.fidelity`.
        asked: whether the configuration asks for it.
    """

    taps: Codec
    last: Codec | None
    topk: int
    token_bytes: float
    total_bytes: float
    of_raw: float
    figures: dict[str, Figures]
    asked: bool


@dataclass(frozen=True)
class Estimate:
    """What was found.

    Attributes:
        rows, tokens: of the corpus.
        stored_tokens: tokens that shared prefixes would leave to store.
        hours: of the target's passes in one process like this one.
        free_bytes: room; None when nothing is known of it.
    """

    rows: int
    tokens: int
    stored_tokens: int
    tokens_per_s: float
    hours: float
    free_bytes: int | None
    choices: tuple[Choice, ...]


def estimate_cache(
    target: Target, rows: Sequence[Row], config: CacheConfig, store: Store
) -> Estimate:
    """Measures on some rows; counts all of them."""
    index = RowIndex(rows)
    probe = take_probe(target, rows, config.fidelity_tokens)
    shared = replace(config, share_prefix=True)
    header = new_header(target, index, shared)
    plan = make_plan(header, index, range(len(rows)), shared, 0)
    tokens = int(index.lengths.sum())
    stored = plan.stored_tokens if config.share_prefix else tokens
    asked = (config.taps_codec, config.last_codec, config.topk)
    measured = _Measured(target, probe)
    choices = []
    for taps, last, topk in dict.fromkeys((asked, *_ALTERNATIVES)):
        chosen = replace(config, taps=taps.value, last=last.value if last else None, topk=topk)
        header = new_header(target, index, chosen)
        size = measured.token_bytes(header)
        raw = raw_token_bytes(len(header.tap_layers), header.hidden_size)
        figures = measured.figures(chosen)
        choices.append(
            Choice(taps, last, topk, size, size * stored, size / raw, figures,
                   (taps, last, topk) == asked)
        )  # fmt: skip
    hours = tokens / probe.tokens_per_s / 3600
    return Estimate(
        len(rows),
        tokens,
        plan.stored_tokens,
        probe.tokens_per_s,
        hours,
        store.free_bytes(),
        tuple(choices),
    )


def estimate_table(estimate: Estimate) -> Table:
    """The choices as a table for people."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True)
    free = estimate.free_bytes
    for choice in estimate.choices:
        taps, last = choice.figures.get("hidden", {}), choice.figures.get("last_hidden", {})
        law = choice.last.value if choice.last else ""
        law += f" top-{choice.topk}" if choice.topk else ""
        tv, top1 = _percent(last.get("mean_tv", 0.0)), _percent(last.get("top1", 1.0))
        if (kept := choice.figures.get("topk")) is not None and not choice.last:
            tv, top1 = f"keeps {_percent(kept['mass'])}", _percent(1.0)
        table.add_row(
            choice.taps.value,
            law.strip(),
            f"{choice.token_bytes:,.0f}",
            f"{choice.of_raw:.3f}",
            f"{choice.total_bytes / 1e9:,.2f}",
            "?" if free is None else "yes" if choice.total_bytes <= free else "NO",
            _percent(_mean(taps.get("rel_l2", 0.0))),
            _percent(_mean(taps.get("rel_l2_without_4_largest", 0.0))),
            tv,
            top1,
            style="bold" if choice.asked else "",
        )
    return table


class _Measured:
    """Figures of codecs on a probe, each measured once."""

    def __init__(self, target: Target, probe: Probe) -> None:
        self._target, self._probe = target, probe
        self._found: dict[tuple[str, object], Figures] = {}
        self._ratios: dict[str, float] = {}

    def figures(self, config: CacheConfig) -> dict[str, Figures]:
        """As `fidelity.measure_choice`, exact codecs left out."""
        probe, found = self._probe, {}
        taps = make_codec(config.taps_codec, probe.taps)
        if taps.lossy:
            found["hidden"] = self._once("hidden", taps.kind, lambda: tap_figures(probe, taps))
        if (kind := config.last_codec) is not None:
            last = make_codec(kind, probe.last)
            if last.lossy:
                found["last_hidden"] = self._once(
                    "last_hidden", kind, lambda: last_figures(self._target, probe, last)
                )
        if config.topk:
            found["topk"] = self._once(
                "topk", config.topk, lambda: topk_figures(self._target, probe, config.topk)
            )
        return found

    def token_bytes(self, header: Header) -> float:
        """Bytes of a token, compressed arrays as much smaller as the probe's are."""
        total = float(token_bytes(header))
        states = {"hidden": self._probe.taps, "last_hidden": self._probe.last}
        for spec in array_specs(header):
            if spec.compression is not None:
                if spec.name not in self._ratios:
                    bits = states[spec.name].view(torch.int16).numpy()
                    chunk = bits[: header.chunk_tokens].tobytes()
                    self._ratios[spec.name] = len(compress(chunk, ZSTD_LEVEL)) / len(chunk)
                total -= spec.token_bytes * (1 - self._ratios[spec.name])
        return total

    def _once(self, name: str, choice: object, measure: Callable[[], Figures]) -> Figures:
        key = (name, choice)
        if key not in self._found:
            self._found[key] = measure()
        return self._found[key]


def _mean(value: object) -> float:
    return float(np.mean(np.asarray(value, dtype=np.float64)))


def _percent(value: object) -> str:
    return "exact" if value in (0.0, 0) else f"{float(str(value)):.2%}"
