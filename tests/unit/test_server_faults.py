"""Servers that fail, refuse, cut, die and share: what is lost, what is asked again, what stops."""

import socket
from pathlib import Path
from typing import Any

import pytest

from data.config import Precision, RegenerateConfig, TargetConfig, Truncated
from data.errors import ServerError
from data.fingerprint import Fingerprint
from data.generate.ledger import quarantine_path
from data.regenerate import regenerate
from data.target import TargetFiles
from tests.support.served import LONG, PLAYED, PROMPTS, by_source, config_for, lines, run
from tests.support.stub_server import stub_server
from tests.support.tiny import tiny_target


@pytest.fixture(scope="module")
def files(tiny_folder: Path) -> TargetFiles:
    return TargetFiles(TargetConfig(path=str(tiny_folder), precision=Precision.fp32))


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_every_fifth_request_fails_and_no_row_is_lost(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(fail_every=5) as server:
        summary = run(files, output, config_for(server, max_retries=9))
    assert (summary.rows, summary.failures) == (len(PROMPTS), {})
    assert server.requests > len(PROMPTS)
    assert len(by_source(output)) == len(PROMPTS)
    assert not quarantine_path(output).exists()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "timeout": ({"hang": True}, {"timeout_s": 0.1}),
    "rate_limit": ({"fail_all": 429}, {}),
    "server_error": ({"fail_all": 503}, {}),
    "bad_request": ({"max_prompt": 1}, {}),
    "empty": ({"reasoning_every": 1, "token_ids": False}, {}),
    "unknown_reasoning": ({"reasoning_every": 1, "reasoning_key": "my_thinking"}, {}),
}


@pytest.mark.parametrize("error", CASES)
def test_failure_is_listed_with_its_class_and_asked_again(
    files: TargetFiles, tmp_path: Path, error: str
) -> None:
    output = tmp_path / "rows.jsonl"
    faults, options = CASES[error]
    with stub_server(**faults) as server:
        config = config_for(server, **{"max_retries": 0, "server_model": "tiny", **options})
        summary = run(files, output, config, PLAYED)
        asked = server.requests
    assert (summary.rows, summary.failures, summary.unasked) == (0, {error: 3}, 3)
    assert asked == len(PLAYED)  # not a later turn, and nothing twice
    entries = lines(summary.quarantine)
    assert {e["source"] for e in entries} == {p.source for p in PLAYED}
    assert {e["error"] for e in entries} == {error}
    assert all(0 < len(e["message"]) <= 500 and len(e["key"]) == 32 for e in entries)
    with stub_server() as healthy:
        summary = run(files, output, config_for(healthy, server_model="tiny"), PLAYED)
    assert (summary.rows, summary.failures, summary.unasked) == (6, {}, 0)
    assert not quarantine_path(output).exists()


def test_refused_connection_is_a_failure_of_that_class(files: TargetFiles, tmp_path: Path) -> None:
    config = config_for(f"http://127.0.0.1:{closed_port()}/v1", max_retries=0)
    summary = run(files, tmp_path / "rows.jsonl", config, PLAYED)
    assert summary.failures == {"connection": 3}


def test_requests_are_repeated_as_often_as_configured(files: TargetFiles, tmp_path: Path) -> None:
    for retries in (0, 2):
        with stub_server(fail_all=500) as server:
            config = config_for(server, max_retries=retries, server_model="tiny")
            run(files, tmp_path / f"{retries}.jsonl", config, PROMPTS[:1])
        assert server.requests == retries + 1
    with stub_server(max_prompt=1) as server:  # a refused prompt will be refused again
        run(files, tmp_path / "400.jsonl", config_for(server, max_retries=3), PROMPTS[:1])
    assert server.requests == 1


