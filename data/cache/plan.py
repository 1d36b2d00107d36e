"""Where every stored piece lies: the plan of a cache, from row lengths or with shared prefixes.

A cache that grows has several plans, ``plans/plan-00000000.npy`` and so on, each for parts of its
own. A plan is written once and never changed. See docs/cache-format.md.
"""

import hashlib
import io
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.cache.prefix import prefix_tree
from data.cache.store import Store
from data.errors import CacheError

PLACES, COLUMNS = 4, 6  # part, start, length, parent; row id, its high and low 64 bits
DIGEST_BYTES = 32
NO_PARENT = -1
PLAN_KEY = re.compile(r"plans/plan-(\d{8})\.npy")


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every stored piece lies, and which pieces make up a row.

    Entries 0..num_samples-1 are the rows' own (last) pieces in the order of the rows; further
    entries are shared prefixes, every one behind its parent. Plans are compared by `to_bytes`.

    Attributes:
        parts: part of each piece, int64 [N].
        starts: first token slot inside the part, int64 [N].
        lengths: tokens of the piece, int64 [N].
        parents: entry of the piece before it, -1 for none, int64 [N].
        row_ids: the 128 bits of `Row.row_id`, high and low, uint64 [num_samples, 2].
    """

    parts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    parents: np.ndarray
    row_ids: np.ndarray

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return len(self.row_ids)

    @cached_property
    def first_part(self) -> int:
        """The first part of this plan."""
        return int(self.parts.min())

    @cached_property
    def end_part(self) -> int:
        """The part behind the last one."""
        return int(self.parts.max()) + 1

    @property
    def stored_tokens(self) -> int:
        """Token slots that are used."""
        return int(self.lengths.sum())

    def path(self, entry: int) -> list[int]:
        """The entries whose tokens, one after another, end with this one's: root .. entry."""
        found = []
        while entry != NO_PARENT:
            found.append(entry)
            entry = int(self.parents[entry])
        return found[::-1]

    @cached_property
    def offsets(self) -> np.ndarray:
        """Tokens of the row before each piece, int64 [N]."""
        lengths, parents = self.lengths.tolist(), self.parents.tolist()
        ends = [0] * (len(lengths) + 1)  # the last one is what -1 finds
        for entry in range(self.num_samples, len(lengths)):
            ends[entry] = ends[parents[entry]] + lengths[entry]
        before: np.ndarray = np.array(ends, dtype=np.int64)[self.parents]
        return before

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row with what it shares, int64 [num_samples]."""
        ends: np.ndarray = self.offsets + self.lengths
        return ends[: self.num_samples]

    @cached_property
    def witnesses(self) -> np.ndarray:
        """For every entry the first sample whose path goes through it, int64 [N]."""
        count, parents = self.num_samples, self.parents.tolist()
        found = [*range(count), *[count] * (len(parents) - count + 1)]  # the last one is for -1
        # Rows first, then prefixes from the last one on: children before their parents.
        for entry in (*range(count), *range(len(parents) - 1, count - 1, -1)):
            parent = parents[entry]
            found[parent] = min(found[parent], found[entry])
        return np.array(found[:-1], dtype=np.int64)

    @cached_property
    def _by_place(self) -> tuple[np.ndarray, np.ndarray]:
        """All entries by part and start, and the part of each of them."""
        order = np.lexsort((self.starts, self.parts))
        return order, self.parts[order]

    def entries_of(self, part: int) -> list[int]:
        """Entries of one part, in the order in which they lie in it."""
        order, parts = self._by_place
        low, high = np.searchsorted(parts, [part, part + 1])
        entries: list[int] = order[low:high].tolist()
        return entries

    def to_bytes(self) -> bytes:
        """A .npy file, then the SHA-256 of it, which readers of .npy files do not look at.

        The array is int64 [1 + N, 6]: (num_samples, 0, ...), then one line an entry: part, start,
        length, parent, and the row id's bits (zeros for prefixes).
        """
        table = np.zeros((1 + len(self.parts), COLUMNS), dtype="<i8")
        table[0, 0] = self.num_samples
        places = (self.parts, self.starts, self.lengths, self.parents)
        table[1:, :PLACES] = np.stack(places, axis=1)
        table[1 : 1 + self.num_samples, PLACES:] = self.row_ids.view(np.int64)
        buffer = io.BytesIO()
        np.save(buffer, table, allow_pickle=False)
        content = buffer.getvalue()
        return content + hashlib.sha256(content).digest()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Plan":
        """Reads what `to_bytes` wrote; nothing is unpickled.

        Raises:
            CacheError: names ``where``; the content is damaged or contradicts itself.
        """
        try:
            table = _parse(content)
            ids = table[1 : 1 + int(table[0, 0]), PLACES:].copy().view(np.uint64)
            parts, starts, lengths, parents = table[1:, :PLACES].T.copy()
            plan = cls(parts, starts, lengths, parents, ids)
            for problem in plan._problems():
                raise ValueError(problem)
        except ValueError as error:
            raise _error(where, f"damaged plan ({error})") from error
        return plan

    def _problems(self) -> Iterator[str]:
        """What contradicts itself. The first one counts: each check relies on those before it."""
        count, total = self.num_samples, len(self.parts)
        if min(self.parts.min(), self.starts.min()) < 0 or self.lengths.min() < 1:
            yield "negative place, or empty piece"
        # Rows are nobody's parent; a prefix lies behind its parent, so there are no cycles.
        limits = np.where(np.arange(total) < count, total, np.arange(total))
        known = (self.parents >= count) & (self.parents < limits)
        if not (known | (self.parents == NO_PARENT)).all():
            yield "parent out of range"
        if not np.isin(np.arange(count, total), self.parents).all():
            yield "prefix of no row"
        order, parts = self._by_place
        steps, room = np.diff(parts), np.diff(self.starts[order])
        if (steps > 1).any():
            yield "part without pieces"
        if ((steps == 0) & (room < self.lengths[order][:-1])).any():
            yield "overlapping pieces"


def _error(where: str, problem: str) -> CacheError:
    return CacheError(f"{where}: {problem}\n  fix: rebuild the cache")


def _parse(content: bytes) -> np.ndarray:
    """The table of a plan. Raises ValueError."""
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    # Before anything is parsed: numpy never sees damaged bytes.
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("truncated or overwritten")
    table: np.ndarray = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
    if table.dtype != np.dtype("<i8") or table.shape[1:] != (COLUMNS,) or not len(table):
        raise ValueError(f"{table.dtype} {table.shape} instead of int64 [1 + entries, {COLUMNS}]")
    count, total = int(table[0, 0]), len(table) - 1
    if not 1 <= count <= total:
        raise ValueError(f"{count} rows in {total} entries")
    if table[0, 1:].any() or table[1 + count :, PLACES:].any():
        raise ValueError("values where zeros belong")
    return table


def pack_row_ids(row_ids: Iterable[str]) -> np.ndarray:
    """`Row.row_id` of rows as `Plan.row_ids` has them, uint64 [n, 2]."""
    words = np.array([[int(i[:16], 16), int(i[16:], 16)] for i in row_ids], dtype=np.uint64)
    return words.reshape(-1, 2)


def plan_rows(
    lengths: Sequence[int], row_ids: np.ndarray, part_tokens: int, first_part: int = 0
) -> Plan:
    """Packs rows in their order into parts, one piece a row; inside a part the longest come first.

    Places depend on the lengths alone, so that part k holds the same rows at the same slots whoever
    builds it, and equal lengths lie together for the target's batches. No row is longer than
    ``part_tokens``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    parts = _fill(sizes, part_tokens, first_part)
    starts = _starts(parts, sizes, np.lexsort((-sizes, parts)))
    return Plan(parts, starts, sizes, np.full_like(sizes, NO_PARENT), row_ids)


