"""From a conversation to token ids: the prompt exactly as serving renders it, and the answers.

Prompt and completion are tokenised apart, as an engine does: it receives the rendered prompt and
appends the tokens that it samples.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from data.batch import ASSISTANT, CONTEXT, Row, Segment
from data.errors import DataError

Message = dict[str, Any]


class Tokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    def apply_chat_template(
        self,
        conversation: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Renders messages to text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids to text."""


@dataclass(frozen=True)
class Conversation:
    """Messages in OpenAI form, the tools they may call, and what travels beside them."""

    messages: tuple[Message, ...]
    class_name: str
    source: str
    tools: tuple[dict[str, Any], ...] | None = None
    language: str = ""


@dataclass(frozen=True)
class Turn:
    """One assistant turn, rendered: the prompt that serving has, and the answer behind it."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    generation_prompt: bool,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The template's text. Raises DataError with the template's own words."""
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        problem = f"refuses the messages: {error}"
        raise DataError("chat template", problem, reason="template") from error


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Ids of the prompt up to and with its generation prompt; no special token is added."""
    return tokenizer.encode(render(tokenizer, messages, True), add_special_tokens=False)


def encode_conversation(
    tokenizer: Tokenizer, conversation: Conversation, stop_ids: Collection[int]
) -> list[Row]:
    """Rows of a conversation: every assistant turn in the context that serving has.

    The completion is what the render with the turn adds to the prompt, up to and including the
    first stop token: what the template writes behind it is not generated, so not supervised. What
    the generation prompt supplies (role header, empty think block) belongs to the context.

    Turns share a row as long as each later prompt, tokenised as a whole, begins with the ids that
    the row has so far: then serving has the same context. A template that rewrites earlier turns
    (drops their reasoning, say) starts a new row.

    Raises:
        DataError: the template refuses the messages, or its render with a turn does not extend
            the turn's prompt, so that no completion can be told apart.
    """
    rows: list[Row] = []
    segments: list[Segment] = []
    so_far: tuple[int, ...] = ()
    for turn in _turns(tokenizer, conversation, stop_ids):
        if turn.prompt_ids[: len(so_far)] != so_far:
            rows.append(_row(segments, conversation))
            segments, so_far = [], ()
        segments.append(Segment(turn.prompt_ids[len(so_far) :], False, CONTEXT))
        segments.append(Segment(turn.completion_ids, True, ASSISTANT))
        so_far = turn.prompt_ids + turn.completion_ids
    if segments:
        rows.append(_row(segments, conversation))
    return rows


def _row(segments: list[Segment], conversation: Conversation) -> Row:
    return Row(
        tuple(s for s in segments if s.token_ids),
        conversation.class_name,
        conversation.source,
        language=conversation.language,
    )


def _turns(
    tokenizer: Tokenizer, conversation: Conversation, stop_ids: Collection[int]
) -> list[Turn]:
    turns = []
    messages = conversation.messages
    for i, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        try:
            prompt = render(tokenizer, messages[:i], True, conversation.tools)
            whole = render(tokenizer, messages[: i + 1], False, conversation.tools)
        except DataError as error:
            raise DataError(conversation.source, str(error), reason=error.reason) from error
        if not whole.startswith(prompt):
            raise DataError(
                conversation.source,
                f"the template's render of turn {i} does not begin with its own prompt",
                "regenerate the answers with 'dspark regenerate', which keeps token ids",
                reason="not_an_extension",
            )
        completion = encode_completion(tokenizer, whole[len(prompt) :], message, stop_ids)
        prompt_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        turns.append(Turn(prompt_ids, completion))
    return turns


def encode_completion(
    tokenizer: Tokenizer, text: str, message: Message, stop_ids: Collection[int]
) -> tuple[int, ...]:
    """Ids of an answer up to and including its stop token.

    A template without an end-of-turn token leaves the answer open, but the target still ends it:
    what the template writes behind the answer's own text is left out and the stop token added.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    stop = next((k for k, t in enumerate(ids) if t in stop_ids), None)
    if stop is not None:
        return tuple(ids[: stop + 1])
    content = str(message["content"])
    end = text.rfind(content) + len(content) if content and content in text else len(text)
    ids = tokenizer.encode(text[:end], add_special_tokens=False)
    return (*ids, end_of_answer(tokenizer, stop_ids))


def end_of_answer(tokenizer: Tokenizer, stop_ids: Collection[int]) -> int:
    """The stop token that ends an answer when nobody says which: the tokenizer's own, if any."""
    own = getattr(tokenizer, "eos_token_id", None)
    return own if isinstance(own, int) and own in stop_ids else min(stop_ids)
