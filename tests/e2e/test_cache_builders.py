"""Builders that are killed, stopped, and work together: the cache is the same, bit for bit."""

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cache.build import build_cache
from data.cache.read import CacheReader
from data.errors import CacheError
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.builders import Builders, Order, many_rows, quick_config, running
from tests.support.caches import all_values, at_pass, ignore_fsync, interrupt, require_same
from tests.support.tiny import tiny_target

pytestmark = pytest.mark.slow

MANY, FEW, MORE, ONE = (400, 0), (8, 1), (4, 2), (3, 3)
KILLS = 50


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the builders do: another number, other last bits
    with pytest.MonkeyPatch.context() as patch:
        ignore_fsync(patch)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def builders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builders]:
    with running(tiny_folder, tmp_path_factory.mktemp("results")) as found:
        yield found


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def build(target: Target, folder: Path, *rows: tuple[int, int], **options: object) -> int:
    """Builds in this process; returns how many parts it added."""
    given = [row for order in rows for row in many_rows(*order)]
    config = quick_config(**options)
    return build_cache(target, given, config, folder, Fingerprint.of_target(target)).parts_built


@pytest.fixture(scope="module")
def many(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an undisturbed build makes of many rows."""
    folder = tmp_path_factory.mktemp("many")
    assert build(target, folder, MANY) > 80
    return folder


@pytest.fixture(scope="module")
def few(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    assert build(target, folder, FEW) == 2
    return folder


def test_killed_fifty_times_and_started_again_each_time(
    builders: Builders, many: Path, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    kills, ends = 0, []
    folder = tmp_path / "0"
    while kills < KILLS or folder.exists():
        # A whole build makes some 900 changes. The delay reaches from one change to the next.
        number, delay = int(generator.integers(0, 250)), float(generator.exponential(0.004))
        order = Order([MANY], {"claim_timeout_s": 1e6})
        if kills < KILLS:
            order = replace(order, strikes_at=number, delay_s=delay)
        outcome = builders.run(folder, order)
        kills += outcome.status == -signal.SIGKILL
        if outcome.status >= 0:  # it was done before it was struck
            assert outcome.error == ""
            require_same(folder, many)
            shutil.rmtree(folder)
            ends.append(kills)
            folder = tmp_path / str(len(ends))
    # Several caches were begun, and all but the last were killed several times.
    assert len(ends) >= 4
    assert min(np.diff([0, *ends])[:-1]) >= 2


def test_killed_before_every_single_change_to_the_store(
    builders: Builders, target: Target, few: Path, tmp_path: Path
) -> None:
    changes = builders.run(tmp_path / "whole", Order([FEW])).changes
    assert len(changes) > 50
    for number in range(len(changes)):
        folder = tmp_path / str(number)
        assert builders.run(folder, Order([FEW], strikes_at=number)).status == -signal.SIGKILL
        if (folder / "manifest.json").exists():
            assert all_values(folder) == all_values(few)
        else:
            with pytest.raises(CacheError, match=r"not finished|no cache"):
                CacheReader(folder)
        build(target, folder, FEW)
        require_same(folder, few)


def test_killed_while_rows_are_added_leaves_the_old_cache_readable(
    builders: Builders, target: Target, few: Path, tmp_path: Path
) -> None:
    order = Order([FEW, MORE], {"add_rows": True})
    whole = shutil.copytree(few, tmp_path / "whole")
    changes = builders.run(whole, order).changes
    old, new = all_values(few), all_values(whole)
    assert new[: len(old)] == old
    unreadable = []
    for number in range(0, len(changes), 2):
        folder = shutil.copytree(few, tmp_path / str(number))
        killed = Order(order.rows, order.options, strikes_at=number)
        assert builders.run(folder, killed).status == -signal.SIGKILL
        if (folder / "manifest.json").exists():
            assert all_values(folder) in (old, new)
        else:
            unreadable.append(number)
        build(target, folder, *order.rows, add_rows=True)
        require_same(folder, whole)
    # Only while the tables are written.
    tables = [i for i, name in enumerate(changes) if name.startswith("replace data.zarr/samples")]
    assert len(unreadable) <= len(tables) // 2 + 4


@pytest.mark.parametrize(
    "keys",
    [
        ["data.zarr/hidden/c.0.0.0", "plans/plan-00000000.npy", "fingerprint.json"],
        ["data.zarr/samples/start/c.0", "cache.json", "plans/labels-00000000.json"],
    ],
)
def test_killed_while_damage_is_mended(
    builders: Builders, few: Path, tmp_path: Path, keys: list[str]
) -> None:
    def damaged(name: str) -> Path:
        folder = shutil.copytree(few, tmp_path / name)
        for key in keys:
            content = bytearray((folder / key).read_bytes())
            content[len(content) // 2] ^= 1
            (folder / key).write_bytes(content)
        return folder

    whole = damaged("whole")
    changes = builders.run(whole, Order([FEW], mend=True)).changes
    require_same(whole, few)
    mending = changes.index("link claims/start.json")
    assert mending >= 4
    for number in range(mending):
        folder = damaged(str(number))
        killed = Order([FEW], mend=True, strikes_at=number)
        assert builders.run(folder, killed).status == -signal.SIGKILL
        assert builders.run(folder, Order([FEW], mend=True)).error == ""
        require_same(folder, few)


@pytest.mark.parametrize("count", [2, 3])
def test_several_build_one_cache(
    builders: Builders, many: Path, tmp_path: Path, count: int
) -> None:
    crowd = [builders.start(tmp_path, Order([MANY], pass_s=0.004)) for _ in range(count)]
    outcomes = [builder.wait() for builder in crowd]
    assert [o.error for o in outcomes] == [""] * count
    assert min(o.built for o in outcomes) > 0
    assert {sum(o.built for o in outcomes)} == {o.parts for o in outcomes}
    require_same(tmp_path, many)


def test_killed_one_loses_its_parts_to_the_others_at_once(
    builders: Builders, many: Path, tmp_path: Path
) -> None:
    order = Order([MANY], {"claim_timeout_s": 600.0}, pass_s=0.004)
    victim = builders.start(tmp_path, replace(order, strikes_at=150))
    others = [builders.start(tmp_path, order) for _ in range(2)]
    victim.wait_for(lambda: victim.state == "Z")
    assert list((tmp_path / "claims").glob("part-*.json"))
    assert [o.wait().error for o in others] == [""] * 2
    require_same(tmp_path, many)
    assert victim.wait().status == -signal.SIGKILL


STOPS = [
    "replace fingerprint.json",
    "link cache.json",
    "link plans/",
    "unlink claims/part-00000000.partial",
    "replace data.zarr/hidden/c.1",
    "replace data.zarr/loss_mask/c.1",
    "link commits/",
    "unlink claims/part-00000000.json",
    "unlink manifest.json",
    "replace data.zarr/samples/length",
    "replace manifest.json",
]


@pytest.mark.parametrize("moment", STOPS)
def test_stopped_one_loses_its_work_and_later_harms_nothing(
    builders: Builders, few: Path, tmp_path: Path, moment: str
) -> None:
    options = {"claim_timeout_s": 1.0}
    sleeper = builders.start(
        tmp_path, Order([FEW], options, strikes_on=moment, signal=signal.SIGSTOP)
    )
    sleeper.wait_for(lambda: sleeper.state == "T")
    start = time.monotonic()
    other = builders.run(tmp_path, Order([FEW], options))
    assert other.error == ""
    # Behind its commit nothing need be waited for.
    assert time.monotonic() - start > 1.0 or moment == "unlink claims/part-00000000.json"
    assert all_values(tmp_path) == all_values(few)
    sleeper.send(signal.SIGCONT)
    outcome = sleeper.wait()
    assert outcome.error == "" or outcome.error.startswith("CacheError: ")
    assert outcome.built + other.built <= other.parts
    require_same(tmp_path, few)


def test_stopped_one_does_not_write_over_what_another_has_committed(
    builders: Builders, target: Target, tmp_path: Path
) -> None:
    with at_pass(target, -1, interrupt) as passes:
        assert build(target, tmp_path / "expected", ONE) == 1
    folder, options = tmp_path / "cache", {"claim_timeout_s": 1.0}
    order = Order([ONE], options, strikes_in=passes[-1], signal=signal.SIGSTOP)
    sleeper = builders.start(folder, order)
    sleeper.wait_for(lambda: sleeper.state == "T")
    assert builders.run(folder, Order([ONE], options)).error == ""
    times = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    sleeper.send(signal.SIGCONT)
    error = sleeper.wait().error
    assert error.startswith(f"CacheError: {folder}: part 0 went to another process")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == times
    require_same(folder, tmp_path / "expected")


def test_stopped_one_goes_on_while_another_builds_its_part(
    builders: Builders, target: Target, tmp_path: Path
) -> None:
    assert build(target, tmp_path / "expected", ONE) == 1
    folder = tmp_path / "cache"
    order = Order([ONE], {"claim_timeout_s": 1.0}, strikes_on="link commits/")
    sleeper = builders.start(folder, replace(order, signal=signal.SIGSTOP))
    sleeper.wait_for(lambda: sleeper.state == "T")
    other = builders.start(folder, replace(order, signal=signal.SIGSTOP))
    other.wait_for(lambda: other.state == "T")
    sleeper.send(signal.SIGCONT)
    first = sleeper.wait()
    other.send(signal.SIGCONT)
    second = other.wait()
    assert first.error == ""
    assert second.error.startswith("CacheError: ")
    assert "another process has built part 0 meanwhile" in second.error
    require_same(folder, tmp_path / "expected")


def test_other_rows_codecs_and_taps_are_refused_while_one_builds(
    builders: Builders, many: Path, tmp_path: Path
) -> None:
    first = builders.start(tmp_path, Order([MANY], pass_s=0.02))
    first.wait_for(lambda: any((tmp_path / "commits").glob("*")))
    refused = [
        (Order([MANY, MORE]), "0 of its 400 are not among those given, 4 of those given are not"),
        (Order([(399, 0)]), "1 of its 400 are not among those given, 0 of those given are not"),
        (Order([MANY], {"taps": "bf16+zstd"}), "taps: stored bf16, asked for bf16+zstd"),
        (Order([MANY], {"last": None, "topk": 4}), "last: stored bf16, asked for None"),
        (Order([MANY], {"share_prefix": True}), "share_prefix: stored False, asked for True"),
        (Order([MANY], tap_layers=[0, 1]), "tap_layers: stored (0, 1, 2), asked for (0, 1)"),
    ]
    for order, said in refused:
        outcome = builders.run(tmp_path, order)
        assert outcome.error.startswith(f"CacheError: {tmp_path}")
        assert said in outcome.error
        assert "fix: " in outcome.error
        assert outcome.built == 0
    assert first.state != "Z"
    assert first.wait().built > 80
    require_same(tmp_path, many)


def test_who_finds_nothing_to_do_waits_for_the_end_and_returns_the_summary(
    builders: Builders, few: Path, tmp_path: Path
) -> None:
    last = "link commits/part-00000001"
    first = builders.start(tmp_path, Order([FEW], strikes_on=last, signal=signal.SIGSTOP))
    first.wait_for(lambda: first.state == "T")
    second = builders.start(tmp_path, Order([FEW]))
    time.sleep(0.5)
    assert second.state != "Z"  # the other lives, and may take its time
    first.send(signal.SIGCONT)
    outcomes = first.wait(), second.wait()
    assert [o.error for o in outcomes] == ["", ""]
    assert [(o.built, o.parts) for o in outcomes] == [(2, 2), (0, 2)]
    require_same(tmp_path, few)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    late = builders.run(tmp_path, Order([FEW]))
    assert (late.error, late.built, late.parts) == ("", 0, 2)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == times
