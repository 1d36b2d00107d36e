"""Damage of any file: the right values or an error that names it; reported, and mended."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.batch import Row
from data.cache.read import CacheReader
from data.cache.store import LocalStore
from data.cache.verify import verify_cache
from data.errors import ShardError, UserError
from data.target import Target
from tests.support.builders import many_rows
from tests.support.caches import (
    SmallCache,
    all_values,
    data_files,
    ignore_fsync,
    manifest_of,
    require_same,
    row_values,
    small_config,
)
from tests.support.tiny import random_rows, tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16+zstd": {"taps": "bf16+zstd", "last": "bf16+zstd"},
    "int8": {"taps": "int8-h64-g64-out8", "last": "int8-g64-out32", "topk": 4},
    "shared": {"share_prefix": True, "share_prefix_min": 4},
}
PLACES, REPAIRS_OF_A_KIND = 200, 2


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        ignore_fsync(patch)
        yield


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def branching_rows() -> list[Row]:
    """Rows of which several begin alike, in two depths, and rows that share nothing."""
    trunk, *rest = random_rows([(20, 0), (9, 0), (7, 3), (5, 8), (12, 6), (4, 9), (8, 2)], seed=5)
    branch = trunk.token_ids + rest[0].token_ids
    rows = [
        Row.of(start + row.token_ids[:2], row.token_ids[2:], class_name="ab"[i % 2])
        for i, (start, row) in enumerate(
            (start, row) for start in (trunk.token_ids, branch, ()) for row in rest[1:]
        )
    ]
    named = [Row(r.segments, r.class_name, f"shared.jsonl:{i}") for i, r in enumerate(rows)]
    return named[::2] + named[1::2]


@pytest.fixture(scope="module")
def pristine(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SmallCache]:
    found = {}
    for name, options in VARIANTS.items():
        rows = branching_rows() if name == "shared" else many_rows(10, seed=3)
        config = small_config(**options)
        found[name] = SmallCache(tmp_path_factory.mktemp("cache") / name, rows, config, target)
        assert found[name].build().manifest.num_parts >= 3
    return found


@pytest.fixture
def cache(pristine: Mapping[str, SmallCache], tmp_path: Path) -> SmallCache:
    return pristine["bf16"].copy(tmp_path / "cache")


def kind_of(key: str) -> str:
    """Files that are written and read alike."""
    folder, _, name = key.rpartition("/")
    if folder == "plans":
        return name.split("-")[0]
    if "/samples" in key or "/prefix" in key:
        return "table document" if name == "zarr.json" else "table"
    if folder.startswith("data.zarr") and name == "zarr.json":
        return "document"
    return folder or name


class Damage:
    """New contents of one file, or of two; None removes one."""

    HOW = ("flip", "flip", "flip at the end", "cut by one", "halve", "empty", "append", "remove",
           "swap")  # fmt: skip

    def __init__(self, generator: np.random.Generator, alike: Sequence[Path], how: str) -> None:
        self.how, self.path = how, alike[int(generator.integers(len(alike)))]
        self.old = {self.path: self.path.read_bytes()}
        content = self.old[self.path]
        others = [p for p in alike if p.read_bytes() != content]
        if how == "swap" and others:
            other = others[int(generator.integers(len(others)))]
            self.old[other] = other.read_bytes()
            self.new: dict[Path, bytes | None] = {self.path: self.old[other], other: content}
            return
        place = int(generator.integers(len(content)))
        if how == "flip at the end":
            place = len(content) - 1 - min(place, 11)
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(generator.integers(8))
        cut = {"cut by one": content[:-1], "halve": content[: len(content) // 2], "empty": b""}
        grown = {"append": content + bytes([int(generator.integers(256))]), "remove": None}
        self.new = {self.path: {**cut, **grown}.get(how, bytes(flipped))}

    def put(self, contents: Mapping[Path, bytes | None]) -> None:
        for path, content in contents.items():
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)

    def is_named_in(self, text: str) -> bool:
        if self.new[self.path] is None and self.path.name in ("cache.json", "manifest.json"):
            return text.startswith(
                f"{self.path.parent}: "
            )  # without them it is none, or unfinished
        return any(str(path) in text for path in self.new)

    def require_named(self, text: str) -> None:
        assert self.is_named_in(text), (self.how, self.path, text)


def unreadable_rows(folder: Path, damage: Damage, expected: Sequence[Any]) -> set[int]:
    """Rows that raise an error, which names the damaged file; all others must be right."""
    try:
        reader = CacheReader(folder)
    except UserError as error:
        damage.require_named(str(error))
        return set(range(len(expected)))
    assert len(reader) == len(expected)
    bad = set()
    for i, row in enumerate(expected):
        try:
            assert row_values(reader[i]) == row
        except ShardError as error:
            damage.require_named(str(error))
            bad.add(i)
    return bad


def require_reported(folder: Path, damage: Damage, bad: set[int]) -> None:
    try:
        problems = verify_cache(LocalStore(folder)).problems
    except UserError as error:
        damage.require_named(str(error))
        return
    if damage.path.name == "manifest.json" and damage.how in ("cut by one", "append"):
        assert not bad
        return  # white space at its end
    named = [p for p in problems if damage.is_named_in(p.where)]
    assert named, (damage.how, damage.path, list(map(str, problems)))
    if damage.path.match("commits/*") or damage.path.match("data.zarr/*/c.*"):
        assert {row for p in named if p.part is not None for row in p.rows} == bad
        assert bad


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_damage_anywhere_is_an_error_or_harmless_is_reported_and_can_be_mended(
    pristine: Mapping[str, SmallCache], tmp_path: Path, variant: str
) -> None:
    cache = pristine[variant].copy(tmp_path / "cache")
    folder, expected = cache.folder, all_values(cache.folder)
    kinds = defaultdict(list)
    for path in data_files(folder):
        kinds[kind_of(path.relative_to(folder).as_posix())].append(path)
    assert len(kinds) >= 11
    generator, names = np.random.default_rng(0), sorted(kinds)
    repaired: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for place in range(PLACES):
        kind = names[place % len(names)]
        damage = Damage(
            generator, kinds[kind], Damage.HOW[int(generator.integers(len(Damage.HOW)))]
        )
        damage.put(damage.new)
        bad = unreadable_rows(folder, damage, expected)
        require_reported(folder, damage, bad)
        seen[f"{kind} {damage.how}"] += 1
        if repaired[kind] >= REPAIRS_OF_A_KIND:
            damage.put(damage.old)
            continue
        repaired[kind] += 1
        cache.mend()
        cache.build()
        require_same(folder, pristine[variant].folder)
    assert len(seen) > 0.5 * len(kinds) * len(set(Damage.HOW))


def test_swapped_shards_of_equal_size_are_told_apart(cache: SmallCache) -> None:
    # Their indices are equal, and every chunk's checksum fits.
    for name, suffix in (("hidden", ".0.0"), ("last_hidden", ".0"), ("input_ids", "")):
        by_size = defaultdict(list)
        for part in range(manifest_of(cache.folder).num_parts):
            path = cache.folder / "data.zarr" / name / f"c.{part}{suffix}"
            by_size[path.stat().st_size].append(path)
        one, other = max(by_size.values(), key=len)[:2]
        contents = one.read_bytes(), other.read_bytes()
        one.write_bytes(contents[1])
        other.write_bytes(contents[0])
        with pytest.raises(ShardError):
            all_values(cache.folder)
        named = {p.where for p in verify_cache(LocalStore(cache.folder)).problems}
        assert named == {str(one), str(other)}
        one.write_bytes(contents[0])
        other.write_bytes(contents[1])
    assert verify_cache(LocalStore(cache.folder)).problems == ()
