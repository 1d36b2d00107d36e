"""Reads a whole cache and names every bad file; prints what a cache holds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.cache.read import CacheReader
from data.cache.records import commits_digest
from data.errors import ShardError
from data.progress import Meter


@dataclass(frozen=True)
class VerifyReport:
    """Result of reading every object with every checksum."""

    objects: int
    problems: tuple[str, ...]


def verify_cache(folder: Path) -> VerifyReport:
    """Reads every object of the cache; collects all problems instead of ending at the first.

    Raises:
        CacheError: the control files themselves are missing or damaged.
    """
    reader = CacheReader(folder)
    objects = list(reader.objects())
    problems = []
    with Meter("verify", len(objects), "objects") as meter:
        for name, part in objects:
            try:
                reader.verify_object(name, part)
            except ShardError as error:
                problems.append(str(error))
            meter.add(1, f"{len(problems)} bad")
    if commits_digest(folder, reader.header.num_parts) != reader.manifest.commits_sha256:
        problems.append(f"{folder / 'commits'}: a commit record was changed after the build")
    return VerifyReport(len(objects), tuple(problems))


def describe_cache(folder: Path) -> dict[str, str]:
    """What a person wants to know of a cache, as label and text."""
    reader = CacheReader(folder)
    header, manifest = reader.header, reader.manifest
    counts = np.bincount(reader.samples.class_ids, minlength=len(header.class_names))
    classes = ", ".join(
        f"{n or '(none)'} {c}" for n, c in zip(header.class_names, counts, strict=True)
    )
    tokens = max(manifest.num_tokens, 1)
    raw = 2 * (len(header.tap_layers) + 1) * header.hidden_size
    return {
        "rows": f"{manifest.num_samples:,} ({classes})",
        "tokens": f"{tokens:,}",
        "size": f"{manifest.total_bytes / 1e9:.3f} GB",
        "bytes per token": f"{manifest.total_bytes / tokens:,.0f} (raw bf16 states: {raw:,})",
        "taps": f"layers {list(header.tap_layers)} of width {header.hidden_size}",
        "codec": header.codec,
        "parts": f"{header.num_parts} of {header.part_tokens:,} tokens",
        "skipped rows": str(len(manifest.skipped)),
        "id": header.cache_uuid,
    }
