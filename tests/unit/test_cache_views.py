"""What is said of a cache, before it is built and afterwards; ways to build the same cache."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data.batch import Row
from data.cache import verify
from data.cache.build import BuildSummary, build_cache
from data.cache.estimate import Choice, Estimate, estimate_cache, estimate_table
from data.cache.fidelity import measure_choice, require_fidelity, take_probe
from data.cache.format import array_specs, load_header, token_bytes
from data.cache.plan import load_plans
from data.cache.read import CacheReader
from data.cache.records import commit_key
from data.cache.start import require_space
from data.cache.store import LocalStore
from data.cache.verify import describe_cache, verify_cache
from data.config import CacheConfig, Codec, Precision, TargetConfig
from data.errors import CacheError
from data.explain import cached_row
from data.fingerprint import Fingerprint
from data.spool import RowSpool
from data.target import Target
from data.tiny import MASK_ID
from tests.support.cached import header_of, make_case, masked_row, mixed_rows, write_cache
from tests.support.tiny import CPU, TAPS, random_rows, tiny_target

ROWS = random_rows([(20, 25), (3, 40), (17, 30), (9, 9), (1, 30)], seed=3)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def config_of(**options: Any) -> CacheConfig:
    sizes = {"part_bytes": 1 << 15, "chunk_bytes": 1 << 13, "batch_tokens": 128}
    checks = {"fidelity_tokens": 64, "self_check_tokens": 8, "max_tap_error": 1, "max_last_tv": 1}
    return CacheConfig(**{**sizes, **checks, **options})


def build(target: Target, folder: Path, rows: Sequence[Row] = ROWS, **options: Any) -> BuildSummary:
    fingerprint = Fingerprint.of_target(target)
    return build_cache(target, rows, config_of(**options), folder, fingerprint)


def objects(folder: Path) -> dict[str, bytes]:
    files = [p for p in (folder / "data.zarr").glob("*/c.*") if p.is_file()]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def test_description_says_what_is_in_the_cache(target: Target, tmp_path: Path) -> None:
    options: Any = {"taps": "int8-h64-g64", "last": None, "topk": 9, "share_prefix": True}
    rows = [*ROWS, masked_row([*ROWS[0].token_ids, 5], [True] * 46, class_name="math")]
    manifest = build(target, tmp_path, rows, **options).manifest
    found = describe_cache(LocalStore(tmp_path))
    tokens = sum(map(len, rows))
    header = load_header(LocalStore(tmp_path))
    size = manifest.total_bytes / tokens
    stored, computed = manifest.stored_tokens, manifest.computed_tokens
    assert stored == tokens - 44  # a row's last token is its own
    assert {k: v for k, v in found.items() if not k.startswith("fidelity")} == {
        "rows": "6 (a 3, b 2, math 1)",
        "tokens": f"{tokens:,}",
        "size": f"{manifest.total_bytes / 1e9:.3f} GB",
        "bytes per token": f"{size:,.0f}, {size / 512:.3f} of raw bf16 states (512)",
        "taps": "layers [0, 1, 2] of width 64, int8-h64-g64",
        "last state": "not stored",
        "law": "top 9 log-probabilities",
        "shared prefixes": f"{stored} tokens stored ({stored / tokens:.1%}), "
        f"{computed} computed ({computed / tokens:.1%})",
        "parts": f"{manifest.num_parts} of {header.part_tokens} tokens",
        "skipped rows": "0",
        "id": header.cache_uuid,
    }
    taps = found["fidelity of hidden"]
    assert taps.startswith("codec int8-h64-g64, rel_l2 0.00")
    assert "rel_l2_without_4_largest" in taps
    assert "k 9, mass 0." in found["fidelity of topk"]


def padding(folder: Path) -> tuple[int, int]:
    """Bytes of the objects that hold no token: of whole chunks, and of what compression cannot
    touch (indexes, checksums, control arrays).
    """
    store = LocalStore(folder)
    header, chunks, rest = load_header(store), 0, 0
    for plan in load_plans(store):
        for part in range(plan.first_part, plan.end_part):
            used = int(plan.lengths[plan.entries_of(part)].sum())
            for spec in array_specs(header):
                size = header.chunk_tokens if spec.sharded else header.part_tokens
                count = -(-used // size)
                empty = (count * size - used) * spec.token_bytes
                index = 16 * header.layout.chunks_per_part + 4 if spec.sharded else 0
                chunks += empty if spec.sharded else 0
                rest += (0 if spec.sharded else empty) + 4 * count + index
    return chunks, rest


@pytest.fixture(scope="module")
def estimate(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Estimate:
    config = config_of(taps="int8-h64-g64-out8", last=None, topk=7)
    return estimate_cache(target, ROWS, config, LocalStore(tmp_path_factory.mktemp("room")))


def options_of(choice: Choice) -> dict[str, Any]:
    last = choice.last.value if choice.last else None
    return {"taps": choice.taps.value, "last": last, "topk": choice.topk}


def test_estimate_counts_the_corpus_and_names_the_asked_choice_first(
    target: Target, estimate: Estimate, tmp_path: Path
) -> None:
    tokens = sum(map(len, ROWS))
    assert (estimate.rows, estimate.tokens, estimate.stored_tokens) == (5, tokens, tokens)
    assert estimate.hours == pytest.approx(tokens / estimate.tokens_per_s / 3600)
    assert estimate.free_bytes is not None
    first = estimate.choices[0]
    assert options_of(first) == {"taps": "int8-h64-g64-out8", "last": None, "topk": 7}
    assert [choice.asked for choice in estimate.choices[1:]] == [False] * (
        len(estimate.choices) - 1
    )
    assert first.asked
    for choice in estimate.choices:
        assert choice.of_raw == pytest.approx(choice.token_bytes / 512)
        assert choice.total_bytes == pytest.approx(choice.token_bytes * tokens)
    # What is asked for is not listed twice.
    again = estimate_cache(target, ROWS, config_of(), LocalStore(tmp_path)).choices
    assert [again[0].taps, again[0].last, again[0].asked] == [Codec.bf16, Codec.bf16, True]
    assert {str(options_of(choice)) for choice in again} == {
        str(options_of(choice)) for choice in estimate.choices[1:]
    }
    assert len(again) == len(estimate.choices) - 1


def test_estimate_is_what_a_build_costs(target: Target, estimate: Estimate, tmp_path: Path) -> None:
    for number, choice in enumerate(estimate.choices):
        folder = tmp_path / str(number)
        built = build(target, folder, **options_of(choice)).manifest.total_bytes
        assert built == sum(map(len, objects(folder).values()))
        chunks, rest = padding(folder)
        if choice.taps is Codec.bf16_zstd:
            assert choice.of_raw < 0.95
            assert built - rest == pytest.approx(choice.total_bytes, rel=0.1)
        else:
            assert choice.total_bytes == built - rest - chunks
        config = config_of(**options_of(choice))
        probe = take_probe(target, ROWS, config.fidelity_tokens)
        assert len(probe.last) == 64
        figures = measure_choice(target, probe, config)
        assert choice.figures == figures
        header = load_header(LocalStore(folder))
        assert header.fidelity == json.loads(json.dumps(figures))


def test_estimate_of_shared_prefixes_counts_them_once(target: Target, tmp_path: Path) -> None:
    rows = [masked_row([*range(60), i], [True] * 61) for i in range(4)]
    config = config_of(share_prefix=True)
    found = estimate_cache(target, rows, config, LocalStore(tmp_path))
    manifest = build(target, tmp_path / "cache", rows, share_prefix=True).manifest
    assert (found.tokens, found.stored_tokens) == (244, 64)
    assert manifest.stored_tokens == 64
    assert found.choices[0].total_bytes == manifest.total_bytes - sum(padding(tmp_path / "cache"))
    plain = estimate_cache(target, rows, config_of(), LocalStore(tmp_path))
    assert plain.stored_tokens == 64  # what sharing would leave
    assert plain.choices[0].total_bytes == 244 * plain.choices[0].token_bytes


@pytest.mark.parametrize(("free", "fits"), [(10**12, "yes"), (None, "?"), (1000, "NO")])
def test_table_shows_every_choice(estimate: Estimate, free: int | None, fits: str) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(estimate_table(replace(estimate, free_bytes=free)))
    text = console.export_text(clear=False)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    lines = rows[-len(estimate.choices) :]
    assert {len(cells) for cells in lines} == {10}
    for choice, cells in zip(estimate.choices, lines, strict=True):
        assert cells[0] == choice.taps.value
        assert cells[2] == f"{choice.token_bytes:,.0f}"
        assert cells[5] == fits
        exact = choice.taps in (Codec.bf16, Codec.bf16_zstd)
        assert (cells[6] == "exact") == exact
        assert cells[6].endswith("%") == (not exact)
    assert lines[0][1] == "top-7"
    assert lines[0][8].startswith("keeps ")
    assert lines[1][1:2] + lines[1][8:] == ["bf16", "exact", "100.00%"]
    bold = console.export_text(styles=True)
    assert "\x1b[1mint8-h64-g64-out8" in bold
    assert "\x1b[1mbf16" not in bold


def test_build_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, header = LocalStore(tmp_path), header_of(Codec.bf16, Codec.bf16, 2560)
    need = 10**6 * token_bytes(header)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: need)
    require_space(store, header, 10**6)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: need - 10**9)
    with pytest.raises(CacheError) as caught:
        require_space(store, header, 10**6)
    for text in (str(tmp_path), "needs up to 15.37 GB, 14.37 GB are free", "mode=estimate"):
        assert text in str(caught.value)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: None)
    require_space(store, header, 10**12)


BAD: dict[str, tuple[Any, str, str, str]] = {
    "hidden": ({"rel_l2": [0.01, 0.3]}, "cache.taps=int4-h64-g64", "30.0%", "cache.max_tap_error"),
    "last_hidden": ({"mean_tv": 0.0725}, "cache.last=nf4-h64-g64", "0.0725", "cache.max_last_tv"),
}


@pytest.mark.parametrize("name", BAD)
def test_codec_that_costs_too_much_is_refused(name: str) -> None:
    config = CacheConfig(taps="int4-h64-g64", last="nf4-h64-g64", max_tap_error=0.3)
    figures, *texts = BAD[name]
    low = replace(config, max_tap_error=0.29)
    with pytest.raises(CacheError) as caught:
        require_fidelity({name: figures}, low)
    for text in (*texts, "mode=estimate", "fix:"):
        assert text in str(caught.value)
    limits = replace(config, max_last_tv=0.0725)
    require_fidelity({name: figures}, limits)
    figure = next(iter(figures))
    broken: Any = {"rel_l2": [0.01, float("nan")], "mean_tv": float("nan")}[figure]
    with pytest.raises(CacheError):
        require_fidelity({name: {figure: broken}}, limits)


def test_build_measures_before_it_stores(target: Target, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"cache\.taps=int4-h64-g64"):
        build(target, tmp_path, taps="int4-h64-g64", max_tap_error=0.01)
    assert not any(p.is_file() for p in tmp_path.rglob("*.json"))
    with pytest.raises(CacheError, match=r"cache\.last=nf4-h64-g64"):
        build(target, tmp_path, last="nf4-h64-g64", max_last_tv=1e-6)
    build(target, tmp_path, taps="int4-h64-g64", max_tap_error=0.5)


def test_device_map_changes_no_state(target: Target, tiny_folder: Path, tmp_path: Path) -> None:
    config = TargetConfig(
        path=str(tiny_folder),
        precision=Precision.fp32,
        tap_layers=list(TAPS),
        mask_token_id=MASK_ID,
        device_map="cpu",
    )
    spread = Target(config, CPU)
    assert spread.device == CPU
    build(target, tmp_path / "one")
    build(spread, tmp_path / "other")
    assert objects(tmp_path / "one") == objects(tmp_path / "other")
    assert torch.equal(*(t.logits(torch.ones(2, 64)) for t in (target, spread)))


def test_processes_find_the_same_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = header_of(Codec.int8_h64, Codec.bf16_zstd, 64, topk=3, share_prefix=True)
    store = write_cache(tmp_path, make_case(header, mixed_rows()))
    parts = CacheReader(store).manifest.num_parts
    assert parts > 3
    assert verify_cache(store).problems == ()
    specs = {spec.name: spec for spec in array_specs(header)}

    def path(name: str, part: int) -> Path:
        return tmp_path / specs[name].object_key(part)

    content = bytearray(path("hidden", 0).read_bytes())
    content[3] ^= 4
    path("hidden", 0).write_bytes(content)
    path("last_hidden", 1).unlink()
    path("topk_ids", 1).write_bytes(path("topk_ids", 1).read_bytes()[:-1])
    record = tmp_path / commit_key(2)
    record.write_bytes(record.read_bytes().replace(b'"part": 2', b'"part": 3'))
    monkeypatch.setattr(verify, "_WORTH_PROCESSES", 0)
    one, two = (verify_cache(store, processes) for processes in (1, 2))
    assert one == two
    found = [(Path(p.where).name, p.part) for p in one.problems]
    assert found == [
        ("part-00000002.json", 2),
        ("c.0.0.0", 0),
        ("c.1.0", 1),
        ("c.1.0", 1),
    ]
    assert all(p.rows for p in one.problems)
    assert one.objects == (parts - 1) * len(specs)


def test_cached_row_shows_tokens_and_mask(tmp_path: Path) -> None:
    case = make_case(header_of(Codec.bf16, None, 4, topk=1, share_prefix=True), mixed_rows())
    reader = CacheReader(write_cache(tmp_path, case))
    for i, row in enumerate(case.rows):
        shown = cached_row(reader[i], i)
        assert shown.token_ids == row.token_ids
        assert shown.loss_mask == row.loss_mask
        assert [s.role for s in shown.segments] == [s.role for s in row.segments]
        assert shown.source == f"row {i} of the cache"


def test_back_pressure_changes_no_byte(target: Target, tmp_path: Path) -> None:
    options: Any = {"taps": "int8-h64-g64", "last": "bf16+zstd", "topk": 3, "share_prefix": True}
    build(target, tmp_path / "wide", **options)
    build(target, tmp_path / "narrow", **options, queue_bytes=1)
    assert objects(tmp_path / "wide") == objects(tmp_path / "narrow")


def test_rows_on_disk_make_the_same_cache(target: Target, tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "spool")
    rows = mixed_rows()
    for row in rows:
        spool.append(row)
    options: Any = {"share_prefix": True, "share_prefix_min": 2}
    one = build(target, tmp_path / "list", rows, **options).manifest
    two = build(target, tmp_path / "spooled", spool, **options).manifest
    assert objects(tmp_path / "list") == objects(tmp_path / "spooled")
    own = ("plans/plan-00000000.npy", "plans/labels-00000000.json")
    assert [one.digests[key] for key in own] == [two.digests[key] for key in own]
    assert one.dataset_hash == two.dataset_hash
