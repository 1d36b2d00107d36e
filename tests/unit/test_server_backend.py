"""Rows from OpenAI-compatible servers, over real HTTP: contexts, tokens, settings, secrets."""

import logging
from pathlib import Path
from typing import Any

import pytest

from data.chat import encode_prompt
from data.config import Precision, RegenerateConfig, TargetConfig, Truncated
from data.corpus import Prompt
from data.errors import FingerprintMismatchError, ServerError
from data.fingerprint import Fingerprint
from data.regenerate import sampling_settings
from data.target import TargetFiles
from data.tiny import STOP_ID
from tests.support.served import LONG, PLAYED, PROMPTS, by_source, config_for, lines, run
from tests.support.stub_server import StubOptions, draw, stub_server
from tests.support.tiny import tiny_target

SECRET = "sk-very-secret-4711"


@pytest.fixture(scope="module")
def files(tiny_folder: Path) -> TargetFiles:
    return TargetFiles(TargetConfig(path=str(tiny_folder), precision=Precision.fp32))


def test_turns_are_sent_as_the_ids_that_serving_renders(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server() as server:
        summary = run(files, output, config_for(server), PLAYED)
    rows = by_source(output)
    assert summary.rows == summary.written == len(rows) == 6
    for prompt in PLAYED:
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn, text in enumerate(prompt.turns):
            row = rows[prompt.source, turn]
            messages.append({"role": "user", "content": text})
            assert row["prompt_ids"] == encode_prompt(files.tokenizer, messages)
            assert row["completion"] == draw(row["prompt_ids"], server.options)[0]
            assert (row["prompt"], row["class"]) == (text, prompt.class_name)
            messages.append({"role": "assistant", "content": row["completion"]})
    assert sorted(server.answered) == sorted(tuple(row["prompt_ids"]) for row in rows.values())


@pytest.mark.parametrize("token_ids", [True, False])
def test_completion_holds_the_sampled_ids_and_the_stop(
    files: TargetFiles, tmp_path: Path, token_ids: bool
) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(token_ids=token_ids, length_every=3) as server:
        summary = run(files, output, config_for(server))
    for row in lines(output):
        text, _, finish = draw(row["prompt_ids"], server.options)
        ids = files.tokenizer.encode(text, add_special_tokens=False)
        assert row["completion"] == text
        assert row["finish_reason"] == finish
        assert row["completion_ids"] == ids + ([STOP_ID] if finish == "stop" else [])
        assert "reasoning" not in row
    assert set(summary.finish_reasons) == {"stop", "length"}
    assert sum(summary.finish_reasons.values()) == len(PROMPTS)


def test_everything_that_decides_the_law_is_sent(files: TargetFiles, tmp_path: Path) -> None:
    config: dict[str, Any] = {"temperature": 0.6, "top_p": 0.8, "max_new_tokens": 77}
    bodies = []
    for name, top_k in (("a", 0), ("b", 5), ("c", 0)):
        with stub_server() as server:
            run(files, tmp_path / f"{name}.jsonl", config_for(server, top_k=top_k, **config))
        bodies.append({tuple(body["prompt"]): body for body in server.bodies})
    for body in bodies[0].values():
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.6, 0.8, 77)
        assert (body["model"], body["return_token_ids"]) == ("tiny", True)
        # Left open, an engine would take these from the target's generation config.
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert body["stop_token_ids"] == list(files.stop_ids)
    assert {body["top_k"] for body in bodies[1].values()} == {5}
    seeds = [{p: b["seed"] for p, b in run.items()} for run in bodies]
    assert len(set(seeds[0].values())) == len(PROMPTS)
    assert seeds[0] == seeds[2]
    assert all(0 <= seed < 1 << 31 for seed in seeds[0].values())
    assert not set(seeds[0].values()) & set(seeds[1].values())


