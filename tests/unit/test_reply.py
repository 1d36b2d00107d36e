"""What a reply says about the tokens that were sampled."""

from array import array
from typing import Any

import pytest

from data.corpus import Prompt
from data.errors import ServerError
from data.generate.base import Answer, Failure, FailureClass, Job, Request
from data.generate.reply import ReplyReader
from data.tiny import MASK_ID, STOP_ID, byte_tokenizer

JOB = Job(Request(Prompt(("q",), "", "p.jsonl:1"), 0, 0), "0" * 32, array("I", [1, 2, 3]))
OTHER_STOP = 0
TOKENIZER = byte_tokenizer()
READER = ReplyReader(TOKENIZER, (OTHER_STOP, STOP_ID))
AB = TOKENIZER.encode("ab", add_special_tokens=False)


def read(choice: dict[str, Any], **reply: Any) -> Answer | Failure:
    whole = {"text": "ab", "finish_reason": "stop", **choice}
    return READER.read(JOB, {"choices": [whole], **reply})


def answer(choice: dict[str, Any], **reply: Any) -> Answer:
    outcome = read(choice, **reply)
    assert isinstance(outcome, Answer), outcome
    return outcome


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"token_ids": [*AB, OTHER_STOP]}, [*AB, OTHER_STOP]),
        ({"token_ids": AB}, [*AB, STOP_ID]),  # left out: the tokenizer's eos
        ({"token_ids": AB, "stop_reason": OTHER_STOP}, [*AB, OTHER_STOP]),
        ({"token_ids": AB, "stop_reason": 77}, [*AB, STOP_ID]),  # not one of the target's
        ({"token_ids": AB, "stop_reason": "\n"}, [*AB, STOP_ID]),
        ({"token_ids": [*AB, STOP_ID, *AB]}, [*AB, STOP_ID]),  # nothing behind the stop
        ({}, [*AB, STOP_ID]),
        ({"stop_reason": OTHER_STOP}, [*AB, OTHER_STOP]),
    ],
)
def test_stopped_answer_ends_with_the_stop_token(choice: dict[str, Any], ids: list[int]) -> None:
    found = answer(choice)
    assert (found.completion_ids, found.text, found.finish_reason) == (ids, "ab", "stop")


def test_cut_answer_has_no_stop_token() -> None:
    for choice in ({"token_ids": AB}, {}):
        found = answer({**choice, "finish_reason": "length"})
        assert (found.completion_ids, found.finish_reason) == (AB, "length")


def test_stop_token_at_the_limit_is_a_stop() -> None:
    found = answer({"token_ids": [*AB, STOP_ID], "finish_reason": "length"})
    assert found.finish_reason == "stop"


def test_answer_that_stops_at_once_is_an_answer() -> None:
    found = answer({"text": "", "token_ids": [STOP_ID]})
    assert (found.completion_ids, found.text) == ([STOP_ID], "")


def test_text_is_that_of_the_tokens() -> None:
    """The server's text lacks special tokens that the target sampled; the ids have them."""
    found = answer({"token_ids": [*AB, MASK_ID, STOP_ID]})
    assert found.text == "ab<|mask|>"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_known_reasoning_is_handed_on(name: str) -> None:
    assert answer({"token_ids": [*AB, STOP_ID], name: "hm"}).reasoning == "hm"
    assert answer({"token_ids": [*AB, STOP_ID], name: None}).reasoning is None


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"text": ""}, FailureClass.empty),
        ({"text": None, "token_ids": []}, FailureClass.empty),
        ({"text": "", "reasoning_content": "hm"}, FailureClass.empty),
        ({"thinking": "hm", "token_ids": AB}, FailureClass.unknown_reasoning),
        ({"my_reasons": "hm"}, FailureClass.unknown_reasoning),
        # The text lacks what was sampled as reasoning, and the tokens are not known.
        ({"reasoning": "hm"}, FailureClass.unknown_reasoning),
        ({"finish_reason": "abort"}, FailureClass.server_error),
        ({"finish_reason": None}, FailureClass.server_error),
    ],
)
def test_unusable_choice_has_a_class(choice: dict[str, Any], error: FailureClass) -> None:
    outcome = read(choice)
    assert isinstance(outcome, Failure)
    assert outcome.error is error


def test_other_reasons_are_not_reasoning() -> None:
    answer({"token_ids": AB, "matched_reason": "eos", "thinking": None, "reasoned": 3})


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [None]}, {"choices": "x"}])
def test_reply_without_a_choice_is_a_failure(reply: dict[str, Any]) -> None:
    outcome = READER.read(JOB, reply)
    assert isinstance(outcome, Failure)
    assert outcome.error is FailureClass.server_error


@pytest.mark.parametrize(
    ("choice", "reply"),
    [
        ({"prompt_token_ids": [1, 2, 4]}, {}),
        ({}, {"usage": {"prompt_tokens": 4}}),
    ],
)
def test_another_context_than_sent_is_refused(choice: dict[str, Any], reply: Any) -> None:
    with pytest.raises(ServerError, match=r"another context.*p\.jsonl:1"):
        read(choice, **reply)


def test_servers_that_say_the_right_context_or_nothing_are_believed() -> None:
    answer({"prompt_token_ids": [1, 2, 3]}, usage={"prompt_tokens": 3})
    answer({"prompt_token_ids": None}, usage={"prompt_tokens": 0})
    answer({}, usage=None)
