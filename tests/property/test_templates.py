"""Encoding under real templates: supervised is exactly what the target would generate."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batch import Row
from data.chat import Conversation, encode_conversation, encode_prompt
from data.config import TargetConfig
from data.errors import DataError
from data.fingerprint import Fingerprint
from data.target import Target, load_stop_ids, load_tokenizer
from data.tiny import MASK_ID
from tests.support.templates import EXTENDING, TEMPLATES, TRIMMING, tokenizer_with
from tests.support.tiny import CPU

# Text with what templates and tokenizers stumble over: spaces at the edges, quotes of headers,
# several bytes a character.
TEXT = st.text(alphabet="ab \n:|<>é字", min_size=1, max_size=12).filter(lambda t: t.strip()) | (
    st.sampled_from(["<think>", "assistant: x", "user: y", "</think>", "{{ x }}"])
)
TALKS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3)


def messages_of(talk: list[tuple[str, str]]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": r, "content": t} for pair in talk for r, t in zip(roles, pair, strict=True)]


def encode(tokenizer: Any, messages: list[dict[str, Any]]) -> list[Row]:
    talk = Conversation(tuple(messages), "c", "talk.jsonl:1")
    return encode_conversation(tokenizer, talk, {tokenizer.eos_token_id})


def turns_of(rows: list[Row]) -> list[tuple[list[int], list[int]]]:
    """(context, answer) ids of every turn, whichever row it is in."""
    found = []
    for row in rows:
        before: list[int] = []
        for segment in row.segments:
            if segment.supervised:
                found.append((list(before), list(segment.token_ids)))
            before += segment.token_ids
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(talk=TALKS)
def test_each_turn_has_servings_prompt_and_the_answer_with_its_stop(
    name: str, talk: list[tuple[str, str]]
) -> None:
    tokenizer = tokenizer_with(name)
    messages = messages_of(talk)
    turns = turns_of(encode(tokenizer, messages))
    assert len(turns) == len(talk)
    for i, ((context, answer), (_, text)) in enumerate(zip(turns, talk, strict=True)):
        assert context == encode_prompt(tokenizer, messages[: 2 * i + 1])
        assert answer[-1] == tokenizer.eos_token_id
        assert answer.count(tokenizer.eos_token_id) == 1
        expected = text.strip() if name in TRIMMING else text
        decoded = tokenizer.decode(answer[:-1])
        if name == "qwen3":  # thinking: the empty block is the target's to write
            assert decoded == f"<think>\n\n</think>\n\n{expected}"
        else:
            assert decoded == expected


@pytest.mark.parametrize("name", TEMPLATES)
@given(talk=TALKS)
def test_templates_that_only_extend_give_one_row_and_others_one_a_turn(
    name: str, talk: list[tuple[str, str]]
) -> None:
    tokenizer = tokenizer_with(name)
    rows = encode(tokenizer, messages_of(talk))
    assert len(rows) == (1 if name in EXTENDING else len(talk))


@pytest.mark.parametrize("name", EXTENDING)
@given(talk=TALKS)
def test_shared_rows_and_rows_of_their_own_agree(name: str, talk: list[tuple[str, str]]) -> None:
    tokenizer = tokenizer_with(name)
    messages = messages_of(talk)
    # The last turn of a conversation that ends there is what the turn is on its own.
    alone = [turns_of(encode(tokenizer, messages[: 2 * i + 2]))[-1] for i in range(len(talk))]
    assert turns_of(encode(tokenizer, messages)) == alone


@given(talk=TALKS, limit=st.integers(1, 60))
def test_truncation_never_changes_what_is_kept(talk: list[tuple[str, str]], limit: int) -> None:
    for row in encode(tokenizer_with("chatml"), messages_of(talk)):
        cut = row.truncated(limit)
        assert cut.token_ids == row.token_ids[:limit]
        assert cut.loss_mask == row.loss_mask[:limit]


def test_thinking_off_puts_the_empty_block_into_the_context() -> None:
    tokenizer = tokenizer_with("qwen3")
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, enable_thinking=False)
    ((context, answer),) = turns_of(encode(tokenizer, messages_of([("q", "a")])))
    assert tokenizer.decode(context).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(answer) == "a<|im_end|>"


def test_reasoning_is_supervised_in_its_own_turn_and_gone_from_later_context() -> None:
    tokenizer = tokenizer_with("qwen3")
    messages = messages_of([("q", "a"), ("r", "b")])
    messages[1]["reasoning_content"] = "because"
    first, second = turns_of(encode(tokenizer, messages))
    assert tokenizer.decode(first[1]) == "<think>\nbecause\n</think>\n\na<|im_end|>"
    assert "because" not in tokenizer.decode(second[0])


@pytest.mark.parametrize("roles", [["system", "user", "assistant"], ["user", "user", "assistant"]])
def test_strict_template_refuses_in_its_own_words(roles: list[str]) -> None:
    messages = [{"role": r, "content": "x"} for r in roles]
    with pytest.raises(DataError, match=r"(?s)talk\.jsonl:1.*must alternate") as error:
        encode(tokenizer_with("gemma"), messages)
    assert error.value.reason == "template"


def test_tokenizer_without_pad_token_or_with_left_truncation_changes_nothing() -> None:
    messages = messages_of([("q" * 50, "a" * 50)])
    expected = encode(tokenizer_with("chatml"), messages)
    tokenizer = tokenizer_with("chatml")
    tokenizer.truncation_side = tokenizer.padding_side = "left"
    tokenizer.model_max_length = 10
    tokenizer.pad_token = None
    assert encode(tokenizer, messages) == expected


def test_thinking_is_part_of_every_render_and_of_the_fingerprint(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES["qwen3"][0])
    prints, prompts = [], []
    for thinking in (None, True, False):
        config = TargetConfig(path=str(folder), mask_token_id=MASK_ID, thinking=thinking)
        target = Target(config, CPU)
        prints.append(Fingerprint.of_target(target).fields)
        prompts.append(encode_prompt(target.tokenizer, [{"role": "user", "content": "q"}]))
    assert prompts[0] == prompts[1] != prompts[2]
    differing = {k for k in prints[1] if prints[1][k] != prints[2][k]}
    assert differing == {"probe_renders"}
    assert prints[0] == prints[1]


def test_stop_ids_are_read_without_the_weights(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    config = TargetConfig(path=str(tiny_folder), mask_token_id=MASK_ID)
    assert load_stop_ids(tiny_folder, tokenizer) == Target(config, CPU).stop_ids


@pytest.mark.slow
@pytest.mark.real
@given(talk=TALKS)
def test_the_real_targets_own_template(real_folder: Path, talk: list[tuple[str, str]]) -> None:
    tokenizer = load_tokenizer(real_folder)
    messages = messages_of(talk)
    rows = encode(tokenizer, messages)
    turns = turns_of(rows)
    assert len(turns) == len(talk)
    for i, ((context, answer), (_, text)) in enumerate(zip(turns, talk, strict=True)):
        assert context == encode_prompt(tokenizer, messages[: 2 * i + 1])
        assert tokenizer.decode(answer) == f"{text}<|im_end|>"
