"""Where prompts and rows come from: files, folders, hub names. Errors have file:line."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path

from data.errors import ConfigError, DataError
from data.shapes import Value, class_name_of, read_messages

log = logging.getLogger(__name__)
PACKAGE_PREFIX = "pkg://"
HUB_PREFIX = "hub:"
_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Prompt:
    """User turns to be answered one after the other, and an optional system message."""

    turns: tuple[str, ...]
    class_name: str
    source: str
    system: str | None = None
    language: str = ""


def locate(path: str) -> Path:
    """A path, or a file that ships with the project: ``pkg://data/demo/train.jsonl``."""
    if not path.startswith(PACKAGE_PREFIX):
        return Path(path)
    package, _, rest = path.removeprefix(PACKAGE_PREFIX).partition("/")
    return Path(str(files(package).joinpath(rest)))


def read_jsonl(path: Path, *, skip_torn: bool = False) -> Iterator[tuple[str, Value]]:
    """Objects of a JSON Lines file with their ``file:line``; blank lines are skipped.

    Args:
        path: the file.
        skip_torn: a last line without its newline that does not parse is a write that was cut:
            skip it.

    Raises:
        DataError: the file is missing, or a line is not a JSON object.
    """
    for source, value in iter_lines(path, skip_torn=skip_torn):
        if isinstance(value, DataError):
            raise value
        yield source, value


def iter_lines(path: Path, *, skip_torn: bool) -> Iterator[tuple[str, Value | DataError]]:
    """Like `read_jsonl`, but a bad line is handed over as its error."""
    if not path.is_file():
        raise DataError(
            str(path), "no such file", "check the path, or run the stage that writes it"
        )
    with path.open("rb") as lines:  # bytes, so that a line that is not UTF-8 can be named
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            source = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if skip_torn and not line.endswith(b"\n"):
                    log.warning("%s: torn last line skipped", source)
                    continue
                fix = "mend or delete the line"
                yield source, DataError(source, f"not JSON ({error})", fix, reason="json")
                continue
            if isinstance(value, dict):
                yield source, value
            else:
                fix = 'write {"turns": ["..."]}'
                yield source, DataError(source, "not a JSON object", fix, reason="json")


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Prompts in the shapes ``turns``, ``prompt``, ``messages`` or ``conversations``.

    Raises:
        DataError: a line in no known shape, or a file without prompts.
    """
    prompts = []
    for source, value in islice(iter_source(str(path)), limit):
        if isinstance(value, DataError):
            raise value
        prompts.append(prompt_of(source, value))
    if not prompts:
        raise DataError(str(path), "holds no prompts", 'one object a line: {"turns": ["..."]}')
    return prompts


def prompt_of(source: str, value: Value) -> Prompt:
    """The prompt of one line.

    Raises:
        DataError: a line in no known shape.
    """
    class_name = class_name_of(source, value)
    system = None
    turns = value.get("turns")
    if turns is None and "prompt" in value:
        turns = [value["prompt"]]
    messages = value.get("messages", value.get("conversations"))
    if turns is None and messages is not None:
        messages = read_messages(source, messages)
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
    return Prompt(tuple(texts), class_name, source, system, str(value.get("language") or ""))


def iter_source(path: str, *, skip_torn: bool = False) -> Iterator[tuple[str, Value | DataError]]:
    """Rows of a source, one at a time, with their ``file:line``; a bad line is its error.

    JSON Lines are read here and not through `datasets`, which infers one schema for a whole block
    and ends the run at the first line that breaks it.

    Args:
        path: a .jsonl, .parquet or .arrow file, a folder of them, or ``hub:owner/name``.
        skip_torn: see `read_jsonl`.

    Raises:
        DataError: there is no such source, or it is of no known kind.
    """
    if path.startswith(HUB_PREFIX):
        yield from _iter_dataset(path.removeprefix(HUB_PREFIX), path)
        return
    local = locate(path)
    if local.is_dir():
        members = sorted(p for p in local.rglob("*") if p.suffix in (".jsonl", *_FORMATS))
        if not members:
            raise DataError(path, "the folder holds no .jsonl, .parquet or .arrow file")
        for member in members:
            yield from iter_source(str(member), skip_torn=skip_torn)
    elif local.suffix in _FORMATS and local.is_file():
        yield from _iter_dataset(_FORMATS[local.suffix], path, data_files=str(local))
    else:
        yield from iter_lines(local, skip_torn=skip_torn)


def _iter_dataset(name: str, path: str, **options: str) -> Iterator[tuple[str, Value]]:
    import datasets  # takes a second, and most runs do not need it

    try:
        stream = datasets.load_dataset(name, split="train", streaming=True, **options)
        for number, value in enumerate(stream, 1):
            yield f"{path}:{number}", value
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(path, f"cannot be read ({error})", "check file or hub name") from error


def mix(sources: list[tuple[str, float]]) -> Iterator[tuple[str, Value | DataError]]:
    """Rows of several sources in the ratio of their weights, in a fixed order.

    Always the source that is furthest behind its share comes next. The first source that ends
    ends the mix: going on would break the ratio.
    """
    streams = [iter_source(path) for path, _ in sources]
    taken = [0] * len(streams)
    while True:
        next_one = min(range(len(streams)), key=lambda i: (taken[i] + 1) / sources[i][1])
        try:
            yield next(streams[next_one])
        except StopIteration:
            log.info("%s ended the mix: %s rows", sources[next_one][0], taken)
            return
        taken[next_one] += 1


def parse_sources(sources: list[str]) -> list[tuple[str, float]]:
    """(path, weight) of ``PATH`` or ``PATH@WEIGHT``.

    Raises:
        ConfigError: a weight that is not a positive number.
    """
    parsed = []
    for source in sources:
        path, separator, weight = source.rpartition("@")
        try:
            value = float(weight) if separator else 1.0
        except ValueError:
            value = 0.0
        if value <= 0:
            raise ConfigError(
                f"corpus.sources: {source}", "the weight is not a positive number", "PATH@0.5"
            )
        parsed.append((path if separator else source, value))
    return parsed
