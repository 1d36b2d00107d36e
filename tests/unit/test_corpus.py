"""JSON Lines in: the shapes that are read, and what every bad line says."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batch import Row
from data.config import CorpusConfig
from data.corpus import Prompt, read_jsonl, read_prompts, read_rows
from data.errors import DataError
from data.tiny import byte_tokenizer


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


def rows_of(path: Path, **options: Any) -> list[Row]:
    tokenizer: Any = byte_tokenizer()
    return read_rows(path, CorpusConfig(**options), tokenizer, [tokenizer.eos_token_id])


def ids(
    prompt: Sequence[object], completion: Sequence[object], **more: object
) -> dict[str, object]:
    return {"prompt_ids": list(prompt), "completion_ids": list(completion), **more}


def test_prompts_are_read_in_each_shape_with_class_and_source(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"turns": ["one", "two"], "class": "chat"},
        {"prompt": "three"},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "four"},
                {"role": "assistant", "content": "not the target's own words"},
                {"role": "user", "content": "five"},
            ],
            "class": "code",
        },
    )
    assert read_prompts(path) == [
        Prompt(("one", "two"), "chat", f"{path}:1"),
        Prompt(("three",), "", f"{path}:2"),
        Prompt(("four", "five"), "code", f"{path}:3", system="be brief"),
    ]


def test_blank_lines_are_skipped_but_counted_and_limit_counts_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n  \n{"prompt": "b"}\n{"prompt": "c"}\n')
    assert [p.source for p in read_prompts(path)] == [f"{path}:{n}" for n in (2, 4, 5)]
    assert [p.turns for p in read_prompts(path, 2)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ("{}", "no prompt found"),
        ('{"question": "x"}', "question"),
        ('{"turns": []}', "no prompt found"),
        ('{"turns": "text"}', "no prompt found"),
        ('{"turns": ["a", 3]}', "no prompt found"),
        ('{"turns": ["a", ""]}', "no prompt found"),
        ('{"prompt": null}', "no prompt found"),
        ('{"prompt": "a", "class": 3}', "class 3 cannot name a file"),
        ('{"prompt": "a", "class": "code/py"}', "cannot name a file"),
        ('{"prompt": "a", "class": "summary"}', "cannot name a file"),
        ('{"messages": "text"}', "'messages'"),
        ('{"messages": [{"role": "user"}]}', "'messages'"),
        ('{"messages": [{"role": "user", "content": null}]}', "'messages'"),
        ('{"messages": [{"role": "system", "content": "s"}]}', "no prompt found"),
    ],
)
def test_bad_prompt_line_is_named_with_file_and_line(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert error.value.source == f"{path}:2"
    assert str(error.value).startswith(f"{path}:2: ")
    assert problem in str(error.value)


def test_line_that_is_not_utf8_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2"):
        read_prompts(path)


def test_missing_and_empty_files_are_named_with_the_fix(tmp_path: Path) -> None:
    missing, empty = tmp_path / "none.jsonl", write(tmp_path / "empty.jsonl")
    for read in (read_prompts, rows_of):
        with pytest.raises(DataError, match=r"(?s)none\.jsonl: no such file.*fix: .*stage") as one:
            read(missing)
        assert one.value.source == str(missing)
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(empty)
    with pytest.raises(DataError, match="no row is left"):
        rows_of(empty)


def test_regenerated_rows_keep_their_token_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        ids([1, 2, 3], [4, 5], **{"class": "math"}, finish_reason="length"),
        ids([9], [8, 7]),
    )
    assert rows_of(path) == [
        Row((1, 2, 3), (4, 5), "math", f"{path}:1", "length"),
        Row((9,), (8, 7), "", f"{path}:2", "stop"),
    ]
    assert rows_of(path, limit=1) == rows_of(path)[:1]


def test_conversation_gives_one_row_per_answer(tmp_path: Path) -> None:
    messages = [{"role": r, "content": c} for r, c in [("user", "q"), ("assistant", "ab")] * 2]
    path = write(tmp_path / "r.jsonl", {"messages": messages, "class": "chat"})
    first, second = rows_of(path)
    assert first.class_name == "chat"
    assert first.source == second.source == f"{path}:1"
    assert len(first.completion_ids) == len(second.completion_ids) == 3
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


@pytest.mark.parametrize(
    "value",
    [
        {"prompt_ids": [1]},
        ids([1], [-1]),
        ids([1], [1.0]),
        ids([True], [1]),
        {"prompt_ids": "1", "completion_ids": [1]},
        {"text": "x"},
        {"messages": [{"role": "user", "content": 1}]},
    ],
)
def test_bad_row_is_named_with_file_and_line(tmp_path: Path, value: object) -> None:
    path = write(tmp_path / "r.jsonl", ids([1], [2, 3]), value)
    with pytest.raises(DataError) as error:
        rows_of(path)
    assert error.value.source == f"{path}:2"


def test_refusal_of_the_template_names_the_row(tmp_path: Path) -> None:
    turns = [{"role": r, "content": "x"} for r in ("user", "assistant")]
    path = write(tmp_path / "r.jsonl", ids([1], [2, 3]), {"messages": turns})
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(DataError, match=r"(?s)r\.jsonl:2.*no such role"):
        read_rows(path, CorpusConfig(), tokenizer, [tokenizer.eos_token_id])


@given(
    prompt=st.lists(st.integers(0, 255), max_size=12),
    completion=st.lists(st.integers(0, 255), max_size=12),
    limit=st.integers(1, 30),
)
def test_truncation_cuts_ids_and_mask_alike_and_the_completion_first(
    prompt: list[int], completion: list[int], limit: int
) -> None:
    row = Row(tuple(prompt), tuple(completion), "c", "s")
    cut = row.truncated(limit)
    whole = prompt + completion
    assert list(cut.token_ids) == whole[:limit]
    assert cut.loss_mask == row.loss_mask[:limit]
    assert len(cut) == len(cut.token_ids) == len(cut.loss_mask) == min(len(whole), limit)
    assert cut.finish_reason == ("length" if len(whole) > limit else "stop")
    assert (cut.class_name, cut.source) == ("c", "s")


def test_rows_are_cut_to_max_length_and_dropped_when_too_little_is_supervised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path / "r.jsonl",
        ids([1] * 5, [2] * 10),  # keeps 3 of its completion
        ids([3] * 6, [2] * 10),  # keeps 2: dropped
        ids([4] * 9, [2] * 10),  # the prompt alone is too long: dropped
        ids([5], [6, 7]),  # short as it is: dropped
    )
    with caplog.at_level(logging.WARNING):
        (row,) = rows_of(path, max_length=8, min_supervised=3)
    assert row == Row((1,) * 5, (2,) * 3, "", f"{path}:1", "length")
    assert [r.message for r in caplog.records] == [
        f"{path}: dropped 3 rows: fewer than 3 supervised tokens"
    ]


def test_duplicates_are_kept_once_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path / "r.jsonl",
        ids([1, 2], [3, 4]),
        ids([1], [2, 3, 4]),  # the same tokens, other supervision: another row
        ids([1, 2], [3, 4], **{"class": "other"}),
    )
    with caplog.at_level(logging.WARNING):
        rows = rows_of(path)
    assert [r.source for r in rows] == [f"{path}:1", f"{path}:2"]
    assert [r.message for r in caplog.records] == [f"{path}: dropped 1 rows: duplicate"]


def test_cut_answers_are_kept_or_dropped_and_logged_as_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "r.jsonl", ids([1], [2, 3], finish_reason="length"), ids([4], [5, 6]))
    assert len(rows_of(path, keep_truncated=True)) == 2
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        (row,) = rows_of(path, keep_truncated=False)
    assert row.source == f"{path}:2"
    assert "dropped 1 rows: answer cut at its token limit" in caplog.text


def test_when_every_row_is_dropped_the_reasons_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", ids([1], [2]))
    with pytest.raises(DataError, match=r"no row is left .*fewer than 2 supervised tokens.*1"):
        rows_of(path)


def test_torn_last_line_of_rows_is_skipped_and_a_torn_middle_line_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", ids([1], [2, 3]), ids([4], [5, 6]))
    content = path.read_bytes()
    for keep in range(content.index(b"\n") + 1, len(content) - 1):
        path.write_bytes(content[:keep])
        assert [r.prompt_ids for r in rows_of(path)] == [(1,)]
    path.write_bytes(content[:-1])
    assert len(rows_of(path)) == 2, "a whole last line needs no newline"
    path.write_bytes(content[:20] + b"\n" + content)
    with pytest.raises(DataError, match=r"r\.jsonl:1: not JSON"):
        rows_of(path)


def test_torn_last_line_is_an_error_where_tearing_is_not_expected(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"')
    with pytest.raises(DataError, match=r"p\.jsonl:2: not JSON"):
        list(read_jsonl(path))
