"""JSON Lines files: prompts to answer, rows or conversations to cache. Errors have file:line."""

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from data.batch import Row
from data.chat import Conversation, Message, Tokenizer, encode_conversation
from data.config import CorpusConfig
from data.errors import DataError

log = logging.getLogger(__name__)
PACKAGE_PREFIX = "pkg://"
_CLASS_NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*")
_RESERVED_CLASSES = ("all", "summary")


@dataclass(frozen=True)
class Prompt:
    """User turns to be answered one after the other, and an optional system message."""

    turns: tuple[str, ...]
    class_name: str
    source: str
    system: str | None = None


def locate(path: str) -> Path:
    """A path, or a file that ships with the project: ``pkg://data/demo/train.jsonl``."""
    if not path.startswith(PACKAGE_PREFIX):
        return Path(path)
    package, _, rest = path.removeprefix(PACKAGE_PREFIX).partition("/")
    return Path(str(files(package).joinpath(rest)))


def read_jsonl(path: Path, *, skip_torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of a JSON Lines file with their ``file:line``; blank lines are skipped.

    Args:
        path: the file.
        skip_torn: a last line without its newline that does not parse is a write that was cut:
            skip it.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    if not path.is_file():
        raise DataError(
            str(path), "no such file", "check the path, or run the stage that writes it"
        )
    with path.open("rb") as lines:  # bytes, so that a line that is not UTF-8 can be named
        for number, line in enumerate(lines, 1):
            source = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if skip_torn and not line.endswith(b"\n"):
                    log.warning("%s: torn last line skipped", source)
                    continue
                raise DataError(source, f"not JSON ({error})", "mend or delete the line") from error
            if not isinstance(value, dict):
                raise DataError(source, "not a JSON object", 'write {"turns": ["..."]}')
            yield source, value


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts in the shapes ``turns``, ``prompt`` or ``messages``; ``class`` is optional.

    Raises:
        DataError: a line in no known shape, or a file without prompts.
    """
    prompts = [_prompt(source, value) for source, value in islice(read_jsonl(path), limit)]
    if not prompts:
        raise DataError(str(path), "holds no prompts", 'one object a line: {"turns": ["..."]}')
    return prompts


def class_name_of(source: str, value: dict[str, Any]) -> str:
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
        )
    return name


def _prompt(source: str, value: dict[str, Any]) -> Prompt:
    class_name = class_name_of(source, value)
    system = None
    turns = value.get("turns")
    if turns is None and "prompt" in value:
        turns = [value["prompt"]]
    if turns is None and "messages" in value:
        messages = _messages(source, value["messages"])
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        turns = [m["content"] for m in messages if m["role"] == "user"]
    texts = turns if isinstance(turns, list) else []
    known = texts and all(isinstance(t, str) and t for t in texts)
    if not known:
        raise DataError(
            source,
            f"no prompt found (keys: {', '.join(value) or 'none'})",
            'give "turns": [text, ...], or "prompt": text, or "messages": [{"role", "content"}]',
        )
    return Prompt(tuple(texts), class_name, source, system)


def _messages(source: str, value: Any) -> tuple[Message, ...]:  # noqa: ANN401 - JSON
    ok = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not ok:
        raise DataError(source, "'messages' is not a list of {role, content} texts")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def read_rows(
    path: Path, config: CorpusConfig, tokenizer: Tokenizer, stop_ids: Collection[int]
) -> list[Row]:
    """Rows to cache: regenerated ones (token ids) or conversations (``messages``).

    What is dropped is counted by reason and logged; a row that occurs twice is kept once.

    Raises:
        DataError: a line that is neither, or no row left.
    """
    rows: dict[str, Row] = {}
    dropped: Counter[str] = Counter()
    for source, value in islice(read_jsonl(path, skip_torn=True), config.limit):
        for row in _rows_of(source, value, tokenizer, stop_ids):
            cut = row.truncated(config.max_length)
            reason = _drop_reason(cut, row, config)
            if reason is None and cut.row_id in rows:
                reason = "duplicate"
            if reason is None:
                rows[cut.row_id] = cut
            else:
                dropped[reason] += 1
    for reason, count in sorted(dropped.items()):
        log.warning("%s: dropped %d rows: %s", path, count, reason)
    if not rows:
        raise DataError(str(path), f"no row is left (dropped: {dict(dropped)})", "see corpus.*")
    return list(rows.values())


def _drop_reason(cut: Row, row: Row, config: CorpusConfig) -> str | None:
    if len(cut.completion_ids) < config.min_supervised:
        return f"fewer than {config.min_supervised} supervised tokens"
    if row.finish_reason == "length" and not config.keep_truncated:
        return "answer cut at its token limit"
    return None


def _rows_of(
    source: str, value: dict[str, Any], tokenizer: Tokenizer, stop_ids: Collection[int]
) -> list[Row]:
    class_name = class_name_of(source, value)
    if "messages" in value:
        messages = _messages(source, value["messages"])
        return encode_conversation(tokenizer, Conversation(messages, class_name, source), stop_ids)
    prompt, completion = _ids(value.get("prompt_ids")), _ids(value.get("completion_ids"))
    if prompt is None or completion is None:
        raise DataError(
            source,
            "neither token ids (prompt_ids, completion_ids) nor 'messages'",
            "write rows with 'dspark regenerate'",
        )
    reason = str(value.get("finish_reason", "stop"))
    return [Row(prompt, completion, class_name, source, reason)]


def _ids(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - JSON
    ok = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    return tuple(value) if ok else None
