"""Damage, interruption and a full disk: an error that names the file, or the right bytes."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batch import Row
from data.cache.build import BuildSummary, build_cache
from data.cache.read import CacheReader
from data.cache.records import commit_path
from data.cache.verify import verify_cache
from data.config import CacheConfig
from data.errors import CacheError, FingerprintMismatchError, ShardError, UserError
from data.fingerprint import Fingerprint
from data.target import Target
from data.tiny import make_tiny_target
from tests.support.tiny import TAPS, random_rows, tiny_target

CONFIG = CacheConfig(part_bytes=1 << 14, chunk_bytes=1 << 13, batch_tokens=64, self_check_tokens=1)
ROWS = random_rows([(4, 5), (9, 12), (3, 14), (10, 18), (2, 3), (8, 8), (1, 30), (6, 7)])
ARRAYS = ("hidden", "last_hidden", "input_ids", "loss_mask")


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def build(target: Target, folder: Path, rows: list[Row] = ROWS, **options: Any) -> BuildSummary:
    config = CacheConfig(**{**vars(CONFIG), **options})
    return build_cache(target, rows, config, folder, Fingerprint.of_target(target))


@pytest.fixture(scope="module")
def pristine(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "cache"
    assert build(target, folder).manifest.num_parts >= 4
    return folder


@pytest.fixture
def cache(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "cache"))


def objects(folder: Path) -> list[Path]:
    return sorted(p for name in ARRAYS for p in (folder / "data.zarr" / name).glob("c.*"))


def stored_bytes(folder: Path) -> dict[str, bytes]:
    """Everything that must not depend on who wrote it, and when."""
    files = [*(folder / "data.zarr").rglob("*"), folder / "plan.npy", folder / "fingerprint.json"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.is_file()}


def contents(folder: Path) -> list[tuple[Any, ...]]:
    tensors = ("token_ids", "loss_mask", "taps", "last")
    reader = CacheReader(folder)
    rows = [reader[i] for i in range(len(reader))]
    return [(*(getattr(r, name).tolist() for name in tensors), r.row_key) for r in rows]


def require_reported(folder: Path, path: Path) -> str:
    with pytest.raises(ShardError) as error:
        contents(folder)
    assert error.value.path == path
    assert str(error.value).startswith(f"{path}: ")
    assert verify_cache(folder).problems == (str(error.value),)
    return str(error.value)


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@contextlib.contextmanager
def at_pass(target: Target, number: int, action: Callable[[], None]) -> Iterator[list[int]]:
    """Runs the action when the target is called for the ``number``-th time; yields the calls."""
    calls: list[int] = []

    def hook(*_: object) -> None:
        calls.append(len(calls))
        if calls[-1] == number:
            action()

    handle = target.decoder.register_forward_pre_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ARRAYS)
def test_flipped_bit_is_an_error_that_names_the_file(cache: Path, name: str) -> None:
    generator = np.random.default_rng(ARRAYS.index(name))
    files = [p for p in objects(cache) if p.parent.name == name]
    for case in range(16):
        path = files[case % len(files)]
        size = path.stat().st_size * 8
        bit = [0, size - 1, *generator.integers(0, size, 14).tolist()][case]
        flip_bit(path, bit)
        require_reported(cache, path)
        flip_bit(path, bit)
    assert verify_cache(cache).problems == ()


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("damage", ["cut by one", "cut in half", "empty", "gone", "longer"])
def test_file_of_another_size_is_an_error_that_names_it(
    target: Target, cache: Path, name: str, damage: str
) -> None:
    path = next(p for p in objects(cache) if p.parent.name == name)
    size = path.stat().st_size
    sizes = {"cut by one": size - 1, "cut in half": size // 2, "empty": 0, "longer": size + 1}
    path.unlink() if damage == "gone" else os.truncate(path, sizes[damage])
    text = require_reported(cache, path)
    said = f"has {sizes.get(damage)} bytes, its commit record says {size}"
    assert said in text or damage in ("gone", "empty")
    with pytest.raises(ShardError, match=str(path)):
        build(target, cache)


@pytest.mark.parametrize("part", [0, 2])
def test_removed_commit_record_rebuilds_that_part_and_nothing_else(
    target: Target, pristine: Path, cache: Path, part: int
) -> None:
    # This is also what every ShardError tells to do: the damage goes with the part.
    flip_bit(next(p for p in objects(cache) if p.name.startswith(f"c.{part}")), 77)
    commit_path(cache, part).unlink()
    with pytest.raises(ShardError, match=f"part-{part:08d}.json"):
        contents(cache)
    times = {p: p.stat().st_mtime_ns for p in objects(cache)}
    assert build(target, cache).parts_built == 1
    rebuilt = {p for p, old in times.items() if p.stat().st_mtime_ns != old}
    assert rebuilt == {p for p in objects(cache) if p.name.split(".")[1] == str(part)}
    assert stored_bytes(cache) == stored_bytes(pristine)
    assert contents(cache) == contents(pristine)


def test_finished_cache_is_left_as_it_is_but_for_leftovers(target: Target, cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()}
    for name in ("data.zarr/hidden/c.9.0.0.partial", "cache.json.1.partial"):
        (cache / name).write_bytes(b"half")
    summary = build(target, cache)
    assert (summary.parts_built, summary.check) == (0, None)
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()} == before


def test_damaged_sample_table_is_an_error(cache: Path) -> None:
    table = cache / "data.zarr" / "samples"
    for path in sorted(p for p in table.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for damage in (partial(flip_bit, path, 5), path.unlink):
            damage()
            with pytest.raises(CacheError, match="sample table"):
                CacheReader(cache)
            path.write_bytes(content)


@pytest.mark.parametrize("name", ["cache.json", "manifest.json", "fingerprint.json", "commits"])
@pytest.mark.parametrize("content", ["{", "[]", "\xff", '{"format":"hidden-cache","version":1}'])
def test_damaged_control_file_is_an_error_that_names_it(
    cache: Path, name: str, content: str
) -> None:
    path = commit_path(cache, 1) if name == "commits" else cache / name
    if name == "fingerprint.json":
        content = content[:2]  # any object of texts is a fingerprint
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=path.name):
        contents(cache)


def test_flipped_bit_in_a_commit_record_is_an_error_or_changes_nothing(
    pristine: Path, cache: Path
) -> None:
    expected = contents(pristine)
    path = commit_path(cache, 0)
    for bit in np.random.default_rng(0).integers(0, path.stat().st_size * 8, 30).tolist():
        flip_bit(path, bit)
        with contextlib.suppress(ShardError):
            assert contents(cache) == expected
        flip_bit(path, bit)


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "other"}])
def test_cache_of_another_version_is_refused(cache: Path, change: dict[str, Any]) -> None:
    path = cache / "cache.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CacheError, match=r"(?s)this version reads hidden-cache 1.*fix: use"):
        CacheReader(cache)


def test_other_configuration_on_the_same_folder_is_refused_by_name(
    target: Target, cache: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    before = stored_bytes(cache)
    other_taps = tiny_target(tiny_folder)
    other_taps.tap_layers = TAPS[:2]
    with pytest.raises(CacheError, match=r"(?s)tap_layers: stored \(0, 1, 2\), asked for \(0, 1\)"):
        build(other_taps, cache)
    with pytest.raises(CacheError, match="dataset_hash"):
        build(target, cache, rows=[*ROWS[:-1], Row.of([1, 2], [3, 4], class_name="a")])
    with pytest.raises(CacheError, match="num_samples: stored 8, asked for 7"):
        build(target, cache, rows=ROWS[:-1])
    with pytest.raises(CacheError, match="part_tokens: stored 32, asked for 64"):
        build(target, cache, part_bytes=1 << 15)
    other_weights = tiny_target(make_tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(FingerprintMismatchError, match="target_weights"):
        build(other_weights, cache)
    assert stored_bytes(cache) == before


def test_build_that_is_stopped_at_any_pass_resumes_to_the_same_bytes(
    target: Target, pristine: Path, tmp_path: Path
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with at_pass(target, -1, stop) as passes:
        parts = build(target, tmp_path / "whole").manifest.num_parts
    kept = []
    for number in passes:
        folder = tmp_path / str(number)
        with at_pass(target, number, stop), pytest.raises(KeyboardInterrupt):
            build(target, folder)
        assert not list(folder.rglob("*.partial"))
        with pytest.raises(CacheError, match="not finished"):
            CacheReader(folder)
        kept.append(parts - build(target, folder).parts_built)
        assert stored_bytes(folder) == stored_bytes(pristine)
    assert list(dict.fromkeys(kept)) == list(range(parts))


def mount(disk: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    subprocess.run(command, capture_output=True, check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    try:
        mount(tmp_path, "size=2m")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"only root can mount a small disk here ({error})")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(disk: Path, room: int) -> None:
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - room))


@pytest.mark.parametrize("last_part", [False, True])
def test_full_disk_names_folder_and_resume_and_the_build_ends_well_after_making_room(
    target: Target, pristine: Path, disk: Path, last_part: bool
) -> None:
    with at_pass(target, -1, disk.touch) as passes:
        build(target, disk / "first")
    shutil.rmtree(disk / "first")
    number = passes[-1] if last_part else 3
    errors = []
    for room in range(0, 96 << 10, 4 << 10):
        try:
            with at_pass(target, number, partial(fill, disk, room)):
                build(target, disk / "cache")
        except CacheError as error:
            errors.append(str(error))
        assert not list(disk.rglob("*.partial"))
        mount(disk, "remount,size=8m")
        build(target, disk / "cache")
        assert stored_bytes(disk / "cache") == stored_bytes(pristine)
        shutil.rmtree(disk / "cache")
        (disk / "ballast").unlink()
        mount(disk, "remount,size=2m")
    assert len(errors) >= 5
    fix = "make room and run the same command again"
    assert all(text.startswith(f"{disk / 'cache'}") and fix in text for text in errors)


def test_disk_that_is_too_small_is_refused_before_the_first_part(
    target: Target, disk: Path
) -> None:
    fill(disk, 80 << 10)
    with pytest.raises(CacheError, match=r"(?s)needs up to .* GB are free.*larger disk"):
        build(target, disk / "cache")
    assert not objects(disk / "cache")
