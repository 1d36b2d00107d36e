"""Rows of every shape: what is supervised, what is dropped or quarantined, and what is said."""

import contextlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batch import Row
from data.config import CorpusConfig
from data.corpus import mix, parse_sources
from data.errors import ConfigError, DataError
from data.rows import Encoder, read_rows, usable_prompts
from data.spool import RowSpool
from data.tiny import VOCAB_SIZE, byte_tokenizer
from tests.support.tiny import answer_of, context_of

Lines = Sequence[object]


def encoder() -> Encoder:
    tokenizer: Any = byte_tokenizer()
    return Encoder(tokenizer, [tokenizer.eos_token_id], VOCAB_SIZE)


def write(path: Path, values: Lines) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


def rows_of(path: Path, **options: Any) -> list[Row]:
    config = CorpusConfig(**{"max_quarantined": 0.0, **options})
    return list(read_rows(config, path, encoder(), path.parent / "quarantine.jsonl"))


def ids(prompt: Lines, completion: Lines, **more: object) -> dict[str, object]:
    return {"prompt_ids": list(prompt), "completion_ids": list(completion), **more}


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def supervised_text(row: Row) -> list[str]:
    return [text_of(s.token_ids) for s in row.segments if s.supervised]


def text_of(ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(ids)))


def test_regenerated_rows_keep_their_token_ids(tmp_path: Path) -> None:
    values = [ids([1, 2, 3], [4, 5], **{"class": "math"}, finish_reason="length"), ids([9], [8, 7])]
    path = write(tmp_path / "r.jsonl", values)
    first = Row.of([1, 2, 3], [4, 5], class_name="math", source=f"{path}:1", finish_reason="length")
    assert rows_of(path) == [first, Row.of([9], [8, 7], source=f"{path}:2")]
    assert rows_of(path, limit=1) == [first]


SAME_ROW: list[dict[str, Any]] = [
    {"messages": talk("hi", "yo")},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"prompt": "hi", "completion": "yo"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            talk("", "yo")[1],
        ]
    },
]


@pytest.mark.parametrize("value", SAME_ROW)
def test_shapes_of_one_conversation_give_the_same_row(
    tmp_path: Path, value: dict[str, Any]
) -> None:
    expected = rows_of(write(tmp_path / "a.jsonl", SAME_ROW[:1]))
    path = write(tmp_path / "b.jsonl", [{**value, "class": "chat", "language": "de"}])
    (row,) = rows_of(path)
    assert (row.segments, row.row_id) == (expected[0].segments, expected[0].row_id)
    assert supervised_text(row) == ["yo<|im_end|>"]
    assert (row.class_name, row.language, row.source) == ("chat", "de", f"{path}:1")


def test_turns_share_a_row_while_the_template_only_extends(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"messages": talk("a", "B", "c", "D", "unanswered")}])
    (row,) = rows_of(path)
    assert supervised_text(row) == ["B<|im_end|>", "D<|im_end|>"]
    assert "unanswered" not in text_of(row.token_ids)


def test_system_message_in_the_middle_is_context(tmp_path: Path) -> None:
    messages = [*talk("a", "B"), {"role": "system", "content": "be brief"}, *talk("c", "D")]
    (row,) = rows_of(write(tmp_path / "r.jsonl", [{"messages": messages}]))
    assert supervised_text(row) == ["B<|im_end|>", "D<|im_end|>"]
    assert "system\nbe brief" in text_of(row.token_ids)


def test_ids_and_mask_become_segments(tmp_path: Path) -> None:
    value = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}
    (row,) = rows_of(write(tmp_path / "r.jsonl", [value]))
    assert row.token_ids == (5, 6, 7, 8, 9)
    assert row.loss_mask == [False, True, True, False, True]


def test_plain_text_is_supervised_behind_its_first_token(tmp_path: Path) -> None:
    (row,) = rows_of(write(tmp_path / "r.jsonl", [{"text": "abc"}]))
    assert row.loss_mask == [False, True, True]


