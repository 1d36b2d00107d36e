"""A damaged cache is not made worse: what is lost is named, and what can be is made again."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.cache.format import HEADER_KEY, Header
from data.cache.read import CacheReader
from data.cache.records import commit_key
from data.cache.repair import Mended, mend_cache
from data.cache.store import LocalStore
from data.cache.verify import verify_cache
from data.errors import CacheError, ShardError
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.builders import many_rows
from tests.support.caches import (
    SmallCache,
    all_values,
    ignore_fsync,
    normal_form,
    require_same,
    small_config,
)
from tests.support.tiny import tiny_target


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ignore_fsync(patch)
        yield


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def pristine(target: Target, tmp_path_factory: pytest.TempPathFactory) -> SmallCache:
    folder = tmp_path_factory.mktemp("pristine") / "cache"
    found = SmallCache(folder, many_rows(10, seed=3), small_config(), target)
    assert found.build().manifest.num_parts >= 3
    return found


@pytest.fixture
def cache(pristine: SmallCache, tmp_path: Path) -> SmallCache:
    return pristine.copy(tmp_path / "cache")


def test_part_of_another_cache_is_refused(
    cache: SmallCache, target: Target, tmp_path: Path
) -> None:
    rows = many_rows(10, seed=4)
    other = SmallCache(tmp_path / "other", rows, cache.config, target)
    other.build()
    for path in other.folder.rglob("c.1*"):
        if path.parent.name not in ("samples",):
            shutil.copy(path, cache.folder / path.relative_to(other.folder))
    shutil.copy(other.folder / commit_key(1), cache.folder / commit_key(1))
    with pytest.raises(ShardError, match=r"part-00000001\.json: belongs to another cache"):
        all_values(cache.folder)
    assert verify_cache(LocalStore(cache.folder)).problems


@pytest.mark.parametrize("part", [0, 2])
def test_removed_commit_record_rebuilds_that_part_and_nothing_else(
    pristine: SmallCache, cache: SmallCache, part: int
) -> None:
    (cache.folder / commit_key(part)).unlink()
    with pytest.raises(ShardError, match=f"part-{part:08d}.json"):
        all_values(cache.folder)
    objects = [p for p in cache.folder.rglob("data.zarr/*/c.*") if p.is_file()]
    times = {p: p.stat().st_mtime_ns for p in objects}
    summary = cache.build()
    assert summary.parts_built == 1
    assert summary.check is not None
    rebuilt = {p for p, old in times.items() if p.stat().st_mtime_ns != old}
    assert rebuilt == {p for p in objects if p.name.split(".")[1] == str(part)}
    require_same(cache.folder, pristine.folder)


def test_build_on_a_finished_cache_with_a_lost_object_names_it(cache: SmallCache) -> None:
    path = cache.folder / "data.zarr" / "last_hidden" / "c.1.0"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match=f"c.1.0: has {size - 1} bytes, not {size}"):
        cache.build()
    path.unlink()
    with pytest.raises(ShardError, match=r"c\.1\.0: is missing.*\n  fix: .*repair"):
        cache.build()


def test_mending_a_sound_or_an_unfinished_cache_changes_nothing(cache: SmallCache) -> None:
    before = normal_form(cache.folder)
    assert cache.mend() == Mended((), ())
    assert normal_form(cache.folder) == before
    (cache.folder / "manifest.json").unlink()
    (cache.folder / commit_key(1)).unlink()
    assert cache.mend() == Mended((), ())
    assert cache.build().parts_built == 1
    assert normal_form(cache.folder) == before


def test_mending_needs_the_rows_and_the_target_of_the_build(cache: SmallCache) -> None:
    plan = cache.folder / "plans" / "plan-00000000.npy"
    content = plan.read_bytes()
    plan.write_bytes(content[:-1])
    fewer = SmallCache(cache.folder, cache.rows[:-1], cache.config, cache.target)
    with pytest.raises(CacheError, match=r"plan-00000000\.npy: damaged, and cannot be made again"):
        fewer.mend()
    plan.write_bytes(content)
    (cache.folder / "fingerprint.json").write_bytes(b"{}")
    other = Fingerprint({"target_weights": "others"})
    with pytest.raises(CacheError, match="this target is not the one"):
        mend_cache(LocalStore(cache.folder), cache.rows, cache.config, other)


@pytest.mark.parametrize("finished", [True, False])
def test_lost_header_is_not_replaced_by_a_new_one(
    pristine: SmallCache, cache: SmallCache, finished: bool
) -> None:
    (cache.folder / HEADER_KEY).unlink()
    if not finished:
        (cache.folder / "manifest.json").unlink()
        (cache.folder / commit_key(1)).unlink()
    with pytest.raises(CacheError, match=r"cache\.json: missing header.*\n  fix: .*repair"):
        cache.build()
    cache.mend()
    assert cache.build().parts_built == (0 if finished else 1)
    require_same(cache.folder, pristine.folder)


@pytest.mark.parametrize("finished", [True, False])
def test_lost_plan_is_not_replaced_by_a_plan_of_other_rows(
    pristine: SmallCache, cache: SmallCache, finished: bool
) -> None:
    (cache.folder / "plans" / "plan-00000000.npy").unlink()
    if not finished:
        (cache.folder / "manifest.json").unlink()
    for rows in (many_rows(10, seed=4), cache.rows):
        with pytest.raises(CacheError, match=r"plan-00000000\.npy: missing plan.*\n  fix: "):
            SmallCache(cache.folder, rows, cache.config, cache.target).build()
    if finished:  # its digest is known
        cache.mend()
        cache.build()
        require_same(cache.folder, pristine.folder)
    else:
        with pytest.raises(CacheError, match="cannot be made again"):
            cache.mend()


def test_header_with_any_flipped_bit_is_read_or_refused(cache: SmallCache) -> None:
    content = (cache.folder / HEADER_KEY).read_bytes()
    bits = np.random.default_rng(0).integers(0, len(content) * 8, 1500).tolist()
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CacheError):
            Header.parse(bytes(flipped), "cache.json")


@pytest.mark.parametrize("change", [{"version": 1}, {"version": 3}, {"format": "other"}])
def test_cache_of_another_version_is_refused(cache: SmallCache, change: dict[str, Any]) -> None:
    path = cache.folder / HEADER_KEY
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CacheError, match=r"(?s)cache\.json: .*this version reads.*fix: use"):
        CacheReader(cache.folder)