def test_answers_come_out_of_order_and_within_the_bound(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(max_delay_s=0.1) as server:
        run(files, output, config_for(server, concurrency=3))
    assert server.most_in_flight == 3
    assert [row["source"] for row in lines(output)] != [p.source for p in PROMPTS]


def test_prompt_that_is_given_twice_is_asked_once(files: TargetFiles, tmp_path: Path) -> None:
    again = [Prompt(PROMPTS[0].turns, "x", "p.jsonl:99")]
    with stub_server() as server:
        summary = run(files, tmp_path / "rows.jsonl", config_for(server), PROMPTS[:2] + again)
    assert (summary.rows, server.requests) == (2, 2)


def test_known_reasoning_is_kept_beside_the_tokens(files: TargetFiles, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server(reasoning_every=2) as server:
        run(files, output, config_for(server))
    kept = 0
    for row in lines(output):
        text, reasoning, _ = draw(row["prompt_ids"], server.options)
        assert row.get("reasoning", "") == reasoning
        ids = files.tokenizer.encode(text or reasoning, add_special_tokens=False)
        assert row["completion_ids"] == [*ids, STOP_ID]
        kept += bool(reasoning)
    assert 0 < kept < len(PROMPTS)


def test_key_comes_from_the_environment_and_is_written_nowhere(
    files: TargetFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    output = tmp_path / "rows.jsonl"
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    # The stub repeats the key in its error messages, as some servers do.
    with stub_server(max_prompt=150, fail_every=5, required_key=SECRET) as server:
        summary = run(files, output, config_for(server, max_retries=9), PROMPTS + LONG)
    assert summary.rows == len(PROMPTS)
    assert set(server.keys) == {f"Bearer {SECRET}"}
    assert "***" in lines(summary.quarantine)[0]["message"]
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text(), path
    assert SECRET not in caplog.text
    assert "HTTP Request" not in caplog.text  # a line for every request would bury the rest
    monkeypatch.delenv("OPENAI_API_KEY")
    with stub_server(required_key=SECRET) as server, pytest.raises(ServerError, match="refuses"):
        run(files, tmp_path / "other.jsonl", config_for(server))
    assert set(server.keys) == {"Bearer none"}


def test_how_servers_are_asked_is_no_part_of_the_settings() -> None:
    one = config_for("http://a/v1")
    two = config_for(
        "http://b/v1",
        "http://c/v1",
        concurrency=9,
        timeout_s=1.0,
        max_retries=0,
        max_failures=1,
        batch_size=3,
        truncated=Truncated.drop,
    )
    assert sampling_settings(one) == sampling_settings(two)
    assert sampling_settings(one) != sampling_settings(config_for("http://a/v1", seed=1))
    assert sampling_settings(one) != sampling_settings(config_for("http://a/v1", server_model="x"))
    # Rows that were written before there were servers go on.
    assert sampling_settings(RegenerateConfig(truncated=Truncated.drop)) == (
        '{"max_new_tokens": 512, "temperature": 0.7, "top_p": 0.9, "top_k": 0, '
        '"samples_per_prompt": 1, "seed": 0}'
    )


def test_rows_of_a_server_and_of_this_process_are_not_mixed(
    files: TargetFiles, tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    with stub_server() as server:
        run(files, output, config_for(server))
    content = output.read_bytes()
    with pytest.raises(FingerprintMismatchError, match="regenerate"):
        run(files, output, RegenerateConfig())
    assert output.read_bytes() == content


def test_fingerprint_needs_no_weights_in_memory(files: TargetFiles, tiny_folder: Path) -> None:
    whole = Fingerprint.of_target(tiny_target(tiny_folder))
    assert Fingerprint.of_target(files).fields == whole.fields
    assert not hasattr(files, "model")


def test_stub_covers_the_cases_that_it_is_asked_for() -> None:
    finishes = {draw([i], StubOptions(length_every=3))[2] for i in range(50)}
    assert finishes == {"stop", "length"}
