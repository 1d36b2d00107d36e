"""The shapes in which rows come, and how each becomes rows of token ids.

A shape is recognised by its keys; what does not fit raises `DataError` with a reason code.
"""

import json
import re
from collections.abc import Callable, Collection
from itertools import groupby
from typing import Any

from data.batch import ASSISTANT, CONTEXT, Row, Segment
from data.chat import Conversation, Message, Tokenizer, encode_conversation
from data.errors import DataError

Value = dict[str, Any]

_CLASS_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*")
_RESERVED_CLASSES = ("all", "summary")
# ShareGPT's names -> OpenAI's roles.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "developer": "developer",
}
# Fields of a message that templates in use read; others would be dropped without a word.
_MESSAGE_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def class_name_of(source: str, value: Value) -> str:
    """The optional ``class``; results are filed under it, so it must be able to name a file.

    Raises:
        DataError: it cannot.
    """
    name = value.get("class")
    if name is None:
        return ""
    if not isinstance(name, str) or not _CLASS_NAME.fullmatch(name) or name in _RESERVED_CLASSES:
        raise DataError(
            source,
            f"class {name!r} cannot name a file of results",
            f"letters, digits, '-', '_', '.', '+'; not {' or '.join(_RESERVED_CLASSES)}",
            reason="class",
        )
    return name


def read_messages(source: str, messages: object) -> tuple[Message, ...]:
    """Messages in OpenAI form from OpenAI's or ShareGPT's.

    Raises:
        DataError: not a list of messages, an unknown role, content that is not text, or
            reasoning under a name that no template reads.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(source, "'messages' is not a list of messages", reason="messages")
    return tuple(_message(source, i, m) for i, m in enumerate(messages))


def _message(source: str, index: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise DataError(source, f"message {index} is not an object", reason="messages")
    role = _ROLES.get(str(message.get("role", message.get("from"))))
    content = message.get("content", message.get("value"))
    if role is None:
        known = ", ".join(sorted(set(_ROLES)))
        problem = f"message {index} has no known role in 'messages' (known: {known})"
        raise DataError(source, problem, reason="role")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        problem = f"message {index} ({role}) of 'messages' has no text as content"
        raise DataError(source, problem, reason="content")
    found: Message = {k: message[k] for k in _MESSAGE_FIELDS if message.get(k) is not None}
    found |= {"role": role, "content": content}
    if reasoning := _reasoning(source, index, message):
        found["reasoning_content"] = reasoning
    return found


def _joined(parts: list[object]) -> str | None:
    """Text of OpenAI's content parts; None when one is not text."""
    found = [p.get("text") for p in parts if isinstance(p, dict)]
    texts = [t for t in found if isinstance(t, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _reasoning(source: str, index: int, message: Value) -> str | None:
    named = {
        key: value
        for key, value in message.items()
        if ("reason" in key or "think" in key) and isinstance(value, str) and value
    }
    unknown = [key for key in named if key not in _REASONING_NAMES]
    if unknown:
        raise DataError(
            source,
            f"message {index} has reasoning under '{unknown[0]}', which no template reads",
            f"rename it to one of {', '.join(_REASONING_NAMES)}, or remove it",
            reason="unknown_reasoning",
        )
    return next(iter(named.values()), None)


def _tools(source: str, value: Value) -> tuple[dict[str, Any], ...] | None:
    tools = value.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(source, f"'tools' is not JSON ({error})", reason="tools") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise DataError(source, "'tools' is not a list of objects", reason="tools")
    return tuple(tools)


def _from_messages(
    source: str, value: Value, tokenizer: Tokenizer, stops: Collection[int]
) -> list[Row]:
    messages = read_messages(source, value.get("messages", value.get("conversations")))
    conversation = Conversation(
        messages,
        class_name_of(source, value),
        source,
        _tools(source, value),
        str(value.get("language") or ""),
    )
    return encode_conversation(tokenizer, conversation, stops)


def _from_pair(
    source: str, value: Value, tokenizer: Tokenizer, stops: Collection[int]
) -> list[Row]:
    pair = [
        {"role": r, "content": value[k]} for r, k in (("user", "prompt"), (ASSISTANT, "completion"))
    ]
    return _from_messages(source, {**value, "messages": pair}, tokenizer, stops)


def _from_ids(
    source: str, value: Value, _tokenizer: Tokenizer, _stops: Collection[int]
) -> list[Row]:
    prompt, completion = _ids(value["prompt_ids"]), _ids(value["completion_ids"])
    if prompt is None or completion is None:
        raise DataError(source, "prompt_ids and completion_ids must be lists of ids", reason="ids")
    return [
        Row.of(
            prompt,
            completion,
            class_name=class_name_of(source, value),
            source=source,
            finish_reason=str(value.get("finish_reason", "stop")),
            language=str(value.get("language") or ""),
        )
    ]


def _from_mask(
    source: str, value: Value, _tokenizer: Tokenizer, _stops: Collection[int]
) -> list[Row]:
    ids, mask = _ids(value["input_ids"]), _ids(value["loss_mask"])
    if ids is None or mask is None or len(ids) != len(mask) or not set(mask) <= {0, 1}:
        problem = "input_ids and loss_mask (0 or 1) must be lists of equal length"
        raise DataError(source, problem, reason="ids")
    segments, at = [], 0
    for supervised, run in groupby(mask):
        end = at + len(list(run))
        role = ASSISTANT if supervised else CONTEXT
        segments.append(Segment(ids[at:end], bool(supervised), role))
        at = end
    name, language = class_name_of(source, value), str(value.get("language") or "")
    return [Row(tuple(segments), name, source, "stop", language)]


def _from_text(
    source: str, value: Value, tokenizer: Tokenizer, _stops: Collection[int]
) -> list[Row]:
    if not isinstance(value["text"], str):
        raise DataError(source, "'text' is not text", reason="content")
    ids = tuple(tokenizer.encode(value["text"], add_special_tokens=False))
    # The first token has no context from which it could be predicted.
    segments = (Segment(ids[:1], False, CONTEXT), Segment(ids[1:], True, "text"))
    name, language = class_name_of(source, value), str(value.get("language") or "")
    return [Row(tuple(s for s in segments if s.token_ids), name, source, "stop", language)]


Encoder = Callable[[str, Value, Tokenizer, Collection[int]], list[Row]]
# Shape -> the keys that tell it, and its encoder. The first that fits is taken.
SHAPES: dict[str, tuple[tuple[str, ...], Encoder]] = {
    "regenerated ids": (("prompt_ids", "completion_ids"), _from_ids),
    "ids and mask": (("input_ids", "loss_mask"), _from_mask),
    "messages": (("messages",), _from_messages),
    "conversations": (("conversations",), _from_messages),
    "prompt and completion": (("prompt", "completion"), _from_pair),
    "text": (("text",), _from_text),
}


def shape_of(source: str, value: Value) -> str:
    """Name of the shape of a row.

    Raises:
        DataError: none fits.
    """
    for name, (keys, _) in SHAPES.items():
        if all(value.get(k) is not None for k in keys):
            return name
    raise DataError(
        source,
        "neither token ids (prompt_ids, completion_ids) nor 'messages' nor another known shape "
        f"(keys: {', '.join(map(str, value)) or 'none'})",
        "write rows with 'dspark regenerate'; shapes: "
        + "; ".join(" + ".join(keys) for keys, _ in SHAPES.values()),
        reason="shape",
    )


def _ids(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        return None
    return tuple(value)
