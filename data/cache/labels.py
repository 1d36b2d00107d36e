"""What a finished cache says of its rows besides their states: class, language, shared masks.

Kept beside each plan, so that a cache can be finished without the corpus that it came from.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.batch import Row
from data.cache.store import Store
from data.errors import CacheError


def labels_key(index: int) -> str:
    """Where the labels of a plan lie."""
    return f"plans/labels-{index:08d}.json"


@dataclass(frozen=True)
class Labels:
    """One entry a row, in the order of the plan.

    Attributes:
        classes, languages: of each row.
        sources: where each row came from, as ``file:line``.
        spans: supervised [start, end) of each row; only for rows whose prefix is shared, since
            rows that share tokens may supervise other ones.
    """

    classes: tuple[str, ...]
    languages: tuple[str, ...]
    sources: tuple[str, ...]
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, rows: Iterable[Row], prefix_lengths: Sequence[int]) -> "Labels":
        """The labels of rows, and how long the shared prefix of each is."""
        found = [
            (row.class_name, row.language, row.source, _spans(row, int(prefix)))
            for row, prefix in zip(rows, prefix_lengths, strict=True)
        ]
        columns = list(zip(*found, strict=True)) or [(), (), (), ()]
        return cls(*columns)

    def prefix_mask(self, index: int, length: int) -> np.ndarray:
        """Loss mask of the first ``length`` tokens of a row, uint8."""
        mask = np.zeros(length, np.uint8)
        for start, end in self.spans[index]:
            mask[start:end] = 1
        return mask

    def to_bytes(self) -> bytes:
        """JSON; names are kept once."""
        value: dict[str, Any] = {"sources": self.sources, "spans": self.spans}
        for name in ("classes", "languages"):
            texts = getattr(self, name)
            names = sorted(set(texts))
            place = {text: i for i, text in enumerate(names)}
            value[name] = {"names": names, "ids": [place[t] for t in texts]}
        return (json.dumps(value, separators=(",", ":")) + "\n").encode()

    @classmethod
    def load(cls, store: Store, index: int) -> "Labels":
        """Reads the labels of a plan.

        Raises:
            CacheError: missing or damaged.
        """
        key = labels_key(index)
        try:
            value = json.loads(store.read(key))
            texts = {
                name: tuple(str(value[name]["names"][i]) for i in value[name]["ids"])
                for name in ("classes", "languages")
            }
            spans = tuple(tuple((int(a), int(b)) for a, b in row) for row in value["spans"])
            return cls(
                texts["classes"], texts["languages"], tuple(map(str, value["sources"])), spans
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CacheError(
                f"{store.locate(key)}: unreadable ({error!r})\n"
                "  fix: run 'dspark cache mode=repair'"
            ) from error


def _spans(row: Row, length: int) -> tuple[tuple[int, int], ...]:
    """Supervised spans within the first ``length`` tokens."""
    found, at = [], 0
    for segment in row.segments:
        end = min(at + len(segment.token_ids), length)
        if segment.supervised and end > at:
            found.append((at, end))
        at += len(segment.token_ids)
        if at >= length:
            break
    return tuple(found)
