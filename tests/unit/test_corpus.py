"""JSON Lines in: the shapes that are read, and what every bad line says."""

import json
from pathlib import Path

import pytest

from data.corpus import Prompt, read_jsonl, read_prompts
from data.errors import DataError


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


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
    with pytest.raises(DataError, match=r"(?s)none\.jsonl: no such file.*fix: .*stage") as one:
        read_prompts(missing)
    assert one.value.source == str(missing)
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(empty)


def test_torn_last_line_is_an_error_where_tearing_is_not_expected(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"')
    with pytest.raises(DataError, match=r"p\.jsonl:2: not JSON"):
        list(read_jsonl(path))
