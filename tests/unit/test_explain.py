"""What `mode=explain` shows of a row: every token, and why it is or is not supervised."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.batch import Row
from data.explain import explain_rows, row_table
from data.tiny import STOP_ID, byte_tokenizer

NEWLINE = 198


def tokenizer() -> Any:
    return byte_tokenizer()


def row() -> Row:
    prompt = tokenizer().encode("q[red]\n")
    answer = [*tokenizer().encode("ok"), STOP_ID]
    return Row.of(prompt, answer, class_name="math", source="rows.jsonl:7")


def lines_of(shown: Row) -> list[str]:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(row_table(shown, tokenizer(), [STOP_ID]))
    return console.export_text().splitlines()


def test_every_token_has_a_line_with_text_role_and_reason() -> None:
    tokens = [line.split("│") for line in lines_of(row()) if line.strip()[:1].isdigit()]
    cells = [[c.strip() for c in line] for line in tokens]
    assert [int(c[1]) for c in cells] == list(row().token_ids)
    assert [c[2] for c in cells][1:6] == ["'['", "'r'", "'e'", "'d'", "']'"]
    assert [c[3] for c in cells] == ["context"] * 7 + ["assistant"] * 3
    assert [c[4] for c in cells] == (
        ["no: serving is given it"] * 7
        + ["yes: the target generates it"] * 2
        + ["yes: it ends the answer"]
    )
    # An anchor and the token behind it are supervised.
    assert [c[5] for c in cells] == [""] * 7 + ["yes", "yes", ""]


def test_page_and_terminal_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "new" / "page.html"
    explain_rows([row()], tokenizer(), [STOP_ID], html)
    shown, page = capsys.readouterr().out, html.read_text()
    for text in ("rows.jsonl:7", "math", "3 of 10 tokens are supervised", "it ends the answer"):
        assert text in shown
        assert text in page
    assert page.startswith("<!DOCTYPE html>")
