"""What a finished cache is, whoever built it and when; and ways to damage one."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from data.batch import CachedRow, Row
from data.cache.build import BuildSummary, build_cache
from data.cache.finish import QUARANTINE_KEY
from data.cache.read import CacheReader
from data.cache.records import COMMITS, Manifest
from data.cache.repair import Mended, mend_cache
from data.cache.store import LocalStore, Store
from data.cache.verify import verify_cache
from data.config import CacheConfig
from data.fingerprint import Fingerprint
from data.target import Target

# What names the builder, or follows from what does.
_OF_THE_BUILDER = ("cache_uuid", "writer", "time", "sha256")


def small_config(**options: Any) -> CacheConfig:
    """Parts of 32 tokens of bf16 states in two chunks, little preparation, any codec's error."""
    sizes = {"part_bytes": 1 << 14, "chunk_bytes": 1 << 13, "batch_tokens": 64}
    limits = {"max_tap_error": 1.0, "max_last_tv": 1.0}
    quick = {"fidelity_tokens": 64, "self_check_tokens": 1}
    return CacheConfig(**{**sizes, **limits, **quick, **options})


def small_build(
    target: Target, store: Store | Path, rows: Sequence[Row], **options: Any
) -> BuildSummary:
    """Builds, resumes or extends a cache as `small_config` says."""
    fingerprint = Fingerprint.of_target(target)
    return build_cache(target, rows, small_config(**options), store, fingerprint)


@dataclass(frozen=True)
class SmallCache:
    """A cache and what it is built from."""

    folder: Path
    rows: Sequence[Row]
    config: CacheConfig
    target: Target

    def build(self) -> BuildSummary:
        """Builds, resumes or completes it."""
        fingerprint = Fingerprint.of_target(self.target)
        return build_cache(self.target, self.rows, self.config, self.folder, fingerprint)

    def mend(self) -> Mended:
        """Removes what is damaged."""
        taps = json.dumps(list(self.target.tap_layers))
        fingerprint = Fingerprint.of_target(self.target).extended(tap_layers=taps)
        return mend_cache(LocalStore(self.folder), self.rows, self.config, fingerprint)

    def copy(self, folder: Path) -> "SmallCache":
        """A copy elsewhere."""
        shutil.copytree(self.folder, folder)
        return SmallCache(folder, self.rows, self.config, self.target)


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


def interrupt() -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt


def ignore_fsync(patch: pytest.MonkeyPatch) -> None:
    """No power fails in a test, and SIGKILL loses nothing that was written."""
    patch.setattr(os, "fsync", lambda _: None)


def normal_form(folder: Path) -> dict[str, Any]:
    """Every file but the lock, less what names the builder."""
    uuid = json.loads((folder / "cache.json").read_bytes())["cache_uuid"].encode()
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        key = path.relative_to(folder).as_posix()
        if not path.is_file() or key == ".lock":
            continue
        content = path.read_bytes()
        found[key] = content
        if key in ("cache.json", "data.zarr/zarr.json"):
            found[key] = content.replace(uuid, b"uuid")
        elif key == "manifest.json" or key.startswith(COMMITS):
            value = json.loads(content)
            digests = value.get("digests", {})
            for volatile in ("cache.json", "data.zarr/zarr.json", COMMITS):
                digests.pop(volatile, None)
            found[key] = {k: v for k, v in value.items() if k not in _OF_THE_BUILDER}
    return found


def row_values(row: CachedRow) -> tuple[Any, ...]:
    """A row, bit for bit."""
    topk = () if row.topk is None else tuple(vars(row.topk).values())
    tensors = (row.token_ids, row.loss_mask, row.taps, row.last, *topk)
    return (row.row_key, *(None if t is None else _bytes(t) for t in tensors))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def all_values(folder: Path) -> list[tuple[Any, ...]]:
    """All rows of a finished cache."""
    reader = CacheReader(folder)
    return [row_values(reader[i]) for i in range(len(reader))]


def require_same(folder: Path, expected: Path) -> None:
    """A finished cache is what another build made, with nothing left over."""
    mine, theirs = normal_form(folder), normal_form(expected)
    if differing := [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]:
        raise AssertionError(f"{folder}: {differing} differ")
    if problems := verify_cache(LocalStore(folder)).problems:
        raise AssertionError(list(map(str, problems)))
    if all_values(folder) != all_values(expected):
        raise AssertionError(f"{folder}: rows differ")


def data_files(folder: Path) -> Iterator[Path]:
    """What a reader depends on: all but the lock and the list of unusable rows."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (".lock", QUARANTINE_KEY):
            yield path


def manifest_of(folder: Path) -> Manifest:
    """The manifest."""
    return Manifest.load(LocalStore(folder))
