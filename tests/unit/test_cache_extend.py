"""Rows are added to a cache: what it holds stays, in its order, and readable meanwhile."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.batch import Row
from data.cache import build as build_module
from data.cache.plan import load_plans
from data.cache.read import CacheReader
from data.cache.records import commit_key
from data.cache.repair import Mended, mend_cache
from data.cache.store import LocalStore
from data.cache.verify import verify_cache
from data.errors import CacheError
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.builders import many_rows
from tests.support.caches import (
    all_values,
    at_pass,
    ignore_fsync,
    interrupt,
    manifest_of,
    normal_form,
    require_same,
    small_build,
    small_config,
)
from tests.support.tiny import random_rows, tiny_target

OLD, NEW, NEWER = many_rows(7, seed=11), many_rows(5, seed=12), many_rows(2, seed=13)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ignore_fsync(patch)
        patch.setattr(build_module, "_POLL_S", 0.01)
        yield


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def old(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "cache"
    assert small_build(target, folder, OLD).manifest.num_parts >= 3
    return folder


@pytest.fixture(scope="module")
def new(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The new rows alone: the same passes as when they are added."""
    folder = tmp_path_factory.mktemp("new") / "cache"
    small_build(target, folder, NEW)
    return folder


@pytest.fixture
def cache(old: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(old, tmp_path / "cache"))


@pytest.mark.parametrize("given", [[*OLD, *NEW], [*NEW, *OLD[::-1]], NEW])
def test_added_rows_follow_the_old_ones(
    target: Target, old: Path, new: Path, cache: Path, given: list[Row]
) -> None:
    kept = [p for p in [*cache.rglob("data.zarr/*/c.*"), *cache.glob("commits/*")] if p.is_file()]
    times = {p: p.stat().st_mtime_ns for p in kept}
    summary = small_build(target, cache, given, add_rows=True)
    before, added = manifest_of(old), manifest_of(new)
    assert summary.parts_built == added.num_parts
    assert summary.manifest.num_parts == before.num_parts + added.num_parts
    assert summary.manifest.num_samples == len(OLD) + len(NEW)
    assert summary.manifest.num_tokens == sum(map(len, [*OLD, *NEW]))
    assert {p: p.stat().st_mtime_ns for p in kept} == times
    assert all_values(cache) == all_values(old) + all_values(new)
    samples = CacheReader(cache).samples
    assert samples.sample_ids.tolist() == list(range(len(OLD) + len(NEW)))
    assert len(load_plans(LocalStore(cache))) == 2
    assert verify_cache(LocalStore(cache)).problems == ()


def test_cache_that_grew_is_complete_for_its_rows_only(target: Target, cache: Path) -> None:
    small_build(target, cache, [*OLD, *NEW], add_rows=True)
    small_build(target, cache, NEWER, add_rows=True)
    every = [*OLD, *NEW, *NEWER]
    grown = normal_form(cache)
    for rows, options in ((every, {}), (every, {"add_rows": True}), (NEW, {"add_rows": True})):
        summary = small_build(target, cache, rows, **options)
        assert (summary.parts_built, summary.manifest.num_samples) == (0, len(every))
        assert normal_form(cache) == grown
    assert len(load_plans(LocalStore(cache))) == 3
    counts = "5 of its 14 are not among those given, 0 of those given are not in it"
    with pytest.raises(CacheError, match=counts):
        small_build(target, cache, [*OLD, *NEWER])
    with pytest.raises(
        CacheError, match=r"0 of its 14 .* 1 of those .*(?s:.*)fix: cache\.add_rows"
    ):
        small_build(target, cache, [*every, *many_rows(1, seed=99)])
    assert normal_form(cache) == grown


def test_interrupted_extension_leaves_the_old_cache_whole_and_ends_later(
    target: Target, old: Path, tmp_path: Path
) -> None:
    rows = [*OLD, *NEW]
    whole = Path(shutil.copytree(old, tmp_path / "whole"))
    with at_pass(target, -1, interrupt) as passes:
        small_build(target, whole, rows, add_rows=True)
    own = Fingerprint.of_target(target).extended(tap_layers="[0, 1, 2]")
    for number in passes:
        folder = Path(shutil.copytree(old, tmp_path / str(number)))
        with at_pass(target, number, interrupt), pytest.raises(KeyboardInterrupt):
            small_build(target, folder, rows, add_rows=True)
        assert len(load_plans(LocalStore(folder))) == 2
        assert all_values(folder) == all_values(old)
        assert verify_cache(LocalStore(folder)).problems == ()
        assert mend_cache(LocalStore(folder), rows, small_config(), own) == Mended((), ())
        # Without the flag too: the rows are planned, so they are no other rows.
        small_build(target, folder, rows, add_rows=number % 2 == 0)
        require_same(folder, whole)


def test_old_part_that_was_lost_is_built_again_by_who_has_its_rows(
    target: Target, old: Path, new: Path, cache: Path
) -> None:
    (cache / commit_key(1)).unlink()
    with pytest.raises(
        CacheError, match=r"needs a row that is not among those given(?s:.*)all rows"
    ):
        small_build(target, cache, NEW, add_rows=True)
    with pytest.raises(CacheError, match="not finished"):
        CacheReader(cache)
    small_build(target, cache, [*OLD, *NEW], add_rows=True)
    assert all_values(cache) == all_values(old) + all_values(new)


def test_rows_are_added_to_an_unfinished_cache(
    target: Target, old: Path, new: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    with at_pass(target, 6, interrupt), pytest.raises(KeyboardInterrupt):
        small_build(target, folder, OLD)
    small_build(target, folder, [*OLD, *NEW], add_rows=True)
    assert all_values(folder) == all_values(old) + all_values(new)
    assert verify_cache(LocalStore(folder)).problems == ()


def test_row_that_is_longer_than_a_part_cannot_be_added(target: Target, cache: Path) -> None:
    before = normal_form(cache)
    with pytest.raises(CacheError, match="part_tokens: stored 64, asked for 128"):
        small_build(target, cache, [*OLD, *random_rows([(40, 40)])], add_rows=True)
    assert normal_form(cache) == before


def test_rows_are_added_where_prefixes_are_shared(target: Target, tmp_path: Path) -> None:
    options = {"share_prefix": True, "share_prefix_min": 4}
    trunk = random_rows([(15, 0)], seed=3)[0].token_ids
    rows = [Row.of(trunk + r.token_ids[:3], r.token_ids[3:]) for r in random_rows([(5, 4)] * 6)]
    folder = tmp_path / "cache"
    small_build(target, folder, rows[:3], **options)
    before = all_values(folder)
    summary = small_build(target, folder, rows[3:], add_rows=True, **options)
    assert all_values(folder)[:3] == before
    reader = CacheReader(folder)
    assert [reader[i].token_ids.tolist() for i in range(6)] == [list(r.token_ids) for r in rows]
    assert [reader[i].loss_mask.tolist() for i in range(6)] == [r.loss_mask for r in rows]
    # Stored once for each time that rows were given.
    assert summary.manifest.num_tokens - summary.manifest.stored_tokens == 2 * 2 * len(trunk)
    assert verify_cache(LocalStore(folder)).problems == ()
