"""Interruption, failing storage and a full disk leave nothing half written; the next build ends."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from data.batch import Row
from data.cache import build as build_module
from data.cache.read import CacheReader
from data.cache.store import PARTIAL, LocalStore, Sink
from data.errors import CacheError, FingerprintMismatchError
from data.target import Target
from data.tiny import make_tiny_target
from tests.support.caches import (
    all_values,
    at_pass,
    ignore_fsync,
    interrupt,
    normal_form,
    require_same,
    small_build,
)
from tests.support.tiny import TAPS, random_rows, tiny_target

ROWS = random_rows([(4, 5), (9, 12), (3, 14), (10, 18), (2, 3), (8, 8), (1, 30), (6, 7)])


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
def pristine(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "cache"
    assert small_build(target, folder, ROWS).manifest.num_parts >= 4
    return folder


@pytest.fixture
def cache(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "cache"))


def require_nothing_half_written(folder: Path) -> None:
    assert not list(folder.rglob(f"*{PARTIAL}"))
    assert not list(folder.rglob("claims/*"))
    with pytest.raises(CacheError, match=r"not finished|no cache"):
        CacheReader(folder)


def test_finished_cache_is_left_as_it_is_but_for_leftovers(target: Target, cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()}
    for name in ("data.zarr/hidden/c.9.0.0.partial", "cache.json.1.partial"):
        (cache / name).write_bytes(b"half")
    summary = small_build(target, cache, ROWS)
    assert (summary.parts_built, summary.check) == (0, None)
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*") if p.is_file()} == before


def test_rows_in_another_order_are_the_same_rows(target: Target, cache: Path) -> None:
    before = normal_form(cache)
    assert small_build(target, cache, ROWS[::-1]).parts_built == 0
    assert normal_form(cache) == before


def test_other_inputs_on_the_same_folder_are_refused_by_name(
    target: Target, cache: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    before = normal_form(cache)
    other_taps = tiny_target(tiny_folder)
    other_taps.tap_layers = TAPS[:2]
    with pytest.raises(CacheError, match=r"(?s)tap_layers: stored \(0, 1, 2\), asked for \(0, 1\)"):
        small_build(other_taps, cache, ROWS)
    another = Row.of([1, 2], [3, 4], class_name="a", source="new.jsonl:9")
    said = r"1 of its 8 are not among those given, 1 of those given are not in it.*new\.jsonl:9"
    with pytest.raises(CacheError, match=said):
        small_build(target, cache, [*ROWS[:-1], another])
    with pytest.raises(CacheError, match="1 of its 8 are not among those given, 0 of those"):
        small_build(target, cache, ROWS[:-1])
    with pytest.raises(CacheError, match=r"(?s)taps: stored bf16, asked for int8.*last: stored"):
        small_build(target, cache, ROWS, taps="int8-h64-g64", last="bf16+zstd")
    other_weights = tiny_target(make_tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(FingerprintMismatchError, match="target_weights"):
        small_build(other_weights, cache, ROWS)
    assert normal_form(cache) == before


def test_build_that_is_stopped_at_any_pass_resumes_to_the_same_bytes(
    target: Target, pristine: Path, tmp_path: Path
) -> None:
    with at_pass(target, -1, interrupt) as passes:
        parts = small_build(target, tmp_path / "whole", ROWS).manifest.num_parts
    kept = []
    for number in passes:
        folder = tmp_path / str(number)
        with at_pass(target, number, interrupt), pytest.raises(KeyboardInterrupt):
            small_build(target, folder, ROWS)
        require_nothing_half_written(folder)
        kept.append(parts - small_build(target, folder, ROWS).parts_built)
        require_same(folder, pristine)
    assert kept[0] == 0
    assert all(0 <= k < parts for k in kept)


class Failing(LocalStore):
    """A folder whose ``number``-th operation that changes it fails."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder)
        self.number, self.operations = number, 0

    def _count(self, key: str) -> None:
        self.operations += 1
        if self.operations - 1 == self.number:
            raise OSError(5, "Input/output error", key)

    def write(self, key: str, content: bytes) -> None:
        self._count(key)
        super().write(key, content)

    def create(self, key: str, content: bytes) -> None:
        self._count(key)
        super().create(key, content)

    def open_sink(self, key: str, token: str) -> Sink:
        self._count(key)
        sink = super().open_sink(key, token)
        write, publish = sink.write, sink.publish

        def counted_write(data: bytes | bytearray | memoryview) -> None:
            self._count(key)
            write(data)

        def counted_publish() -> None:
            self._count(key)
            publish()

        setattr(sink, "write", counted_write)  # noqa: B010 - mypy knows that it is a method
        setattr(sink, "publish", counted_publish)  # noqa: B010
        return sink


def test_storage_that_fails_once_anywhere_costs_one_more_start(
    target: Target, tmp_path: Path
) -> None:
    rows = ROWS[:3]
    whole = Failing(tmp_path / "whole", -1)
    assert small_build(target, whole, rows).manifest.num_parts == 2
    for number in range(0, whole.operations, 3):
        folder = tmp_path / str(number)
        with pytest.raises(CacheError, match=f"(?s)^{folder}: .*Input/output error.*same command"):
            small_build(target, Failing(folder, number), rows)
        require_nothing_half_written(folder)
        small_build(target, folder, rows)
        require_same(folder, whole.folder)


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
        small_build(target, disk / "first", ROWS)
    shutil.rmtree(disk / "first")
    # The first passes are the probe's and the self-check's.
    number = passes[-1] if last_part else len(passes) // 2
    errors = []
    for room in range(0, 96 << 10, 12 << 10):
        try:
            with at_pass(target, number, partial(fill, disk, room)):
                small_build(target, disk / "cache", ROWS)
        except CacheError as error:
            errors.append(str(error))
            assert not (disk / "cache" / "manifest.json").exists()
        assert not list(disk.rglob(f"*{PARTIAL}"))
        mount(disk, "remount,size=8m")
        small_build(target, disk / "cache", ROWS)
        require_same(disk / "cache", pristine)
        shutil.rmtree(disk / "cache")
        (disk / "ballast").unlink()
        mount(disk, "remount,size=2m")
    assert len(errors) >= 3
    for text in errors:
        assert text.startswith(f"{disk / 'cache'}: could not be written (")
        assert "GB free" in text
        assert "make room and run the same command again" in text


def test_disk_that_is_too_small_is_refused_before_the_first_part(
    target: Target, disk: Path
) -> None:
    fill(disk, 80 << 10)
    with pytest.raises(CacheError, match=r"(?s)needs up to .* GB are free.*larger disk"):
        small_build(target, disk / "cache", ROWS)
    assert not list(disk.rglob("c.*"))
    (disk / "ballast").unlink()
    assert small_build(target, disk / "cache", ROWS).parts_built >= 4
    assert len(all_values(disk / "cache")) == len(ROWS)
