"""A built cache holds what the target computes, whatever its rows have in common."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.batch import CachedRow, Row
from data.cache.build import BuildSummary, build_cache
from data.cache.codecs import StateCodec
from data.cache.format import LAST, TAPS, array_specs
from data.cache.plan import load_plans
from data.cache.read import CacheReader
from data.cache.store import LocalStore
from data.cache.verify import verify_cache
from data.config import CacheConfig, Codec
from data.fingerprint import Fingerprint
from data.target import Target
from tests.support import tiny
from tests.support.cached import masked_row
from tests.support.tiny import random_rows, tiny_target

# A failure is shown as it was found: a smaller one would take minutes of builds.
BUILDS = settings(max_examples=8, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def build(target: Target, rows: Sequence[Row], folder: Path, **options: Any) -> BuildSummary:
    """One row a pass, in parts as small as the longest row lets them be, unless told otherwise."""
    sizes = {"part_bytes": 1, "chunk_bytes": 1 << 13, "batch_tokens": 1}
    checks = {"fidelity_tokens": 32, "self_check_tokens": 8, "max_tap_error": 1, "max_last_tv": 1}
    config = CacheConfig(**{**sizes, **checks, **options})
    return build_cache(target, rows, config, folder, Fingerprint.of_target(target))


def require_labels(reader: CacheReader, i: int, row: Row) -> CachedRow:
    found = reader[i]
    assert found.token_ids.tolist() == list(row.token_ids)
    assert found.loss_mask.tolist() == row.loss_mask
    assert found.row_key == row.row_key
    assert reader.length(i) == len(row)
    manifest, samples = reader.manifest, reader.samples
    assert manifest.class_names[samples.class_ids[i]] == row.class_name
    assert manifest.languages[samples.language_ids[i]] == row.language
    assert samples.sample_ids[i] == i
    return found


@BUILDS
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=9, unique=True
    ),
    part_bytes=st.sampled_from([1, 1 << 14, 1 << 16]),
    batch_tokens=st.sampled_from([1, 64]),
)
def test_exact_cache_holds_what_the_target_computes(
    target: Target, sizes: Sequence[tuple[int, int]], part_bytes: int, batch_tokens: int
) -> None:
    rows = random_rows(sizes, seed=len(sizes))
    # Rows of one pass are padded together: sums in another order may round to the next bf16.
    rtol, atol = (0.0, 0.0) if batch_tokens == 1 else (2**-7, 1e-3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = build(target, rows, folder, part_bytes=part_bytes, batch_tokens=batch_tokens)
        reader = CacheReader(folder)
        assert reader.header.tap_layers == tiny.TAPS
        for i, row in enumerate(rows):
            found = require_labels(reader, i, row)
            output = target.forward(torch.tensor([row.token_ids]))
            for mine, own in ((found.taps, output.taps), (found.last, output.last)):
                torch.testing.assert_close(mine, own[0].bfloat16(), rtol=rtol, atol=atol)
        manifest, tokens = built.manifest, sum(len(row) for row in rows)
        assert len(reader) == manifest.num_samples == len(rows)
        assert (manifest.num_tokens, manifest.stored_tokens) == (tokens, tokens)
        assert manifest.computed_tokens == tokens
        assert manifest.num_parts == built.parts_built
        report = verify_cache(LocalStore(folder))
        assert (report.objects, report.problems) == (4 * manifest.num_parts, ())
        objects = [p for p in (folder / "data.zarr").glob("*/c.*") if p.is_file()]
        assert manifest.total_bytes == sum(p.stat().st_size for p in objects)


def groups(codec: StateCodec, states: Tensor) -> Tensor:
    """Groups of 64 channels in fp64, without those that are kept exactly."""
    wide = states.double().clone()
    if codec.outlier_ids is not None:
        wide.scatter_(-1, codec.outlier_ids.expand(len(wide), *codec.outlier_ids.shape), 0.0)
    grouped: Tensor = wide.unflatten(-1, (-1, 64))
    return grouped


@pytest.mark.parametrize("kind", Codec)
def test_lossy_cache_keeps_within_its_codecs_error(
    target: Target, tmp_path: Path, kind: Codec
) -> None:
    rows = random_rows([(5, 9), (1, 3), (12, 8)])
    build(target, rows, tmp_path, taps=kind.value, last=kind.value)
    reader = CacheReader(tmp_path)
    for i, row in enumerate(rows):
        found = require_labels(reader, i, row)
        output = target.forward(torch.tensor([row.token_ids]))
        assert found.last is not None
        for name, mine, own in ((TAPS, found.taps, output.taps), (LAST, found.last, output.last)):
            codec = reader.header.codec(name)
            assert torch.equal(mine, codec.decode(codec.encode(own[0])))
            exact, error = groups(codec, own[0]), groups(codec, mine - own[0].double())
            # Decoded states were rounded to bf16 at last, by 2^-8 of a value at most.
            bound = codec.error_bound() + 2**-8 * (1 + codec.error_bound())
            assert bool((error.norm(dim=-1) <= bound * exact.norm(dim=-1)).all())


@pytest.mark.parametrize(("last", "k"), [(None, 7), ("bf16", 200), (None, 1000)])
def test_kept_law_is_the_top_of_the_targets(
    target: Target, tmp_path: Path, last: str | None, k: int
) -> None:
    rows = random_rows([(5, 9), (1, 3)])
    build(target, rows, tmp_path, taps="int8-h64-g64", last=last, topk=k)
    reader = CacheReader(tmp_path)
    k = min(k, 259)
    for i, row in enumerate(rows):
        found = require_labels(reader, i, row)
        assert (found.last is None) == (last is None)
        logits = target.logits(target.forward(torch.tensor([row.token_ids])).last[0])
        law, kept = logits.log_softmax(-1), found.topk
        assert kept is not None
        assert kept.ids.shape == kept.logprobs.shape == (len(row), k)
        assert torch.equal(kept.ids, law.topk(k).indices)
        # fp16 has 11 significant bits.
        torch.testing.assert_close(kept.logprobs, law.topk(k).values, rtol=2**-11, atol=2**-24)
        torch.testing.assert_close(kept.logsumexp, logits.logsumexp(-1), rtol=1e-6, atol=0.0)


@st.composite
def families(draw: st.DrawFn) -> list[Row]:
    """Trees of rows: each goes on from some token of an earlier one, or ends there, or is that row
    with another mask. The longest comes first: later ones must fit into the parts chosen for it.
    """
    numbers = draw(st.randoms(use_true_random=False))
    rows: dict[str, Row] = {}
    for i in range(draw(st.integers(4, 12))):
        known = numbers.choice(list(rows.values())).token_ids if rows else ()
        kept = known[: numbers.choice([len(known), numbers.randint(0, len(known))])]
        more = numbers.choices(range(256), k=numbers.randint(0 if kept else 1, 12))
        mask = [numbers.random() < 0.5 for _ in (*kept, *more)]
        name = {"class_name": numbers.choice("ab"), "source": f"rows:{i}", "language": "de"}
        row = masked_row([*kept, *more], mask, **name)
        rows[row.row_id] = row
    return sorted(rows.values(), key=len, reverse=True)


def same_bits(one: Tensor, other: Tensor) -> int:
    """How many bf16 values are the same; the others must be neighbours, or as good as zero."""
    a, b = one.view(torch.int16).int(), other.view(torch.int16).int()
    near = ((a - b).abs() <= 1) | ((one.float() - other.float()).abs() < 1e-5)
    assert bool(near.all())
    return int((a == b).sum())


def require_same_rows(plain: CacheReader, shared: CacheReader, rows: Sequence[Row]) -> float:
    """Rows of two caches; the share of equal bits of their states."""
    same = total = 0
    for i, row in enumerate(rows):
        one, other = require_labels(plain, i, row), require_labels(shared, i, row)
        for mine, own in ((one.taps, other.taps), (one.last, other.last)):
            assert mine is not None
            assert own is not None
            same, total = same + same_bits(mine, own), total + mine.numel()
    return same / total


@BUILDS
@given(
    rows=families(),
    min_prefix=st.integers(1, 6),
    first=st.integers(1, 12),
    batch_tokens=st.sampled_from([1, 64]),
)
def test_sharing_prefixes_changes_nothing_that_is_read(
    target: Target, rows: list[Row], min_prefix: int, first: int, batch_tokens: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        plain, shared = (Path(name) / n for n in ("plain", "shared"))
        build(target, rows, plain)
        options = {"share_prefix": True, "share_prefix_min": min_prefix}
        options["batch_tokens"] = batch_tokens
        build(target, rows[:first], shared, **options)
        manifest = build(target, rows, shared, **options, add_rows=True).manifest
        store = LocalStore(shared)
        plans = load_plans(store)
        assert [plan.num_samples for plan in plans] == [
            n for n in (min(first, len(rows)), len(rows) - first) if n > 0
        ]
        reader = CacheReader(shared)
        assert require_same_rows(CacheReader(plain), reader, rows) >= 0.995
        stored = sum(plan.stored_tokens for plan in plans)
        assert manifest.stored_tokens == stored <= manifest.num_tokens == sum(map(len, rows))
        assert manifest.computed_tokens >= stored
        assert (len(reader.samples.prefixes["length"]) > 0) == (stored < manifest.num_tokens)
        assert verify_cache(store).problems == ()


def conversations() -> list[Row]:
    """A chat whose turns are prefixes of each other, with two more rows that go on from each turn
    in another way, one before and one behind the chat in the order of tokens; and twelve questions
    to one system prompt.
    """
    numbers = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return [int(i) for i in numbers.integers(1, 255, count)]

    system, chat, rows = ids(50), ids(20), []
    for _ in range(6):
        rows.append(masked_row(chat, [False] * (len(chat) - 9) + [True] * 9))
        for token in (0, 255):
            other = [*chat, token, *ids(4)]
            rows.append(masked_row(other, [False] * len(chat) + [True] * 5))
        chat = [*chat, *ids(15)]
    rows.append(masked_row(rows[-1].token_ids, [True] * len(rows[-1])))
    for i in range(12):
        own = ids(5 + i)
        rows.append(masked_row([*system, *own], [False] * 55 + [True] * (len(own) - 5)))
    return rows[::-1]


def test_parents_in_other_parts_are_computed_again_and_stored_once(
    target: Target, tmp_path: Path
) -> None:
    all_rows = conversations()
    first, second = all_rows[0::2], all_rows[1::2]  # two plans, each with both families
    rows = [*first, *second]
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    build(target, rows, plain)
    options: Any = {"share_prefix": True, "share_prefix_min": 8, "batch_tokens": 256}
    build(target, first, shared, **options)
    manifest = build(target, rows, shared, **options, add_rows=True).manifest
    assert require_same_rows(CacheReader(plain), CacheReader(shared), rows) >= 0.995
    for plan in load_plans(LocalStore(shared)):
        below = np.flatnonzero(plan.parents >= 0)
        assert (plan.parts[plan.parents[below]] != plan.parts[below]).any()
        assert plan.stored_tokens < 0.6 * plan.row_lengths.sum()
    assert manifest.stored_tokens < manifest.computed_tokens < manifest.num_tokens


def poisoned(target: Target, token_ids: Sequence[int], at: int) -> Any:
    """Makes one state of rows that begin like this one infinite."""

    def hook(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        for b, ids in enumerate(kwargs["input_ids"].tolist()):
            if ids[: len(token_ids)] == list(token_ids):
                output.last_hidden_state[b, at, 0] = torch.inf

    return target.decoder.register_forward_hook(hook, with_kwargs=True)


def test_row_with_unusable_states_is_quarantined_by_its_source(
    target: Target, tmp_path: Path
) -> None:
    rows = random_rows([(4, 5), (9, 12), (3, 14)])
    handle = poisoned(target, rows[1].token_ids, 2)
    try:
        manifest = build(target, rows, tmp_path, fidelity_tokens=1).manifest
    finally:
        handle.remove()
    reason = "states that are not finite, or too large for the codec"
    assert manifest.skipped == ((rows[1].row_id, rows[1].source, reason),)
    line = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert line == {"source": rows[1].source, "reason": reason}
    reader = CacheReader(tmp_path)
    kept = [reader[i].token_ids.tolist() for i in range(len(reader))]
    assert kept == [list(rows[0].token_ids), list(rows[2].token_ids)]
    assert reader.samples.sample_ids.tolist() == [0, 2]
    assert manifest.num_tokens == len(rows[0]) + len(rows[2])


def test_every_row_with_an_unusable_prefix_is_quarantined(target: Target, tmp_path: Path) -> None:
    rows = conversations()[:3] + random_rows([(4, 5)])
    handle = poisoned(target, rows[0].token_ids[:50], 49)
    try:
        options = {"share_prefix": True, "fidelity_tokens": 1}
        manifest = build(target, rows, tmp_path, **options).manifest
    finally:
        handle.remove()
    assert {name for name, _, _ in manifest.skipped} == {row.row_id for row in rows[:3]}
    reader = CacheReader(tmp_path)
    assert [reader[i].row_key for i in range(len(reader))] == [rows[3].row_key]
    assert verify_cache(LocalStore(tmp_path)).objects == manifest.num_parts * len(
        array_specs(reader.header)
    )