def test_tool_calls_and_results_are_context_and_the_text_beside_them_is_not(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It is noon."},
    ]
    rows = rows_of(write(tmp_path / "r.jsonl", [{"messages": messages}]), min_supervised=1)
    assert [t for row in rows for t in supervised_text(row)] == [
        "<|im_end|>",
        "It is noon.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"prompt_ids": [1]}, "shape"),
        ({"question": "x"}, "shape"),
        ({"turns": ["x"]}, "shape"),
        ({}, "shape"),
        (ids([1], [-1]), "ids"),
        (ids([1], [1.0]), "ids"),
        (ids([True], [1]), "ids"),
        (ids([1], [VOCAB_SIZE, 2]), "ids"),
        ({"prompt_ids": "1", "completion_ids": [1]}, "ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "ids"),
        ({"messages": "text"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["text"]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "content"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": talk("no answer")}, "no_answer"),
        ({"messages": talk("a", "b"), "tools": "{"}, "tools"),
        ({"messages": talk("a", "b"), "class": "a/b"}, "class"),
        ({"messages": [*talk("a"), {"role": "assistant", "content": "b", "my_thinking": "x"}]},
         "unknown_reasoning"),
        ({"text": 3}, "content"),
        (ids([1] * 3000, [2] * 10), "no_supervision"),
        (ids([1, 2], []), "no_supervision"),
        ("text", "json"),
        ([1], "json"),
    ],
)  # fmt: skip
def test_bad_line_is_quarantined_with_file_line_and_reason(
    tmp_path: Path, value: object, reason: str
) -> None:
    path = write(tmp_path / "r.jsonl", [ids([1], [2, 3]), value, ids([4], [5, 6])])
    rows = rows_of(path, max_quarantined=0.5)
    assert [r.source for r in rows] == [f"{path}:1", f"{path}:3"]
    (entry,) = [json.loads(x) for x in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert (entry["source"], entry["reason"]) == (f"{path}:2", reason)
    assert entry["message"]
    with pytest.raises(DataError, match=rf"(?s)1 of 3 lines.*{reason}.*r\.jsonl:2"):
        rows_of(path)


def test_refusal_of_the_template_is_quarantined_in_its_own_words(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [ids([1], [2, 3]), {"messages": talk("x", "y")}])
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    strict = Encoder(tokenizer, [tokenizer.eos_token_id], VOCAB_SIZE)
    read_rows(CorpusConfig(max_quarantined=1), path, strict, tmp_path / "q.jsonl")
    entry = json.loads((tmp_path / "q.jsonl").read_text())
    assert (entry["source"], entry["reason"]) == (f"{path}:2", "template")
    assert "no such role" in entry["message"]


def test_unusable_prompts_are_quarantined_and_the_others_answered(tmp_path: Path) -> None:
    good = {"turns": ["a", "b"], "language": "de"}
    path = write(tmp_path / "p.jsonl", [good, {"question": 1}, {"prompt": "refuse me"}, "x"])
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if 'refuse' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}x"
    )
    config = CorpusConfig(max_quarantined=0.75)
    (prompt,) = usable_prompts(str(path), config, tokenizer, tmp_path / "q.jsonl")
    assert (prompt.turns, prompt.language) == (("a", "b"), "de")
    entries = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [(e["source"], e["reason"]) for e in entries] == [
        (f"{path}:2", "format"),
        (f"{path}:3", "template"),
        (f"{path}:4", "json"),
    ]
    with pytest.raises(DataError, match="3 of 4 lines cannot be used"):
        usable_prompts(str(path), CorpusConfig(), tokenizer, tmp_path / "q.jsonl")


def test_hopeless_corpus_ends_before_it_is_read_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [{"x": 1}] * 5000)
    with pytest.raises(DataError, match="200 of 200 lines"):
        rows_of(path)


@given(
    prompt=st.lists(st.integers(0, 255), max_size=12),
    completion=st.lists(st.integers(0, 255), max_size=12),
    limit=st.integers(1, 30),
)
def test_truncation_cuts_ids_and_mask_alike_and_keeps_the_rest(
    prompt: list[int], completion: list[int], limit: int
) -> None:
    row = Row.of(prompt, completion, class_name="c", source="s")
    cut = row.truncated(limit)
    whole = prompt + completion
    assert list(cut.token_ids) == whole[:limit]
    assert cut.loss_mask == row.loss_mask[:limit]
    assert len(cut) == len(cut.token_ids) == len(cut.loss_mask) == min(len(whole), limit)
    assert cut.num_supervised == sum(cut.loss_mask)
    assert cut.finish_reason == ("length" if len(whole) > limit else "stop")
    assert (cut.class_name, cut.source) == ("c", "s")


def test_rows_are_cut_to_max_length_and_dropped_when_too_little_is_supervised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [
        ids([1] * 5, [2] * 10),  # keeps 3 of its completion
        ids([3] * 6, [2] * 10),  # keeps 2: dropped
        ids([5], [6, 7]),  # short as it is: dropped
    ]
    path = write(tmp_path / "r.jsonl", values)
    with caplog.at_level(logging.WARNING):
        (row,) = rows_of(path, max_length=8, min_supervised=3)
    assert row == Row.of([1] * 5, [2] * 3, source=f"{path}:1", finish_reason="length")
    assert "dropped 2 rows: fewer than 3 supervised tokens" in caplog.text


def test_rows_that_occur_twice_are_kept_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The second has the same tokens and other supervision: another row.
    values = [ids([1, 2], [3, 4]), ids([1], [2, 3, 4]), ids([1, 2], [3, 4], **{"class": "other"})]
    path = write(tmp_path / "r.jsonl", values)
    with caplog.at_level(logging.WARNING):
        assert [r.source for r in rows_of(path)] == [f"{path}:1", f"{path}:2"]
    assert "dropped 1 rows: twice" in caplog.text


