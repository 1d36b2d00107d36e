"""The target's own answers: greedy by hand, kept, resumed line by line, and never mixed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.chat import Message, encode_prompt
from data.config import CorpusConfig, RegenerateConfig
from data.corpus import Prompt
from data.errors import DataError, FingerprintMismatchError
from data.fingerprint import Fingerprint
from data.regenerate import Summary, regenerate
from data.rows import Encoder, read_rows
from data.target import Target
from tests.support.tiny import answer_of, tiny_target

GREEDY = RegenerateConfig(max_new_tokens=8, temperature=0.0, batch_size=3)
DRAWN = RegenerateConfig(
    max_new_tokens=6, temperature=0.8, top_p=0.95, batch_size=2, samples_per_prompt=2
)
PROMPTS = [
    Prompt(("one",), "chat", "p.jsonl:1"),
    Prompt(("two and more words", "then?"), "code", "p.jsonl:2"),
    Prompt(("three", "next", "last"), "math", "p.jsonl:3", system="be brief"),
    Prompt(("four!",), "chat", "p.jsonl:4"),
]
NUM_TURNS = sum(len(p.turns) for p in PROMPTS)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def run(
    target: Target, output: Path, config: RegenerateConfig = GREEDY, prompts: Any = PROMPTS
) -> Summary:
    return regenerate(target, prompts, config, output, Fingerprint.of_target(target))


def rows_in(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def greedy(target: Target, prompt: list[int], limit: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < limit and not set(answer) & set(target.stop_ids):
        ids = torch.tensor([prompt + answer])
        answer.append(int(target.model(input_ids=ids).logits[0, -1].argmax()))
    return answer


def test_greedy_rows_are_a_plain_greedy_loops(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "rows.jsonl")
    rows = rows_in(tmp_path / "rows.jsonl")
    assert len(rows) == NUM_TURNS
    for row in rows:
        assert row["completion_ids"] == greedy(target, row["prompt_ids"], 8)
        stopped = row["completion_ids"][-1] in target.stop_ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert len(row["completion_ids"]) == 8 or stopped


def cut_behind(answer: list[int], stop: int) -> list[int]:
    return answer[: answer.index(stop) + 1] if stop in answer else answer


def test_stop_token_ends_an_answer_and_is_kept_in_the_ids_only(
    target: Target, tmp_path: Path
) -> None:
    prompts = [Prompt((text,), "", text) for text in ("one", "two and more", "three!")]
    answers = [
        greedy(target, encode_prompt(target.tokenizer, [{"role": "user", "content": p.source}]), 8)
        for p in prompts
    ]
    # A stop token at which some answers end and others go on, so that the first are padded.
    stop = max(
        {token for answer in answers for token in answer},
        key=lambda token: len({len(cut_behind(answer, token)) for answer in answers}),
    )
    expected = [cut_behind(answer, stop) for answer in answers]
    assert len({len(answer) for answer in expected}) > 1
    other = tiny_target(target.folder)
    other.stop_ids = tuple(sorted({*target.stop_ids, stop}))
    run(other, tmp_path / "rows.jsonl", prompts=prompts)
    rows = {row["source"]: row for row in rows_in(tmp_path / "rows.jsonl")}
    for prompt, ids in zip(prompts, expected, strict=True):
        row = rows[prompt.source]
        stopped = ids[-1] in other.stop_ids
        assert row["completion_ids"] == ids
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert row["completion"] == target.tokenizer.decode(ids[:-1] if stopped else ids)


def test_each_turn_sees_the_answers_that_were_drawn_before(target: Target, tmp_path: Path) -> None:
    run(target, tmp_path / "rows.jsonl", DRAWN)
    rows = {(r["source"], r["turn"], r["sample"]): r for r in rows_in(tmp_path / "rows.jsonl")}
    assert len(rows) == 2 * NUM_TURNS
    for prompt in PROMPTS:
        for sample in range(2):
            messages: list[Message] = []
            if prompt.system:
                messages.append({"role": "system", "content": prompt.system})
            for turn, text in enumerate(prompt.turns):
                row = rows[prompt.source, turn, sample]
                messages.append({"role": "user", "content": text})
                assert row["prompt_ids"] == encode_prompt(target.tokenizer, messages)
                assert (row["prompt"], row["class"]) == (text, prompt.class_name)
                messages.append({"role": "assistant", "content": row["completion"]})
    texts = {s: rows["p.jsonl:1", 0, s]["completion"] for s in range(2)}
    assert texts[0] != texts[1]


def test_rows_are_read_by_the_cache_as_they_are(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output)
    encoder = Encoder(target.tokenizer, target.stop_ids, target.text_config.vocab_size)
    found = read_rows(CorpusConfig(min_supervised=1), output, encoder, tmp_path / "q.jsonl")
    written = rows_in(output)
    assert [list(answer_of(r)) for r in found] == [r["completion_ids"] for r in written]
    assert [r.class_name for r in found] == [r["class"] for r in written]


@pytest.mark.parametrize("config", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_running_twice_adds_nothing(
    target: Target, tmp_path: Path, config: RegenerateConfig
) -> None:
    output = tmp_path / "rows.jsonl"
    first = run(target, output, config)
    content = output.read_bytes()
    second = run(target, output, config)
    assert output.read_bytes() == content
    assert (second.rows, second.written, second.new_tokens) == (first.rows, 0, 0)
    assert second.finish_reasons == first.finish_reasons


@pytest.mark.parametrize("config", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_lost_lines_and_a_torn_last_line_are_restored_exactly(
    target: Target, tmp_path: Path, config: RegenerateConfig
) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output, config)
    lines = output.read_text().splitlines(keepends=True)
    generator = np.random.default_rng(0)
    for case in range(8):
        kept = [line for line in lines if generator.random() < case / 8]
        torn = lines[int(generator.integers(len(lines)))]
        cut = int(generator.integers(0, len(torn)))
        output.write_text("".join(kept) + torn[:cut])
        summary = run(target, output, config)
        assert sorted(output.read_text().splitlines(keepends=True)) == sorted(lines)
        assert (summary.rows, summary.written) == (len(lines), len(lines) - len(kept))


def test_draws_do_not_depend_on_torchs_random_state(target: Target, tmp_path: Path) -> None:
    contents = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        run(target, tmp_path / f"{seed}.jsonl", DRAWN)
        contents.append((tmp_path / f"{seed}.jsonl").read_text())
    assert contents[0] == contents[1]
    other = RegenerateConfig(**{**vars(DRAWN), "seed": 1})
    run(target, tmp_path / "other.jsonl", other)
    completions = [r["completion"] for r in rows_in(tmp_path / "other.jsonl")]
    assert completions != [r["completion"] for r in rows_in(tmp_path / "0.jsonl")]


def test_prompt_that_is_given_twice_is_answered_once(target: Target, tmp_path: Path) -> None:
    twice = [*PROMPTS[:2], Prompt(PROMPTS[1].turns, "code", "p.jsonl:9")]
    output = tmp_path / "rows.jsonl"
    config = RegenerateConfig(**{**vars(DRAWN), "batch_size": 8})
    summary = run(target, output, config, twice)
    keys = [row["key"] for row in rows_in(output)]
    assert len(keys) == len(set(keys)) == summary.rows == summary.written


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"seed": 1}, {"max_new_tokens": 9}, {"top_k": 5}],
)
def test_changed_settings_are_refused_by_name(
    target: Target, tmp_path: Path, change: dict[str, Any]
) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output, prompts=PROMPTS[:1])
    content = output.read_bytes()
    with pytest.raises(FingerprintMismatchError, match=r"regenerate \(first difference") as error:
        run(target, output, RegenerateConfig(**{**vars(GREEDY), **change}), PROMPTS[:1])
    assert str(output) in str(error.value)
    assert output.read_bytes() == content


def test_rows_of_another_template_are_refused(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output, prompts=PROMPTS[:1])
    other = Fingerprint.of_target(target).extended(chat_template="other")
    with pytest.raises(FingerprintMismatchError, match="chat_template"):
        regenerate(target, PROMPTS[:1], GREEDY, output, other)


def test_file_of_another_kind_is_not_appended_to(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output, prompts=PROMPTS[:1])
    with output.open("a") as file:
        file.write('{"text": "not a row"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not a regenerated row"):
        run(target, output, prompts=PROMPTS[:1])


def test_prompt_that_the_template_refuses_is_named(target: Target, tmp_path: Path) -> None:
    other = tiny_target(target.folder)
    other.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}q"
    )
    with pytest.raises(DataError, match=r"(?s)p\.jsonl:3.*no system"):
        run(other, tmp_path / "rows.jsonl")


def test_summary_counts_what_is_in_the_file_and_what_is_new(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    first = run(target, output, prompts=PROMPTS[:2])
    summary = run(target, output)
    rows = rows_in(output)
    assert (first.rows, first.written) == (3, 3)
    assert (summary.rows, summary.written) == (NUM_TURNS, NUM_TURNS - 3)
    assert first.new_tokens + summary.new_tokens == sum(len(r["completion_ids"]) for r in rows)
    reasons = [r["finish_reason"] for r in rows]
    assert summary.finish_reasons == {r: reasons.count(r) for r in set(reasons)}


def test_smaller_batches_go_on_with_the_same_rows(target: Target, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    run(target, output, prompts=PROMPTS[:2])
    before = rows_in(output)
    run(target, output, RegenerateConfig(**{**vars(GREEDY), "batch_size": 1}))
    assert rows_in(output)[: len(before)] == before
    assert len(rows_in(output)) == NUM_TURNS


def test_sampling_options_that_ship_with_the_target_change_nothing(
    target: Target, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    path = folder / "generation_config.json"
    shipped = json.loads(path.read_text()) | {"repetition_penalty": 5.0, "min_new_tokens": 8}
    path.write_text(json.dumps(shipped))
    run(target, tmp_path / "a.jsonl")
    run(tiny_target(folder), tmp_path / "b.jsonl")
    assert rows_in(tmp_path / "a.jsonl") == rows_in(tmp_path / "b.jsonl")
