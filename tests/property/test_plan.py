"""Plans lose no token, store none twice that can be shared, and are never misread."""

import hashlib
import io
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Row
from data.cache.plan import (
    Plan,
    Plans,
    load_plans,
    pack_row_ids,
    plan_key,
    plan_rows,
    plan_shared,
    save_plan,
)
from data.cache.store import LocalStore
from data.errors import CacheError

Tokens = tuple[int, ...]


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64 - 1, (count, 2), np.uint64, endpoint=True)


@dataclass(frozen=True)
class Case:
    rows: tuple[Tokens, ...]
    part_tokens: int
    min_prefix: int
    first_part: int

    @property
    def row_ids(self) -> np.ndarray:
        return random_ids(len(self.rows))

    @property
    def plan(self) -> Plan:
        sizes = (self.part_tokens, self.min_prefix, self.first_part)
        return plan_shared(self.rows, self.row_ids, *sizes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows that share beginnings: some are others cut short or gone on with, some are doubles."""
    # The large ids have other orders as signed bytes, as little-endian bytes and as text.
    tokens = st.lists(st.sampled_from([0, 1, 200, 256, 70_000]), max_size=6).map(tuple)
    rows: list[Tokens] = []
    for _ in range(draw(st.integers(1, 12))):
        known = draw(st.sampled_from(rows)) if rows else ()
        kept = known[: draw(st.integers(0, len(known)))]
        rows.append((*kept, *draw(tokens)) or (7,))
    room = max(len(row) for row in rows) + draw(st.integers(0, 20))
    return Case(tuple(rows), room, draw(st.integers(1, 4)), draw(st.integers(0, 3)))


def naive_pieces(rows: Sequence[Tokens], min_prefix: int) -> list[dict[Tokens, int]]:
    """For each row its shared pieces: all tokens up to the piece's end -> length of the piece.

    The trie is a dictionary from each prefix (without the rows' last tokens) to the number of rows
    that begin with it. Rows part at a prefix when none of its continuations has all of its rows.
    """
    count = Counter(row[:end] for row in rows for end in range(1, len(row)))
    longer: Counter[Tokens] = Counter()
    for prefix, passing in count.items():
        longer[prefix[:-1]] = max(passing, longer[prefix[:-1]])
    found = []
    for row in rows:
        pieces: dict[Tokens, int] = {}
        base = 0
        for end in range(1, len(row)):
            prefix = row[:end]
            parting = count[prefix] >= 2 and longer[prefix] < count[prefix]
            if parting and end - base >= min_prefix:
                pieces[prefix] = end - base
                base = end
        found.append(pieces)
    return found


def tokens_of(plan: Plan, rows: Sequence[Tokens], entry: int) -> Tokens:
    """All tokens up to the end of a piece, as its witness has them."""
    end = int(plan.offsets[entry] + plan.lengths[entry])
    return rows[int(plan.witnesses[entry])][:end]


def sharing(plan: Plan) -> Counter[int]:
    """How many rows pass each entry."""
    return Counter(e for row in range(plan.num_samples) for e in plan.path(row))


def require_rows_come_back(plan: Plan, rows: Sequence[Tokens], part_tokens: int) -> None:
    """Stores every piece once, as a build would, and puts the rows together again."""
    slots = np.full(plan.end_part * part_tokens, -1)
    for entry in range(len(plan.parts)):
        content = tokens_of(plan, rows, entry)[int(plan.offsets[entry]) :]
        assert len(content) == plan.lengths[entry] >= 1
        assert 0 <= plan.starts[entry] <= part_tokens - len(content)
        low = int(plan.parts[entry]) * part_tokens + int(plan.starts[entry])
        assert (slots[low : low + len(content)] == -1).all()
        slots[low : low + len(content)] = content
    assert (slots >= 0).sum() == plan.stored_tokens
    for row, expected in enumerate(rows):
        found: list[int] = []
        for entry in plan.path(row):
            assert plan.offsets[entry] == len(found)
            low = int(plan.parts[entry]) * part_tokens + int(plan.starts[entry])
            found += slots[low : low + int(plan.lengths[entry])].tolist()
        assert tuple(found) == expected
    assert plan.row_lengths.tolist() == [len(row) for row in rows]


@given(case=cases())
def test_pieces_of_a_row_are_its_tokens(case: Case) -> None:
    plan = case.plan
    assert plan.num_samples == len(case.rows)
    np.testing.assert_array_equal(plan.row_ids, case.row_ids)
    require_rows_come_back(plan, case.rows, case.part_tokens)
    assert [plan.path(row)[-1] for row in range(plan.num_samples)] == list(range(plan.num_samples))
    # A row's last token is in a piece that only this row has.
    assert all(sharing(plan)[row] == 1 for row in range(plan.num_samples))
    first_passing: dict[int, int] = {}
    for row in range(plan.num_samples):
        for entry in plan.path(row):
            first_passing.setdefault(entry, row)
    assert plan.witnesses.tolist() == [first_passing[e] for e in range(len(plan.parts))]


@given(case=cases())
def test_shared_pieces_are_those_of_a_naive_trie(case: Case) -> None:
    plan, own = case.plan, 0
    once: dict[Tokens, int] = {}
    for row, pieces in enumerate(naive_pieces(case.rows, case.min_prefix)):
        shared = plan.path(row)[:-1]
        assert plan.lengths[shared].tolist() == list(pieces.values())
        assert [tokens_of(plan, case.rows, e) for e in shared] == list(pieces)
        once |= pieces
        own += len(case.rows[row]) - sum(pieces.values())
    assert len(plan.parts) == len(case.rows) + len(once)
    assert plan.stored_tokens == sum(once.values()) + own <= sum(map(len, case.rows))


@given(case=cases())
def test_what_can_be_shared_is_shared(case: Case) -> None:
    plan, passing = case.plan, sharing(case.plan)
    for entry in range(plan.num_samples, len(plan.parts)):
        assert plan.lengths[entry] >= case.min_prefix
        assert passing[entry] >= 2
    for one, other in combinations(range(plan.num_samples), 2):
        mine, theirs = case.rows[one][:-1], case.rows[other][:-1]
        alike = [a == b for a, b in zip(mine, theirs, strict=False)]
        common = (*alike, False).index(False)
        both = set(plan.path(one)) & set(plan.path(other))
        stored_once = sum(int(plan.lengths[e]) for e in both)
        assert 0 <= common - stored_once < case.min_prefix


@given(case=cases())
def test_huge_min_prefix_shares_nothing(case: Case) -> None:
    plan = plan_shared(case.rows, case.row_ids, case.part_tokens, 1_000)
    assert (plan.parents == -1).all()
    assert plan.stored_tokens == sum(map(len, case.rows))
    assert len(plan.parts) == len(case.rows)


@given(case=cases())
def test_pieces_lie_depth_first_and_parts_are_filled(case: Case) -> None:
    plan = case.plan
    order = [e for part in range(case.first_part, plan.end_part) for e in plan.entries_of(part)]
    assert sorted(order) == list(range(len(plan.parts)))
    assert (plan.first_part, plan.starts[order[0]]) == (case.first_part, 0)
    place = {entry: i for i, entry in enumerate(order)}
    for entry, parent in enumerate(plan.parents.tolist()):
        assert parent == -1 or place[parent] < place[entry]
        assert parent == -1 or parent < entry or entry < plan.num_samples
    # Depth first with sorted children is the order of the tokens, without the rows' last ones.
    keys = [tokens_of(plan, case.rows, e)[: -1 if e < plan.num_samples else None] for e in order]
    assert keys == sorted(keys)
    for here, following in pairwise(order):
        end = int(plan.starts[here] + plan.lengths[here])
        if plan.parts[following] == plan.parts[here]:
            assert plan.starts[following] == end
        else:
            assert plan.parts[following] == plan.parts[here] + 1
            assert plan.starts[following] == 0
            assert end + plan.lengths[following] > case.part_tokens


@given(case=cases(), order=st.randoms(use_true_random=False))
def test_places_do_not_depend_on_the_order_of_the_rows(case: Case, order: random.Random) -> None:
    plan, numbers = case.plan, list(range(len(case.rows)))
    assert case.plan.to_bytes() == plan.to_bytes()
    order.shuffle(numbers)
    sizes = (case.part_tokens, case.min_prefix, case.first_part)
    arrays = (np.array(case.rows[i], dtype=np.int64) for i in numbers)
    moved = plan_shared(arrays, case.row_ids[numbers], *sizes)
    prefixes = range(len(numbers), len(plan.parts))
    for name in ("parts", "starts", "lengths", "parents"):
        expected = getattr(plan, name)[[*numbers, *prefixes]]
        np.testing.assert_array_equal(getattr(moved, name), expected)


@given(part_tokens=st.integers(1, 60), first_part=st.integers(0, 5), data=st.data())
def test_rows_are_packed_in_order_and_lie_longest_first(
    part_tokens: int, first_part: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, part_tokens), min_size=1, max_size=12))
    plan = plan_rows(lengths, random_ids(len(lengths)), part_tokens, first_part)
    rows = [tuple(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    require_rows_come_back(plan, rows, part_tokens)
    assert (plan.parents == -1).all()
    assert plan.first_part == first_part
    members = [plan.entries_of(p) for p in range(first_part, plan.end_part)]
    assert [i for m in members for i in sorted(m)] == list(range(len(lengths)))
    for part, inside in enumerate(members):
        assert inside == sorted(inside, key=lambda i: (-lengths[i], i))
        assert plan.starts[inside[0]] == 0
        for here, following in pairwise(inside):
            assert plan.starts[following] == plan.starts[here] + lengths[here]
        if part + 1 < len(members):  # closed only because the next row did not fit
            assert sum(lengths[i] for i in inside) + lengths[max(inside) + 1] > part_tokens


@pytest.mark.parametrize(("step", "min_prefix"), [(1, 1), (3, 2), (2, 5)])
def test_chain_of_3000_turns(step: int, min_prefix: int) -> None:
    turns = 3_000
    whole = np.random.default_rng(0).integers(0, 9, step * turns, np.int32)
    rows = [whole[: step * (turn + 1)] for turn in range(turns)]
    random.Random(0).shuffle(rows)
    plan = plan_shared(rows, random_ids(turns), len(whole), min_prefix)
    longest = plan.row_lengths.argmax()
    ends = [0]
    for shared in range(step - 1, len(whole) - step, step):  # a turn without its last token
        if shared - ends[-1] >= min_prefix:
            ends.append(shared)
    assert plan.lengths[plan.path(int(longest))].tolist() == np.diff([*ends, len(whole)]).tolist()
    assert plan.row_lengths.tolist() == [len(row) for row in rows]
    assert Plan.from_bytes(plan.to_bytes(), "").to_bytes() == plan.to_bytes()


def test_many_rows_behind_one_long_prefix() -> None:
    count = 20_000
    prefix = np.arange(1_000)
    tails = np.random.default_rng(0).permutation(count)
    rows = (np.append(prefix, [tail, tail]) for tail in tails)
    plan = plan_shared(rows, random_ids(count), 2_048, 16)
    assert plan.lengths.tolist() == [2] * count + [1_000]
    assert (plan.parents[:count] == count).all()
    # Rows lie by their tokens behind the prefix.
    inside = [e for part in range(plan.end_part) for e in plan.entries_of(part)]
    assert inside == [count, *np.argsort(tails).tolist()]


def test_each_of_many_parts_gives_its_entries() -> None:
    lengths = np.random.default_rng(0).integers(1, 10, 100_000)
    plan = plan_rows(lengths.tolist(), random_ids(len(lengths)), 12)
    assert plan.end_part > 40_000
    found = [e for part in range(plan.end_part) for e in plan.entries_of(part)]
    assert sorted(found) == list(range(len(lengths)))
    assert plan.entries_of(plan.end_part) == []


def test_last_token_is_never_shared() -> None:
    rows = [(1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 3, 4), (9,), (9,)]
    plan = plan_shared(rows, random_ids(6), 8, 1)
    pieces = [[int(plan.lengths[e]) for e in plan.path(i)] for i in range(6)]
    assert pieces == [[1, 1, 1], [1, 1, 1], [1, 1], [1, 1, 2], [1], [1]]
    assert plan.path(0)[:-1] == plan.path(1)[:-1] == plan.path(3)[:-1]
    assert plan.path(2)[:-1] == plan.path(0)[:1]


def test_rows_and_ids_must_pair_up() -> None:
    for ids in (1, 3):
        with pytest.raises(ValueError, match="zip"):
            plan_shared([(1, 2), (1, 3)], random_ids(ids), 8, 1)


@given(texts=st.lists(st.binary(min_size=16, max_size=16), max_size=4))
def test_row_ids_keep_their_128_bits(texts: list[bytes]) -> None:
    packed = pack_row_ids(text.hex() for text in texts)
    assert packed.dtype == np.uint64
    assert [f"{int(high):016x}{int(low):016x}" for high, low in packed] == [t.hex() for t in texts]
    row = Row.of((1, 2), (3,))
    assert pack_row_ids([row.row_id])[0, 0] >> np.uint64(1) == row.row_key


# ---- bytes ----


@given(case=cases())
def test_bytes_round_trip(case: Case) -> None:
    plan = case.plan
    content = plan.to_bytes()
    again = Plan.from_bytes(content, "here")
    for name in ("parts", "starts", "lengths", "parents", "row_ids"):
        mine, read = getattr(plan, name), getattr(again, name)
        assert mine.dtype == read.dtype
        np.testing.assert_array_equal(mine, read)
    assert again.to_bytes() == content
    table = np.load(io.BytesIO(content), allow_pickle=False)  # any reader of .npy files
    assert table.dtype == np.int64
    np.testing.assert_array_equal(table, table_of(plan))


def table_of(plan: Plan) -> np.ndarray:
    ids = np.zeros((len(plan.parts), 2), np.int64)
    ids[: plan.num_samples] = plan.row_ids.astype(np.int64)
    columns = [plan.parts, plan.starts, plan.lengths, plan.parents]
    lines = np.concatenate([np.stack(columns, axis=1), ids], axis=1)
    return np.concatenate([[[plan.num_samples, 0, 0, 0, 0, 0]], lines])


@settings(max_examples=200)
@given(case=cases(), data=st.data())
def test_damaged_bytes_are_refused(case: Case, data: st.DataObject) -> None:
    content = case.plan.to_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    zeroed = content[:at] + bytes(len(content) - at)
    for damaged in (bytes(flipped), content[:at], content + content[at:], b"", zeroed):
        if damaged != content:
            with pytest.raises(CacheError, match=r"^here: damaged plan"):
                Plan.from_bytes(damaged, "here")


def signed(array: np.ndarray) -> bytes:
    """A file whose checksum is right."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue() + hashlib.sha256(buffer.getvalue()).digest()


EXAMPLE = plan_shared([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6), (1, 2, 7), (8,)], random_ids(5), 5, 1)
# Entries: rows 0..4; prefix 5 (1, 2); prefix 6 (3). Part 0: row 4, prefix 5, rows 2 and 3. Part 1:
# prefix 6, rows 0 and 1.
PARENTS = [6, 6, 5, 5, -1, -1, 5]
# What the message says -> changed cells (line, column) of the table; line 0 is the header.
CONTRADICTIONS: dict[str, list[dict[tuple[int, int], int]]] = {
    "negative": [{(1, 0): -1}, {(1, 1): -1}],
    "empty": [{(1, 2): 0}, {(1, 2): -3}, {(1, 2): -(2**63)}],
    # No such entry; a row; itself; each other.
    "parent out of range": [{(1, 3): p} for p in (7, 2**40, -2, 1)] + [{(7, 3): 6}, {(6, 3): 6}],
    "prefix of no row": [{(1, 3): -1, (2, 3): -1}],
    "overlapping": [{(7, 1): 1}, {(7, 1): 2}, {(6, 2): 3}],
    "without pieces": [{(1, 0): 3, (2, 0): 3}, {(2, 0): 2**62}],
    "rows in 7 entries": [{(0, 0): 0}, {(0, 0): 8}, {(0, 0): -1}],
    "zeros": [{(0, 0): 4}, {(0, 1): 1}, {(6, 4): 1}, {(7, 5): 1}],
}


@pytest.mark.parametrize("problem", CONTRADICTIONS)
def test_contradictions_are_refused_though_the_checksum_is_right(problem: str) -> None:
    assert EXAMPLE.parents.tolist() == PARENTS
    assert Plan.from_bytes(signed(table_of(EXAMPLE)), "").to_bytes() == EXAMPLE.to_bytes()
    for changes in CONTRADICTIONS[problem]:
        table = table_of(EXAMPLE)
        for cell, value in changes.items():
            table[cell] = value
        with pytest.raises(CacheError, match=rf"^here: damaged plan \(.*{problem}"):
            Plan.from_bytes(signed(table), "here")


def test_other_arrays_are_refused() -> None:
    table = table_of(EXAMPLE)
    shapes: list[Any] = [table[:, :5], table[None], table.ravel(), 3, table[:0], table[:1]]
    types = [table.astype(dtype) for dtype in (np.int32, ">i8", np.float64, object)]
    for array in (*shapes, *types):
        with pytest.raises(CacheError, match=r"^here: damaged plan"):
            Plan.from_bytes(signed(array), "here")


def test_text_with_a_right_checksum_is_refused() -> None:
    for body in (b"", b"plan", b"PK\x03\x04"):
        with pytest.raises(CacheError, match=r"^here: damaged plan"):
            Plan.from_bytes(body + hashlib.sha256(body).digest(), "here")


# ---- a cache that grows ----


@st.composite
def growths(draw: st.DrawFn) -> Plans:
    plans: list[Plan] = []
    for case in draw(st.lists(cases(), min_size=1, max_size=4)):
        end = plans[-1].end_part if plans else 0
        plans.append(plan_shared(case.rows, case.row_ids, case.part_tokens, case.min_prefix, end))
    return Plans(tuple(plans))


@given(plans=growths())
def test_plans_join(plans: Plans) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = LocalStore(Path(name))
        for index, plan in enumerate(plans):
            save_plan(store, index, plan)
        assert sorted(store.list("")) == [plan_key(i) for i in range(len(plans))]
        again = Plans(tuple(load_plans(store)))
    assert [p.to_bytes() for p in again] == [p.to_bytes() for p in plans]
    assert again.digest() == plans.digest()
    assert plans.digest() != Plans(plans.plans[:-1]).digest()
    assert plans.num_samples == len(plans.row_ids) == sum(p.num_samples for p in plans)
    assert plans.row_ids.tolist() == [i for p in plans for i in p.row_ids.tolist()]
    assert plans.stored_tokens == sum(p.stored_tokens for p in plans)
    owners = [plans.plan_of_part(part) for part in range(plans.num_parts)]
    assert owners == [p for p in plans for _ in range(p.first_part, p.end_part)]
    for part in (-1, plans.num_parts):
        with pytest.raises(IndexError):
            plans.plan_of_part(part)


def test_new_cache_has_no_plans(tmp_path: Path) -> None:
    plans = Plans(tuple(load_plans(LocalStore(tmp_path))))
    assert (plans.num_parts, plans.num_samples, plans.stored_tokens) == (0, 0, 0)
    assert plans.row_ids.shape == (0, 2)


@pytest.fixture
def grown(tmp_path: Path) -> LocalStore:
    """Three plans of one part each."""
    store = LocalStore(tmp_path)
    for index in range(3):
        save_plan(store, index, plan_rows([2, 3], random_ids(2, index), 5, index))
    return store


def test_stored_plan_is_never_overwritten(grown: LocalStore) -> None:
    before = grown.read(plan_key(1))
    with pytest.raises(FileExistsError):
        save_plan(grown, 1, EXAMPLE)
    assert grown.read(plan_key(1)) == before


BAD: list[tuple[int, bytes | None, str]] = [
    (0, None, "missing plan"),
    (1, None, "missing plan"),
    (1, EXAMPLE.to_bytes()[:-1], "damaged plan"),
    (0, plan_rows([1], random_ids(1), 5, 1).to_bytes(), "begins with part 1 instead of 0"),
    (1, plan_rows([1], random_ids(1), 5, 0).to_bytes(), "begins with part 0 instead of 1"),
    (2, plan_rows([1], random_ids(1), 5, 3).to_bytes(), "begins with part 3 instead of 2"),
]


@pytest.mark.parametrize(
    ("index", "content", "problem"), BAD, ids=[f"{b[2]} ({b[0]})" for b in BAD]
)
def test_bad_plan_is_named(
    grown: LocalStore, index: int, content: bytes | None, problem: str
) -> None:
    grown.delete(plan_key(index))
    if content is not None:
        grown.write(plan_key(index), content)
    with pytest.raises(CacheError, match=f"^{grown.locate(plan_key(index))}: {problem}"):
        load_plans(grown)


def test_other_files_beside_the_plans_are_no_plans(grown: LocalStore) -> None:
    grown.write("plans/notes.txt", b"")
    grown.write("plans/old/plan-00000007.npy", b"")
    assert len(load_plans(grown)) == 3
