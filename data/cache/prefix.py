"""Which rows begin alike: the prefix tree over the rows' token ids.

Sorted as bytes, rows that begin alike are neighbours, so the whole tree follows from the number of
tokens that each row has in common with the one before it. Nothing recurses: a chat of n turns, each
turn a prefix of the next, is a tree of depth n.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

TOKEN_BYTES = 4


@dataclass(frozen=True)
class PrefixTree:
    """Pieces that make up the rows. Entries 0..n-1 are the rows' own, last pieces; further entries
    are shared prefixes, every one behind its parent.

    Attributes:
        lengths: tokens of each piece, int64 [N].
        parents: the piece before it, -1 for none, int64 [N].
        order: all entries depth first: parents before children, children by their tokens. [N]
    """

    lengths: np.ndarray
    parents: np.ndarray
    order: np.ndarray


def prefix_tree(
    rows: Iterable[Sequence[int] | np.ndarray], row_ids: np.ndarray, min_prefix: int
) -> PrefixTree:
    """Splits rows into pieces so that what several of them begin with is a piece of its own.

    A shared piece has at least ``min_prefix`` (from 1) tokens, and at least two rows pass it. A
    shorter one is left to its children. The decisions are taken from the root on, so two rows have
    fewer than ``min_prefix`` common tokens behind the last piece that they share.

    A row's last token takes no part: it lies in a piece that only this row has, whatever the other
    rows are. So each row, also the beginning or the double of another one, has an entry.

    Rows with the same tokens are told apart by ``row_ids``, uint64 [n, 2], not by their places: the
    order of the rows changes their numbers, but no piece and not the order of the pieces.
    """
    keys = [_key(row) for row, _ in zip(rows, row_ids, strict=True)]
    by_id: list[int] = np.lexsort((row_ids[:, 1], row_ids[:, 0])).tolist()
    ordered = sorted(by_id, key=keys.__getitem__)
    commons = [_common(keys[a], keys[b]) for a, b in pairwise(ordered)]
    groups = _groups(commons)[::-1]  # from the end on, so that the next one is popped
    lengths, parents = [0] * len(keys), [-1] * len(keys)
    order = []
    # Shared pieces around the current row: last row of the group, entry, tokens up to its end.
    around = [(len(keys), -1, 0)]
    for place, row in enumerate(ordered):
        while around[-1][0] < place:
            around.pop()
        while groups and groups[-1][0] == place:
            _, depth, last = groups.pop()
            _, parent, offset = around[-1]
            if depth - offset >= min_prefix:
                around.append((last, len(lengths), depth))
                order.append(len(lengths))
                lengths.append(depth - offset)
                parents.append(parent)
        _, parents[row], offset = around[-1]
        lengths[row] = len(keys[row]) // TOKEN_BYTES + 1 - offset
        order.append(row)
    return PrefixTree(*(np.array(column, dtype=np.int64) for column in (lengths, parents, order)))


def _key(row: Sequence[int] | np.ndarray) -> bytes:
    """All tokens but the last; big-endian, so that bytes compare as the numbers do."""
    return np.asarray(row[:-1], dtype=">i4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Number of tokens with which both begin."""
    count = min(len(one), len(other)) // TOKEN_BYTES
    if not count:
        return 0
    differ = np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    first = int(differ.argmax())
    return first if differ[first] else count


def _groups(commons: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of sorted rows that begin alike, as (first, tokens in common, last); outer before inner.

    ``commons[i]`` is what rows i and i + 1 have in common. A run has two rows at least, and no row
    beside it has as many tokens in common with it.
    """
    found = []
    growing: list[tuple[int, int]] = []  # (first, tokens), tokens increasing
    for row, common in enumerate([*commons, 0]):
        first = row
        while growing and growing[-1][1] > common:
            first, depth = growing.pop()
            found.append((first, depth, row))
        if common and (not growing or growing[-1][1] < common):
            growing.append((first, common))
    return sorted(found)
