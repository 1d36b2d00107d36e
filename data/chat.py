"""From a conversation to token ids: the prompt exactly as serving renders it, and the answer.

Prompt and completion are tokenised apart, as an engine does: it receives the rendered prompt and
appends the tokens that it samples.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from jinja2.exceptions import TemplateError

from data.batch import Row
from data.errors import DataError

Message = dict[str, str]


class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    def apply_chat_template(
        self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Renders messages to text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text."""


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI form, with what travels beside them."""

    messages: tuple[Message, ...]
    class_name: str
    source: str


def render(tokenizer: Tokenizer, messages: Sequence[Message], generation_prompt: bool) -> str:
    """The template's text. Raises DataError with the template's own words."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError("chat template", f"refuses the messages: {error}") from error


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids of the prompt up to and with its generation prompt; no special token is added."""
    return tokenizer.encode(render(tokenizer, messages, True), add_special_tokens=False)


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation, stop_ids: Collection[int]
) -> list[Row]:
    """One row per assistant turn, each in the context that serving has.

    The completion is what the render with the turn adds to the prompt, up to and including the
    first stop token: what the template writes behind it is not generated, so not supervised.

    Raises:
        DataError: the template refuses the messages, or its render with the turn does not extend
            the prompt (it rewrites earlier text), so that no completion can be told apart.
    """
    rows = []
    messages = conversation.messages
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            prompt = render(tokenizer, messages[:turn], True)
            whole = render(tokenizer, messages[: turn + 1], False)
        except DataError as error:
            raise DataError(conversation.source, str(error)) from error
        if not whole.startswith(prompt):
            raise DataError(
                conversation.source,
                f"the template's render of turn {turn} does not begin with its own prompt",
                "regenerate the answers with 'dspark regenerate', which keeps token ids",
            )
        completion = tokenizer.encode(whole[len(prompt) :], add_special_tokens=False)
        stop = next((i for i, t in enumerate(completion) if t in stop_ids), None)
        rows.append(
            Row(
                tuple(tokenizer.encode(prompt, add_special_tokens=False)),
                tuple(completion if stop is None else completion[: stop + 1]),
                conversation.class_name,
                conversation.source,
                "length" if stop is None else "stop",
            )
        )
    return rows