def plan_shared(
    rows: Iterable[Sequence[int] | np.ndarray],
    row_ids: np.ndarray,
    part_tokens: int,
    min_prefix: int,
    first_part: int = 0,
) -> Plan:
    """Packs rows so that what several of them begin with is stored once (see `prefix_tree`).

    Pieces are packed depth first, so that a prefix tends to lie beside its rows. The places depend
    on the tokens and ids of the rows, not on the order of the rows.
    """
    tree = prefix_tree(rows, row_ids, min_prefix)
    parts = np.empty_like(tree.lengths)
    parts[tree.order] = _fill(tree.lengths[tree.order], part_tokens, first_part)
    starts = _starts(parts, tree.lengths, tree.order)
    return Plan(parts, starts, tree.lengths, tree.parents, row_ids)


def _fill(lengths: np.ndarray, part_tokens: int, first_part: int) -> np.ndarray:
    """Part of each piece: a part is closed by the first piece that it has no room for."""
    parts = []
    part, used = first_part, 0
    for length in lengths.tolist():
        if used + length > part_tokens:
            part, used = part + 1, 0
        parts.append(part)
        used += length
    return np.array(parts, dtype=np.int64)


def _starts(parts: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """First slot of each piece, when they lie in ``order``, part by part, without gaps."""
    before = np.cumsum(lengths[order]) - lengths[order]
    _, firsts, counts = np.unique(parts[order], return_index=True, return_counts=True)
    starts = np.empty_like(lengths)
    starts[order] = before - np.repeat(before[firsts], counts)
    return starts


@dataclass(frozen=True, eq=False)
class Plans:
    """All plans of a cache: samples and parts are numbered through them."""

    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return self.plans[-1].end_part if self.plans else 0

    @property
    def num_samples(self) -> int:
        """Number of rows."""
        return sum(plan.num_samples for plan in self.plans)

    @property
    def stored_tokens(self) -> int:
        """Token slots that are used."""
        return sum(plan.stored_tokens for plan in self.plans)

    @cached_property
    def row_ids(self) -> np.ndarray:
        """`Plan.row_ids` of all rows, uint64 [num_samples, 2]."""
        none = np.empty((0, 2), dtype=np.uint64)
        return np.concatenate([none, *(plan.row_ids for plan in self.plans)])

    def plan_of_part(self, part: int) -> Plan:
        """The plan that a part belongs to.

        Raises:
            IndexError: there is no such part.
        """
        if not 0 <= part < self.num_parts:
            raise IndexError(f"part {part} of {self.num_parts}")
        return self.plans[bisect_right(self.plans, part, key=lambda plan: plan.first_part) - 1]

    def digest(self) -> str:
        """SHA-256 of all plans, in hex digits."""
        return hashlib.sha256(b"".join(plan.to_bytes() for plan in self.plans)).hexdigest()


def plan_key(index: int) -> str:
    """The name under which a plan is stored."""
    return f"plans/plan-{index:08d}.npy"


def save_plan(store: Store, index: int, plan: Plan) -> None:
    """Stores a plan. Raises FileExistsError when there is one with this number."""
    store.create(plan_key(index), plan.to_bytes())


def load_plans(store: Store) -> list[Plan]:
    """All plans in their order; none in a new cache.

    Raises:
        CacheError: one is missing or damaged, or does not go on where the one before it ends.
    """
    numbers = [int(m[1]) for key in store.list("plans/") if (m := PLAN_KEY.fullmatch(key))]
    plans: list[Plan] = []
    for index in range(max(numbers, default=-1) + 1):
        key = plan_key(index)
        where = store.locate(key)
        try:
            plan = Plan.from_bytes(store.read(key), where)
        except FileNotFoundError as error:
            raise _error(where, "missing plan") from error
        expected = plans[-1].end_part if plans else 0
        if plan.first_part != expected:
            raise _error(where, f"begins with part {plan.first_part} instead of {expected}")
        plans.append(plan)
    return plans
