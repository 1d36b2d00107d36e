"""`dspark regenerate` against servers, real processes: kills, and a server that dies."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import dspark, kill_when, run_script
from tests.support.stub_server import StubServer, stub_server

pytestmark = pytest.mark.slow
SECRET = "sk-very-secret-4711"
FAULTS: dict[str, Any] = {"fail_every": 5, "length_every": 4, "reasoning_every": 5}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny target and prompts of one to three turns."""
    folder = tmp_path_factory.mktemp("server")
    run_script("scripts/make_tiny_target.py", cwd=folder)
    prompts = [{"turns": [f"{i} says {t}" for t in "abc"[: 1 + i % 3]]} for i in range(30)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def arguments(name: str, *servers: StubServer, **options: object) -> list[str]:
    urls = ",".join(server.url for server in servers)
    given = ["regenerate", "experiment=smoke", f"run.name={name}", "corpus.prompts=prompts.jsonl"]
    given += ["corpus.limit=100", f"regenerate.servers=[{urls}]", "regenerate.concurrency=4"]
    return given + [f"regenerate.{key}={value}" for key, value in options.items()]


def rows_of(home: Path, name: str) -> list[str]:
    path = home / "outputs" / name / "rows.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_killed_and_resumed_gives_the_unbroken_rows(home: Path) -> None:
    with stub_server(**FAULTS) as server:
        output = dspark(*arguments("unbroken", server, max_retries=9), cwd=home)
    expected = rows_of(home, "unbroken")
    assert "60 rows (60 new" in output
    assert len(expected) == 60
    with stub_server(**FAULTS, max_delay_s=0.3) as server:
        given = arguments("killed", server, max_retries=9)
        for enough in (7, 25):
            killed = kill_when(
                lambda enough=enough: len(rows_of(home, "killed")) >= enough,  # type: ignore[misc]
                given,
                home,
            )
            assert killed
    path = home / "outputs" / "killed" / "rows.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "torn')
    on_disk = {tuple(row["prompt_ids"]) for row in map(json.loads, rows_of(home, "killed")[:-1])}
    with stub_server(**FAULTS) as server:
        output = dspark(*arguments("killed", server, max_retries=9), cwd=home)
    assert 25 <= len(on_disk) < 60
    assert not on_disk & set(server.answered)
    assert f"({60 - len(on_disk)} new" in output
    assert sorted(rows_of(home, "killed")) == sorted(expected)


def test_server_that_dies_stops_the_run_and_two_finish_it(home: Path) -> None:
    options = {"max_retries": 0, "max_failures": 5, "truncated": "drop"}
    more = {"expect": 2, "OPENAI_API_KEY": SECRET}
    with stub_server(die_after=12, length_every=4) as server:
        output = dspark(*arguments("dies", server, **options), cwd=home, **more)  # type: ignore[arg-type]
    assert "5 requests failed in a row" in output
    assert "give the same command" in output
    assert "Traceback" not in output
    kept = rows_of(home, "dies")
    with stub_server(length_every=4) as one, stub_server(length_every=4) as two:
        given = arguments("dies", one, two, **options)
        output += dspark(*given, cwd=home, OPENAI_API_KEY=SECRET)
    assert min(one.requests, two.requests) > 5
    rows = [json.loads(line) for line in rows_of(home, "dies")]
    assert rows_of(home, "dies")[: len(kept)] == kept
    assert len({row["key"] for row in rows}) == len(rows)
    assert {row["finish_reason"] for row in rows} == {"stop"}
    folder = home / "outputs" / "dies"
    cut = [json.loads(line) for line in (folder / "rows.quarantine.jsonl").read_text().splitlines()]
    assert {entry["error"] for entry in cut} == {"length"}
    assert f"{len(cut)} requests without a row {{'length': {len(cut)}}}" in output
    # Every turn has a row, was cut, or comes after one that was cut.
    assert f"{60 - len(rows) - len(cut)} later turns not asked" in output
    assert SECRET not in output
    for path in folder.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(), path


def test_a_key_in_the_address_is_refused_and_not_repeated(home: Path) -> None:
    for url in (f"http://user:{SECRET}@localhost:1/v1", f"http://localhost:1/v1?key={SECRET}"):
        given = ["regenerate", "experiment=smoke", f'regenerate.servers=["{url}"]']
        output = dspark(*given, cwd=home, expect=2)
        assert "OPENAI_API_KEY" in output
        assert SECRET not in output
