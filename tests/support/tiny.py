"""Small real objects: a target, a draft for it, rows, and a cache of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data.batch import Row
from data.cache.build import build_cache
from data.config import CacheConfig, Precision, TargetConfig
from data.fingerprint import Fingerprint
from data.target import FrozenHead, Target, read_frozen_head
from data.tiny import MASK_ID, STOP_ID
from train.config import DraftConfig
from train.models.draft import Draft, DraftShape

CPU = torch.device("cpu")
TAPS = (0, 1, 2)


def tiny_target(folder: Path) -> Target:
    """The tiny target in fp32."""
    config = TargetConfig(
        path=str(folder), precision=Precision.fp32, tap_layers=list(TAPS), mask_token_id=MASK_ID
    )
    return Target(config, CPU)


def tiny_shape(target: Target, **options: object) -> DraftShape:
    """Two layers, blocks of four, rank 8, unless told otherwise."""
    defaults = {"num_layers": 2, "block_size": 4, "head_rank": 8}
    config = DraftConfig(**{**defaults, **options})  # type: ignore[arg-type] # keys of the tests
    return DraftShape.of_target(target.text_config, TAPS, MASK_ID, config)


def tiny_draft(target: Target, *, seed: int = 0, scale: float = 1.0, **options: object) -> Draft:
    """A random draft. ``scale`` multiplies its matrices: 1 drafts almost uniformly."""
    torch.manual_seed(seed)
    draft = Draft(tiny_shape(target, **options), tiny_frozen(target))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return draft


def tiny_frozen(target: Target) -> FrozenHead:
    """Embedding and head of the target, fp32."""
    return read_frozen_head(target.folder).to(CPU, torch.float32)


def random_rows(
    lengths: Sequence[tuple[int, int]], *, seed: int = 0, classes: Sequence[str] = ("a", "b")
) -> list[Row]:
    """Rows of random bytes; ``lengths`` are (prompt, completion) tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for i, (prompt, completion) in enumerate(lengths):
        ids = generator.integers(0, 256, prompt + completion).tolist()
        answer = (*ids[prompt:-1], STOP_ID) if completion else ()
        name = classes[i % len(classes)]
        rows.append(Row.of(ids[:prompt], answer, class_name=name, source=f"rows.jsonl:{i + 1}"))
    return rows


def context_of(row: Row) -> tuple[int, ...]:
    """What a row of one turn is given."""
    return row.segments[0].token_ids


def answer_of(row: Row) -> tuple[int, ...]:
    """The last answer of a row."""
    return row.segments[-1].token_ids


def tiny_cache(
    target: Target, rows: Sequence[Row], folder: Path, *, part_bytes: int = 1 << 16
) -> Path:
    """A finished cache of the rows, in several parts when they do not fit into one."""
    config = CacheConfig(part_bytes=part_bytes, chunk_bytes=1 << 13, batch_tokens=256)
    build_cache(target, rows, config, folder, Fingerprint.of_target(target))
    return folder