def test_dead_server_stops_the_run_which_then_goes_on(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(die_after=9) as server:
        config = config_for(server, max_retries=0, max_failures=6)
        with pytest.raises(ServerError, match=r"6 requests failed.*(?s:.*)same command") as error:
            run(files, output, config)
        port = server.port
    assert "connection" in str(error.value)
    first = lines(output)
    assert 0 < len(first) <= 9
    # Fewer than all that were left: the run did not go on into errors.
    assert 6 <= len(lines(quarantine_path(output))) < len(PROMPTS) - len(first)
    with stub_server(port) as server:
        summary = run(files, output, config)
    assert summary.rows == len(by_source(output)) == len(PROMPTS)
    assert server.requests == len(PROMPTS) - len(first)
    assert lines(output)[: len(first)] == first
    assert summary.failures == {}


def test_server_that_refuses_everything_stops_the_run(files: TargetFiles, tmp_path: Path) -> None:
    with (
        stub_server(max_prompt=1) as server,
        pytest.raises(ServerError, match=r"5 requests failed.*bad_request"),
    ):
        run(files, tmp_path / "rows.jsonl", config_for(server))


def test_long_prompts_among_answered_ones_stop_nothing(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(max_prompt=150) as server:
        summary = run(files, output, config_for(server, concurrency=1), PROMPTS[:1] + LONG)
        assert (summary.rows, summary.failures) == (1, {"bad_request": len(LONG)})
        # Also when all that is left are prompts that are refused.
        summary = run(files, output, config_for(server, concurrency=1), PROMPTS[:1] + LONG)
    assert summary.failures == {"bad_request": len(LONG)}


def test_cut_answers_are_dropped_by_option_and_not_asked_again(
    files: TargetFiles, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(length_every=3) as server:
        drop = config_for(server, truncated=Truncated.drop)
        summary = run(files, output, drop)
        cut = summary.failures["length"]
        assert 0 < cut < len(PROMPTS)
        assert summary.rows == len(PROMPTS) - cut
        assert summary.finish_reasons == {"stop": summary.rows}
        asked = server.requests
        assert run(files, output, drop).failures == {"length": cut}
        assert server.requests == asked
        kept = run(files, output, config_for(server, truncated=Truncated.keep))
        assert server.requests == asked + cut
    assert (kept.finish_reasons["length"], kept.failures) == (cut, {})


def test_cut_answers_of_this_process_are_dropped_too(tiny_folder: Path, tmp_path: Path) -> None:
    target = tiny_target(tiny_folder)
    config = RegenerateConfig(max_new_tokens=2, temperature=0.0, truncated=Truncated.drop)
    output = tmp_path / "rows.jsonl"
    summary = regenerate(target, PLAYED, config, output, Fingerprint.of_target(target))
    assert summary.failures["length"] + summary.rows + summary.unasked == 6
    assert summary.failures["length"] > 0
    assert "length" not in summary.finish_reasons


def test_two_servers_share_the_load(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server() as one, stub_server() as two:
        summary = run(files, output, config_for(one, two, concurrency=2))
        assert min(one.requests, two.requests) >= len(PROMPTS) // 4
        assert one.requests + two.requests == len(PROMPTS)
        assert max(one.most_in_flight, two.most_in_flight) <= 2
    assert summary.rows == len(by_source(output)) == len(PROMPTS)


def test_rows_of_a_dead_server_are_answered_by_the_other(
    files: TargetFiles, tmp_path: Path
) -> None:
    with stub_server(die_after=4) as dying, stub_server() as healthy:
        config = config_for(dying, healthy, max_retries=0, max_failures=2, server_model="tiny")
        summary = run(files, tmp_path / "rows.jsonl", config)
    assert (summary.rows, summary.failures) == (len(PROMPTS), {})
    assert healthy.requests >= len(PROMPTS) - 4


@pytest.mark.parametrize(
    ("faults", "fix"),
    [
        ({"fail_all": 401}, "OPENAI_API_KEY"),
        ({"fail_all": 404}, "regenerate.server_model"),
        ({"extra_prompt_tokens": 1}, "token ids"),
        ({"models": ("one", "two")}, "regenerate.server_model=NAME"),
    ],
)
def test_what_no_row_can_mend_ends_the_run_at_once(
    files: TargetFiles, tmp_path: Path, faults: dict[str, Any], fix: str
) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(**faults) as server, pytest.raises(ServerError, match=fix):
        run(files, output, config_for(server))
    assert server.requests <= 4
    assert lines(output) == lines(quarantine_path(output)) == []


def test_torn_lines_of_both_files_are_no_records(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(max_prompt=150) as server:
        first = run(files, output, config_for(server), PROMPTS[:4] + LONG[:1])
        for path in (output, quarantine_path(output)):
            with path.open("a") as file:
                file.write('{"key": "torn')
        second = run(files, output, config_for(server), PROMPTS[:4] + LONG[:1])
    assert (second.rows, second.failures) == (first.rows, first.failures) == (4, {"bad_request": 1})
    assert len(lines(output)) == 4
    assert len(lines(quarantine_path(output))) == 1


def test_progress_names_rates_and_failures_by_class(
    files: TargetFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("data.progress._LOG_EVERY_S", 0.0)
    caplog.set_level("INFO")
    with stub_server(max_prompt=150) as server:
        config = config_for(server, concurrency=1)
        run(files, tmp_path / "rows.jsonl", config, PROMPTS[:3] + LONG[:2] + PROMPTS[3:5])
    told = [m for m in caplog.messages if m.startswith("regenerate: 6/7 rows")]
    assert len(told) == 1
    assert "rows/s" in told[0]
    assert "tokens/s, 2 bad_request, ETA" in told[0]
