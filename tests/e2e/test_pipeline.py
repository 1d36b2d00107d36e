"""The whole way on the tiny target, as a user runs it: processes, files, and kills."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.cache.read import CacheReader
from tests.support.processes import dspark, kill_when, run_script, torchrun
from tests.support.runs import SMOKE, lines, prepare

pytestmark = pytest.mark.slow


def test_every_stage_leaves_what_the_next_one_reads(smoke: Path) -> None:
    run = smoke / "outputs" / "smoke"
    rows = lines(run / "rows.jsonl")
    reader = CacheReader(run / "cache")
    assert len(rows) >= len(reader) > 0
    longest = max(range(len(reader)), key=lambda i: int(reader.samples.lengths[i]))
    ids = reader[longest].token_ids.tolist()
    assert ids in [[*r["prompt_ids"], *r["completion_ids"]] for r in rows]  # type: ignore[misc]
    for verb in ("regenerate", "cache", "train", "evaluate", "export"):
        assert (run / "config" / f"{verb}.yaml").is_file()
        assert json.loads((run / "provenance" / f"{verb}.json").read_text())["packages"]["torch"]
    exported = {p.name for p in (run / "export" / "portable").iterdir()}
    assert exported == {"config.json", "model.safetensors", "fingerprint.json"}


def test_training_lowers_the_loss_and_logs_every_step(smoke: Path) -> None:
    metrics = lines(smoke / "outputs" / "smoke" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 21))
    losses = [float(m["loss"]) for m in metrics]  # type: ignore[arg-type]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    assert list((smoke / "outputs" / "smoke" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_evaluation_is_lossless_and_defines_its_numbers(smoke: Path) -> None:
    summary = json.loads((smoke / "outputs/smoke/evaluation/summary.json").read_text())
    assert set(summary["classes"]) == {"math", "code", "chat", "all"}
    for methods in summary["classes"].values():
        assert set(methods) == {"plain", "draft", "lookup"}
        for figures in methods.values():
            assert figures["identical"] == 1.0
            assert set(summary["definitions"]) <= set(figures)
        assert methods["plain"]["tau"] == 1.0
        assert methods["draft"]["tau"] >= 1.0


def test_every_stage_runs_again_without_doing_its_work_again(smoke: Path) -> None:
    run = smoke / "outputs" / "smoke"
    watched = [run / "rows.jsonl", *run.glob("cache/commits/*"), *run.glob("checkpoints/*/state*")]
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in watched}
    output = run_script("scripts/demo.py", "smoke", "run.wandb=offline", cwd=smoke)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in watched} == before
    assert "(0 new" in output
    assert "(0 now" in output


def test_verify_and_info_speak_of_the_cache(smoke: Path) -> None:
    assert "are sound" in dspark("cache", SMOKE, "mode=verify", cwd=smoke)
    assert "bytes per token" in dspark("cache", SMOKE, "mode=info", cwd=smoke)


def test_explain_shows_rows_without_weights_or_cache(smoke: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    output = dspark("cache", SMOKE, "mode=explain", f"html={page}", cwd=smoke)
    assert "yes: the target generates it" in output
    assert "tokens are supervised" in page.read_text()


def test_corpus_that_is_mostly_unusable_stops_the_build(smoke: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    good = {"prompt_ids": [1, 2], "completion_ids": [3, 4]}
    rows.write_text("".join(json.dumps(v) + "\n" for v in (good, {"question": "x"})))
    prepare(tmp_path / "run", smoke)
    arguments = ("cache", SMOKE, f"corpus.rows={rows}")
    output = dspark(*arguments, cwd=tmp_path / "run", expect=2)
    assert "1 of 2 lines cannot be used ({'shape': 1})" in output
    assert "rows.jsonl:2" in output
    dspark(*arguments, "corpus.max_quarantined=0.5", cwd=tmp_path / "run")
    assert len(CacheReader(tmp_path / "run" / "outputs" / "smoke" / "cache")) == 1


def test_changed_configuration_is_shown_and_refused(smoke: Path) -> None:
    output = dspark("train", SMOKE, "optim.lr=0.5", "run.wandb=disabled", cwd=smoke, expect=2)
    assert "optim.lr: was 0.001, is 0.5" in output
    assert "run.allow_change=[optim.lr]" in output
    output = dspark("cache", SMOKE, "target.tap_layers=[0,1]", cwd=smoke, expect=2)
    assert "tap_layers" in output


def test_another_target_is_refused_with_the_difference(smoke: Path, tmp_path: Path) -> None:
    copy = tmp_path / "outputs"
    shutil.copytree(smoke / "outputs", copy)
    template = copy / "targets" / "tiny" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "Assistant"))
    # As one of several sources, the rows are compared all the same.
    mixed = ("run.name=mixed", "corpus.sources=[outputs/smoke/rows.jsonl]")
    assert "chat_template (first" in dspark("cache", SMOKE, *mixed, cwd=tmp_path, expect=2)
    for verb in ("cache", "train", "evaluate", "export"):
        output = dspark(verb, SMOKE, cwd=tmp_path, expect=2)
        assert "chat_template (first difference at character" in output
    dspark("cache", SMOKE, "run.allow_mismatch=[chat_template,probe_renders]", cwd=tmp_path)


def test_regenerate_killed_and_resumed_gives_the_unbroken_rows(smoke: Path, tmp_path: Path) -> None:
    arguments = ["regenerate", SMOKE, "regenerate.batch_size=1", "regenerate.temperature=0.9"]
    arguments += ["regenerate.max_new_tokens=48", "corpus.limit=24"]
    for name in ("unbroken", "killed"):
        prepare(tmp_path / name, smoke)
    dspark(*arguments, cwd=tmp_path / "unbroken")
    rows = tmp_path / "killed" / "outputs" / "smoke" / "rows.jsonl"
    kills = 0
    for enough in (2, 9):
        kills += kill_when(
            lambda enough=enough: rows.exists() and rows.read_bytes().count(b"\n") >= enough,  # type: ignore[misc]
            arguments,
            tmp_path / "killed",
        )
    assert kills == 2
    with rows.open("a") as file:
        file.write('{"key": "torn')
    dspark(*arguments, cwd=tmp_path / "killed")
    expected = (tmp_path / "unbroken" / "outputs" / "smoke" / "rows.jsonl").read_text()
    assert sorted(rows.read_text().splitlines()) == sorted(expected.splitlines())


def test_cache_build_killed_and_resumed_gives_the_same_bits(smoke: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for _ in range(400):
            ids = generator.integers(0, 256, int(generator.integers(30, 120))).tolist()
            file.write(json.dumps({"prompt_ids": ids[:9], "completion_ids": ids[9:]}) + "\n")
    arguments = ["cache", SMOKE, f"corpus.rows={rows}", "corpus.limit=400"]
    arguments += ["cache.part_bytes=65536", "cache.batch_tokens=128"]
    for name in ("unbroken", "killed"):
        prepare(tmp_path / name, smoke)
    dspark(*arguments, cwd=tmp_path / "unbroken")
    commits = tmp_path / "killed" / "outputs" / "smoke" / "cache" / "commits"
    kills = 0
    for enough in (1, 20, 60):
        kills += kill_when(
            lambda enough=enough: len(list(commits.glob("*.json"))) >= enough,  # type: ignore[misc]
            arguments,
            tmp_path / "killed",
        )
    assert kills == 3
    dspark(*arguments, cwd=tmp_path / "killed")
    data = "outputs/smoke/cache/data.zarr"
    expected = {
        p.relative_to(tmp_path / "unbroken") for p in (tmp_path / "unbroken" / data).rglob("*")
    }
    found = {p.relative_to(tmp_path / "killed") for p in (tmp_path / "killed" / data).rglob("*")}
    assert found == expected
    for path in expected - {Path(data) / "zarr.json"}:  # which names the cache
        if (tmp_path / "unbroken" / path).is_file():
            mine, theirs = (tmp_path / n / path for n in ("killed", "unbroken"))
            assert mine.read_bytes() == theirs.read_bytes(), path


TRAIN = ["train", SMOKE, "run.wandb=disabled", "run.checkpoint_every=5", "run.keep_checkpoints=9"]


def final(folder: Path, name: str = "draft") -> dict[str, torch.Tensor]:
    return load_file(folder / f"outputs/smoke/checkpoints/step-00000020/{name}.safetensors")


def on_cache_of(smoke: Path, folder: Path) -> Path:
    """A run folder that trains from the cache of the smoke run."""
    prepare(folder, smoke)
    (folder / "outputs" / "smoke").mkdir()
    (folder / "outputs" / "smoke" / "cache").symlink_to(smoke / "outputs" / "smoke" / "cache")
    return folder


def test_training_killed_and_resumed_gives_the_same_weights(smoke: Path, tmp_path: Path) -> None:
    folder = on_cache_of(smoke, tmp_path / "killed")
    checkpoints = folder / "outputs" / "smoke" / "checkpoints"
    kills = 0
    for step in (5, 15):
        path = checkpoints / f"step-{step:08d}" / "state.json"
        kills += kill_when(path.is_file, TRAIN, folder)
    assert kills == 2
    output = dspark(*TRAIN, cwd=folder)
    assert re.search(r"going on from .*step-000000(15|20)", output)
    for name in ("draft", "optimizer"):
        resumed, unbroken = final(folder, name), final(smoke, name)
        assert resumed.keys() == unbroken.keys()
        assert all(torch.equal(resumed[k], unbroken[k]) for k in unbroken)
    steps = [m["step"] for m in lines(folder / "outputs" / "smoke" / "metrics.jsonl")]
    assert steps == list(range(1, 21))


@pytest.mark.dist
def test_two_ranks_train_what_one_rank_trains(smoke: Path, tmp_path: Path) -> None:
    folder = on_cache_of(smoke, tmp_path / "two")
    torchrun(2, *TRAIN, "optim.rows_per_micro_batch=1", cwd=folder)
    one, two = final(smoke), final(folder)
    for name, expected in one.items():
        # Twenty steps of AdamW divide rounding of the gradient by its own size.
        torch.testing.assert_close(two[name], expected, rtol=0, atol=2e-5, msg=name)


@pytest.mark.dist
def test_ranks_that_do_not_see_each_other_are_refused(smoke: Path, tmp_path: Path) -> None:
    folder = on_cache_of(smoke, tmp_path / "lonely")
    output = dspark(*TRAIN, cwd=folder, expect=2, WORLD_SIZE="2")
    assert "WORLD_SIZE=2: " in output
    assert "torchrun --nproc-per-node" in output


def test_damaged_cache_ends_training_with_the_file(smoke: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    prepare(folder, smoke)
    cache = folder / "outputs" / "smoke" / "cache"
    shutil.copytree(smoke / "outputs" / "smoke" / "cache", cache)
    for rows in (smoke / "outputs" / "smoke").glob("rows.*"):
        shutil.copy(rows, folder / "outputs" / "smoke")
    shard = cache / "data.zarr" / "hidden" / "c.0.0.0"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    output = dspark(*TRAIN, cwd=folder, expect=2)
    assert "c.0.0.0" in output
    assert "damaged" in output
    output = dspark("cache", SMOKE, "mode=verify", cwd=folder, expect=2)
    assert "1 problems" in output
    # What the message says to do mends it.
    assert "1 parts are built again" in dspark("cache", SMOKE, "mode=repair", cwd=folder)
    assert "are sound" in dspark("cache", SMOKE, "mode=verify", cwd=folder)
    dspark(*TRAIN, cwd=folder)
