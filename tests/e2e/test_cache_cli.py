"""`dspark cache` and training from it, as a user types it: codecs, estimate, buckets, builders."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.cache.read import CacheReader
from tests.support.object_store import S3Server, s3_server
from tests.support.processes import ROOT, dspark, environment
from tests.support.runs import SMOKE, lines, prepare

pytestmark = pytest.mark.slow
TRAIN = ("train", SMOKE, "run.wandb=disabled", "optim.steps=6")


@pytest.fixture
def run(smoke: Path, tmp_path: Path) -> Path:
    """A folder with the rows of the smoke run, and no cache."""
    folder = tmp_path / "run"
    prepare(folder, smoke)
    (folder / "outputs" / "smoke").mkdir()
    for path in (smoke / "outputs" / "smoke").glob("rows.*"):
        shutil.copy(path, folder / "outputs" / "smoke")
    return folder


def cache_of(run: Path) -> CacheReader:
    return CacheReader(run / "outputs" / "smoke" / "cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as running:
        yield running


def losses(run: Path) -> list[float]:
    return [float(str(m["loss"])) for m in lines(run / "outputs" / "smoke" / "metrics.jsonl")]


def test_estimate_lists_choices_and_builds_nothing(run: Path) -> None:
    output = dspark("cache", SMOKE, "mode=estimate", cwd=run)
    for words in ("bf16+zstd", "int4-h64-g64", "top-64", "tokens/s", "share_prefix=true would"):
        assert words in output
    assert not (run / "outputs" / "smoke" / "cache").exists()


@pytest.mark.parametrize("preset", ["compact", "smallest"])
def test_lossy_cache_is_measured_and_trained_from(run: Path, preset: str) -> None:
    sizes = ("cache.part_bytes=65536", "cache.chunk_bytes=8192")
    output = dspark("cache", SMOKE, f"cache={preset}", *sizes, cwd=run)
    assert "fidelity of hidden" in output
    reader = cache_of(run)
    assert 0 < reader.header.fidelity["last_hidden"]["mean_tv"] < 0.01
    states = sum(spec.token_bytes for name, spec in reader.specs.items() if "hidden" in name)
    assert states < 0.65 * 2 * (len(reader.header.tap_layers) + 1) * 64
    found = []
    for where in ("loader", "device"):
        dspark(*TRAIN, f"cache.decode={where}", "cache.prefetch_bytes=1", cwd=run)
        found.append(losses(run))
        shutil.rmtree(run / "outputs" / "smoke" / "checkpoints")
    assert found[0] == found[1]


def test_top_k_alone_can_be_trained_from(run: Path) -> None:
    dspark("cache", SMOKE, "cache.last=null", "cache.topk=32", cwd=run)
    assert cache_of(run)[0].last is None
    dspark(*TRAIN, "cache.max_length=20", cwd=run)
    refused = dspark("cache", SMOKE, "cache.last=null", "cache.topk=16", cwd=run, expect=2)
    assert "topk: stored 32, asked for 16" in refused


def test_codec_that_costs_too_much_is_refused_with_the_figure(run: Path) -> None:
    coarse = ("cache.taps=int4-h64-g64", "cache.max_tap_error=0.01")
    refused = dspark("cache", SMOKE, *coarse, cwd=run, expect=2)
    assert "cache.taps=int4-h64-g64: mean relative error" in refused
    assert "mode=estimate" in refused
    refused = dspark("cache", SMOKE, "cache.taps=int5", cwd=run, expect=2)
    assert "no such codec" in refused
    refused = dspark("cache", SMOKE, "cache.last=null", cwd=run, expect=2)
    assert "cache.topk=128" in refused


def test_rows_are_added_to_a_finished_cache(run: Path) -> None:
    dspark("cache", SMOKE, "corpus.limit=5", cwd=run)
    before = [cache_of(run)[i] for i in range(len(cache_of(run)))]
    # The experiment takes 12 rows.
    refused = dspark("cache", SMOKE, cwd=run, expect=2)
    assert "of those given are not in it" in refused
    dspark("cache", SMOKE, "cache.add_rows=true", cwd=run)
    after = cache_of(run)
    assert len(after) > len(before)
    for i, row in enumerate(before):
        assert torch.equal(row.taps, after[i].taps)
        assert row.row_key == after[i].row_key


def test_cached_rows_are_explained_and_prefixes_are_shared(run: Path) -> None:
    output = dspark("cache", SMOKE, "cache.share_prefix=true", "cache.share_prefix_min=4", cwd=run)
    assert "shared prefixes" in output
    output = dspark("cache", SMOKE, "mode=explain", "cache.explain_cached=true", cwd=run)
    assert "row 0 of the cache" in output
    assert "tokens are supervised" in output


def test_bucket_holds_a_cache_that_is_built_verified_and_trained_from(
    run: Path, server: S3Server
) -> None:
    url = server.unused_url()
    place = f"cache.path={url}"
    dspark("cache", SMOKE, cwd=run)
    output = dspark("cache", SMOKE, place, cwd=run, env=server.variables)
    assert url in output
    assert "are sound" in dspark(
        "cache", SMOKE, place, "mode=verify", cwd=run, env=server.variables
    )
    copy = f"cache.local_copy={run / 'copy'}"
    dspark(*TRAIN, place, copy, cwd=run, env=server.variables)
    remote = losses(run)
    shutil.rmtree(run / "outputs" / "smoke" / "checkpoints")
    dspark(*TRAIN, cwd=run)
    assert losses(run) == remote
    output = dspark("cache", SMOKE, place, "mode=repair", cwd=run, env=server.variables)
    assert "0 parts are built again" in output


@pytest.mark.dist
def test_two_commands_at_once_build_one_cache(run: Path) -> None:
    arguments = ["cache", SMOKE, "cache.part_bytes=65536", "cache.batch_tokens=64"]
    command = [sys.executable, "-m", "train.cli", *arguments]
    variables = environment(PYTHONPATH=str(ROOT))
    builders = [
        subprocess.Popen(
            command,
            cwd=run,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    for builder in builders:
        output, _ = builder.communicate(timeout=300)
        assert builder.returncode == 0, output
        assert "bytes per token" in output
    assert "are sound" in dspark("cache", SMOKE, "mode=verify", cwd=run)