def test_cut_answers_are_kept_or_dropped_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [ids([1], [2, 3], finish_reason="length"), ids([4], [5, 6])])
    assert len(rows_of(path, keep_truncated=True)) == 2
    (row,) = rows_of(path, keep_truncated=False)
    assert row.source == f"{path}:2"


def test_when_every_row_is_dropped_the_reasons_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [ids([1], [2])])
    with pytest.raises(DataError, match=r"no row is left .*fewer than 2 supervised tokens.*1"):
        rows_of(path)


def test_torn_last_line_of_a_runs_own_rows_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [ids([1], [2, 3]), ids([4], [5, 6])])
    content = path.read_bytes()
    for keep in range(content.index(b"\n") + 1, len(content) - 1):
        path.write_bytes(content[:keep])
        assert [context_of(r) for r in rows_of(path)] == [(1,)]
    with pytest.raises(DataError, match="not JSON"):
        rows_of(path, rows=str(path))
    path.write_bytes(content[:-1])
    assert len(rows_of(path)) == 2, "a whole last line needs no newline"


@pytest.mark.parametrize("kind", ["parquet", "arrow", "folder"])
def test_other_files_give_the_rows_of_json_lines(tmp_path: Path, kind: str) -> None:
    values = [ids([i], [i + 1, i + 2], **{"class": "c"}) for i in range(5)]
    expected = rows_of(write(tmp_path / "r.jsonl", values))
    folder = tmp_path / "data"
    folder.mkdir()
    table = datasets.Dataset.from_list(values)
    if kind == "arrow":
        table.save_to_disk(str(tmp_path / "saved"))
        (path,) = (tmp_path / "saved").glob("*.arrow")
    else:
        path = folder / "r.parquet"
        table.to_parquet(str(path))
        path = folder if kind == "folder" else path
    found = rows_of(tmp_path / "none", rows=str(path))
    assert [(r.segments, r.class_name) for r in found] == [
        (r.segments, r.class_name) for r in expected
    ]
    assert found[1].source.endswith(":2")


def test_sources_are_mixed_in_the_ratio_of_their_weights(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [ids([1], [i, 2]) for i in range(100)])
    b = write(tmp_path / "b.jsonl", [ids([2], [i, 2]) for i in range(20)])
    rows = rows_of(tmp_path / "none", sources=[f"{a}@3", f"{b}@1"])
    of_b = [r for r in rows if context_of(r) == (2,)]
    assert len(of_b) == 20
    assert abs(len(rows) - 80) <= 3
    assert [answer_of(r)[0] for r in of_b] == list(range(20))
    assert [s for s, _ in mix([(str(a), 1.0), (str(b), 1.0)])][:4] == [
        f"{a}:1", f"{b}:1", f"{a}:2", f"{b}:2",
    ]  # fmt: skip


def test_weight_that_is_no_number_is_refused() -> None:
    assert parse_sources(["a.jsonl", "b.jsonl@0.5"]) == [("a.jsonl", 1.0), ("b.jsonl", 0.5)]
    for bad in ("a@x", "a@0", "a@-1"):
        with pytest.raises(ConfigError, match="not a positive number"):
            parse_sources([bad])


def test_rows_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path)
    rows = [
        Row.of(range(i), range(3), class_name=f"c{i}", source=f"é:{i}", language="de")
        for i in range(5)
    ]
    for i, row in enumerate(rows):
        spool.append(row)
        assert spool[i] == row
        assert spool[0] == rows[0], "reading does not move the place of writing"
    assert list(spool) == spool[:] == rows
    assert spool[-1] == rows[-1]
    assert [r.row_id for r in spool] == [r.row_id for r in rows]
    assert not list(tmp_path.iterdir()), "the file has no name"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text("ab<"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["messages", "role", "content", "prompt", "completion", "text", "class", "tools",
             "prompt_ids", "completion_ids", "input_ids", "loss_mask", "conversations", "from",
             "value", "tool_calls", "reasoning", "language", "user", "assistant"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
HALF_RIGHT = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": JSON}
    ), max_size=4)}
)  # fmt: skip


@given(st.lists(JSON | HALF_RIGHT, min_size=1, max_size=5))
def test_arbitrary_json_gives_rows_or_quarantine_and_never_a_crash(values: list[object]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name) / "r.jsonl", values)
        quarantine = Path(name) / "q.jsonl"
        config = CorpusConfig(max_quarantined=1.0, min_supervised=1)
        rows: list[Row] = []
        with contextlib.suppress(DataError):  # no row is left
            rows = list(read_rows(config, path, encoder(), quarantine))
        bad = quarantine.read_text().count("\n") if quarantine.exists() else 0
        assert bad <= len(values)
        assert all(row.num_supervised >= 1 for row in rows)
        if bad == len(values):
            assert not rows
