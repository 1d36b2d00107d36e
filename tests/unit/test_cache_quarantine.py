"""States that cannot be used: their rows are left out and listed, and nothing else is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batch import Row
from data.cache.read import CacheReader
from data.cache.store import LocalStore
from data.cache.verify import describe_cache, verify_cache
from data.target import Target, TargetOutput
from tests.support.builders import many_rows
from tests.support.caches import (
    all_values,
    at_pass,
    ignore_fsync,
    interrupt,
    manifest_of,
    small_build,
)
from tests.support.tiny import random_rows, tiny_target

REASON = "states that are not finite, or too large for the codec"
ROWS = many_rows(10, seed=21)
LOSSY = {"taps": "int8-h64-g64", "last": "int8-h64-g64"}
# In fp16 a scale reaches 65504, and there are 127 levels: the largest state is 8.3 million.
TOO_LARGE = 1e8


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ignore_fsync(patch)
        yield


@pytest.fixture
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def poison(target: Target, where: str, value: float, tokens: Sequence[tuple[int, ...]]) -> None:
    """Sets one state of every batch row that begins with some tokens, at the last of them."""
    forward = target.forward

    def poisoned(token_ids: torch.Tensor, cache: Any = None) -> TargetOutput:
        output = forward(token_ids, cache)
        with torch.inference_mode():
            for b, ids in enumerate(token_ids.tolist()):
                for start in tokens:
                    if tuple(ids[: len(start)]) == start:
                        getattr(output, where)[b, len(start) - 1].view(-1)[5] = value
        return output

    target.forward = poisoned  # type: ignore[method-assign] # this one object's


def kept(folder: Path) -> list[list[int]]:
    reader = CacheReader(folder)
    return [reader[i].token_ids.tolist() for i in range(len(reader))]


def quarantine(folder: Path) -> list[Mapping[str, str]]:
    lines = (folder / "quarantine.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("where", "value"),
    [("last", torch.nan), ("last", -torch.inf), ("taps", torch.nan), ("taps", torch.inf)],
)
@pytest.mark.parametrize("options", [{}, LOSSY, {"taps": "bf16+zstd"}, {"last": None, "topk": 4}])
def test_row_without_usable_states_is_left_out_with_its_source(
    target: Target, tmp_path: Path, where: str, value: float, options: dict[str, Any]
) -> None:
    small_build(target, tmp_path / "sound", ROWS, **options)
    poison(target, where, value, [ROWS[6].token_ids])
    folder = tmp_path / "cache"
    manifest = small_build(target, folder, ROWS, **options).manifest
    assert manifest.skipped == ((ROWS[6].row_id, ROWS[6].source, REASON),)
    assert quarantine(folder) == [{"source": ROWS[6].source, "reason": REASON}]
    assert manifest.num_samples == len(ROWS) - 1
    assert manifest.num_tokens == sum(map(len, ROWS)) - len(ROWS[6])
    sound = all_values(tmp_path / "sound")
    assert all_values(folder) == sound[:6] + sound[7:]
    sample_ids = CacheReader(folder).samples.sample_ids.tolist()
    assert sample_ids == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert verify_cache(LocalStore(folder)).problems == ()
    assert describe_cache(LocalStore(folder))["skipped rows"] == "1"


@pytest.mark.parametrize("where", ["last", "taps"])
def test_states_that_are_too_large_for_a_codec_are_left_out_for_that_codec(
    target: Target, tmp_path: Path, where: str
) -> None:
    poison(target, where, TOO_LARGE, [ROWS[6].token_ids])
    exact = small_build(target, tmp_path / "exact", ROWS).manifest
    assert (exact.skipped, exact.num_samples) == ((), len(ROWS))
    assert not (tmp_path / "exact" / "quarantine.jsonl").exists()
    lossy = small_build(target, tmp_path / "lossy", ROWS, **LOSSY).manifest
    assert [source for _, source, _ in lossy.skipped] == [ROWS[6].source]


def test_several_rows_of_several_parts(target: Target, tmp_path: Path) -> None:
    bad = [3, 5, 9]
    poison(target, "last", torch.nan, [ROWS[i].token_ids for i in bad])
    manifest = small_build(target, tmp_path, ROWS).manifest
    assert manifest.num_parts >= 4
    assert [source for _, source, _ in manifest.skipped] == [ROWS[i].source for i in bad]
    assert kept(tmp_path) == [list(r.token_ids) for i, r in enumerate(ROWS) if i not in bad]


def test_cache_of_unusable_rows_only_is_empty(target: Target, tmp_path: Path) -> None:
    poison(target, "taps", torch.inf, [row.token_ids for row in ROWS])
    manifest = small_build(target, tmp_path, ROWS).manifest
    assert (manifest.num_samples, manifest.num_tokens) == (0, 0)
    assert len(manifest.skipped) == len(ROWS)
    assert kept(tmp_path) == []
    assert verify_cache(LocalStore(tmp_path)).problems == ()


def test_unusable_row_among_the_first_does_not_spoil_the_measured_fidelity(
    target: Target, tmp_path: Path
) -> None:
    limits = {"max_tap_error": 0.1, "max_last_tv": 0.05, "taps": "int8-h64-g64-out8"}
    poison(target, "taps", torch.nan, [ROWS[1].token_ids])
    manifest = small_build(target, tmp_path, ROWS, **limits, last="int8-g64-out32").manifest
    assert [source for _, source, _ in manifest.skipped] == [ROWS[1].source]
    figures = CacheReader(tmp_path).header.fidelity
    assert 0 < max(figures["hidden"]["rel_l2"]) < 0.1


TRUNK = random_rows([(20, 0)], seed=3)[0].token_ids
BRANCH = TRUNK + random_rows([(8, 0)], seed=4)[0].token_ids
TAILS = random_rows([(4, 5)] * 9, seed=5)
# Three rows from the trunk, three from the branch on it, three by themselves.
FAMILY = [
    Row.of(start + tail.token_ids[:4], tail.token_ids[4:], source=f"family.jsonl:{i}")
    for i, (start, tail) in enumerate(zip([TRUNK, BRANCH, ()] * 3, TAILS, strict=True))
]
SHARED = {"share_prefix": True, "share_prefix_min": 4}


@pytest.mark.parametrize(
    ("piece", "unusable"),
    [
        (TRUNK, [0, 1, 3, 4, 6, 7]),
        (BRANCH[len(TRUNK) :], [1, 4, 7]),
        (FAMILY[3].token_ids[len(TRUNK) :], [3]),
        (FAMILY[5].token_ids, [5]),
    ],
)
def test_unusable_prefix_takes_all_rows_that_pass_it(
    target: Target, tmp_path: Path, piece: tuple[int, ...], unusable: list[int]
) -> None:
    small_build(target, tmp_path / "sound", FAMILY, **SHARED)
    poison(target, "last", torch.nan, [piece])
    folder = tmp_path / "cache"
    manifest = small_build(target, folder, FAMILY, **SHARED).manifest
    expected = [(FAMILY[i].row_id, FAMILY[i].source, REASON) for i in unusable]
    assert manifest.skipped == tuple(expected)
    assert [line["source"] for line in quarantine(folder)] == [s for _, s, _ in expected]
    sound = all_values(tmp_path / "sound")
    assert all_values(folder) == [row for i, row in enumerate(sound) if i not in unusable]
    assert verify_cache(LocalStore(folder)).problems == ()


def test_row_is_used_again_when_its_part_was_built_again_without_a_fault(
    target: Target, tmp_path: Path
) -> None:
    forward = target.forward
    poison(target, "last", torch.nan, [ROWS[4].token_ids])
    small_build(target, tmp_path, ROWS)
    target.forward = forward  # type: ignore[method-assign]
    for record in (tmp_path / "commits").iterdir():
        if ROWS[4].source in record.read_text():
            record.unlink()
    assert small_build(target, tmp_path, ROWS).parts_built == 1
    assert kept(tmp_path) == [list(row.token_ids) for row in ROWS]
    assert manifest_of(tmp_path).skipped == ()
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_quarantine_outlives_interruption_and_growth(target: Target, tmp_path: Path) -> None:
    forward = target.forward
    poison(target, "last", torch.nan, [ROWS[4].token_ids])
    small_build(target, tmp_path, ROWS)
    (tmp_path / "manifest.json").unlink()  # as if it had been killed at its end
    target.forward = forward  # type: ignore[method-assign]
    small_build(target, tmp_path, ROWS)
    assert manifest_of(tmp_path).skipped == ((ROWS[4].row_id, ROWS[4].source, REASON),)
    new = many_rows(5, seed=22)
    poison(target, "last", torch.nan, [new[3].token_ids])
    with at_pass(target, 1, interrupt), pytest.raises(KeyboardInterrupt):
        small_build(target, tmp_path, [*ROWS, *new], add_rows=True)
    assert len(kept(tmp_path)) == len(ROWS) - 1
    manifest = small_build(target, tmp_path, [*ROWS, *new], add_rows=True).manifest
    assert [i for i, _, _ in manifest.skipped] == [ROWS[4].row_id, new[3].row_id]
    assert [line["source"] for line in quarantine(tmp_path)] == [ROWS[4].source, new[3].source]
    expected = [*ROWS[:4], *ROWS[5:], *new[:3], *new[4:]]
    assert kept(tmp_path) == [list(row.token_ids) for row in expected]
