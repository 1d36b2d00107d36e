"""From a corpus to the rows that are cached: encoded, cut once, checked, counted.

Nothing is dropped without being counted: a line that cannot be encoded goes to ``quarantine.jsonl``
with its reason; a row that is left out by choice (too short, twice, cut answer) is counted.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from data.batch import Row
from data.chat import Tokenizer, render
from data.config import CorpusConfig
from data.corpus import Prompt, iter_source, mix, parse_sources, prompt_of
from data.errors import DataError
from data.files import write_atomic
from data.shapes import SHAPES, Value, shape_of
from data.spool import RowSpool

log = logging.getLogger(__name__)
# A corpus of another kind is noticed after this many lines, not at its end.
_CHECK_AFTER = 200
_SHOWN_TOKENS = 60


@dataclass
class Quarantine:
    """Lines that could not be used, out of all that were read."""

    limit: float
    lines: int = 0
    errors: list[DataError] = field(default_factory=list)

    def read_line(self) -> None:
        """Counts a line; a corpus of another kind is noticed early."""
        if self.lines % _CHECK_AFTER == 0:
            self.require_usable()
        self.lines += 1

    def require_usable(self) -> None:
        """Stops when too many lines are unusable, and shows one.

        Raises:
            DataError: their share is above the limit.
        """
        if len(self.errors) > self.limit * self.lines:
            raise DataError(
                "corpus",
                f"{len(self.errors)} of {self.lines} lines cannot be used "
                f"({self.counts()}), more than corpus.max_quarantined={self.limit}; the first: "
                f"{self.errors[0]}",
                "mend the corpus, or raise corpus.max_quarantined",
            )

    def counts(self) -> dict[str, int]:
        """Lines by reason."""
        return dict(Counter(e.reason for e in self.errors))

    def write(self, path: Path) -> None:
        """Lists the lines with source, reason and message; without any, removes an older list."""
        path.unlink(missing_ok=True)
        if not self.errors:
            return
        entries = [
            {"source": e.source, "reason": e.reason, "message": e.problem} for e in self.errors
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in entries))
        log.warning("corpus: %s lists unusable lines: %s", path, self.counts())


@dataclass
class Encoding:
    """What became of the lines.

    Attributes:
        rows: in the order of the corpus.
        known: identities of the rows, so that none is kept twice.
        shapes: lines by shape.
        dropped: rows left out by choice, by reason.
    """

    rows: RowSpool
    known: set[bytes] = field(default_factory=set)
    shapes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Encoder:
    """What turns text into ids: the tokenizer with its template, stop ids, embedding rows."""

    tokenizer: Tokenizer
    stop_ids: Collection[int]
    vocab_size: int

    def rows_of(self, source: str, value: Value) -> list[Row]:
        """Rows of one line.

        Raises:
            DataError: with the reason why there are none.
        """
        _, encode = SHAPES[shape_of(source, value)]
        rows = encode(source, value, self.tokenizer, self.stop_ids)
        for row in rows:
            if max(row.token_ids, default=0) >= self.vocab_size:
                problem = f"token id {max(row.token_ids)} is outside the embedding"
                raise DataError(source, problem, reason="ids")
        return rows


def read_rows(
    config: CorpusConfig, default_path: Path, encoder: Encoder, quarantine: Path
) -> RowSpool:
    """Encodes the corpus; writes ``quarantine`` when lines could not be encoded.

    Rows are spooled to the disk of ``quarantine``: memory does not grow with their tokens.

    Raises:
        DataError: too many lines are unusable, or no row is left.
    """
    result = Encoding(RowSpool(quarantine.parent))
    bad = Quarantine(config.max_quarantined)
    for source, value in islice(_lines(config, default_path), config.limit):
        bad.read_line()
        try:
            if isinstance(value, DataError):
                raise value
            result.shapes[shape_of(source, value)] += 1
            rows = encoder.rows_of(source, value)
            if not rows:
                raise DataError(source, "no assistant turn to supervise", reason="no_answer")
            for row in rows:
                _add(row.truncated(config.max_length), row, config, encoder, result)
        except DataError as error:
            bad.errors.append(error)
    log.info("corpus: %d lines, shapes %s", bad.lines, dict(result.shapes))
    for reason, count in sorted(result.dropped.items()):
        log.warning("corpus: dropped %d rows: %s", count, reason)
    bad.write(quarantine)
    bad.require_usable()
    if not result.rows:
        path = config.rows or default_path
        raise DataError(str(path), f"no row is left ({dict(result.dropped)})", "see corpus.*")
    return result.rows


def _lines(config: CorpusConfig, default_path: Path) -> Iterator[tuple[str, Value | DataError]]:
    if config.sources:
        return mix(parse_sources(config.sources))
    # A run's own rows may end in a line that a killed writer left.
    return iter_source(config.rows or str(default_path), skip_torn=config.rows is None)


def _add(cut: Row, row: Row, config: CorpusConfig, encoder: Encoder, result: Encoding) -> None:
    """Decides on the row as it was cut; it is cut once, and checked after it.

    Raises:
        DataError: nothing of it is supervised.
    """
    if not cut.num_supervised:
        shown = encoder.tokenizer.decode(list(row.token_ids[:_SHOWN_TOKENS]))
        problem = f"nothing is supervised within {config.max_length} tokens of: {shown!r}"
        raise DataError(row.source, problem, reason="no_supervision")
    if row.finish_reason == "length" and not config.keep_truncated:
        result.dropped["answer cut at its token limit"] += 1
    elif cut.num_supervised < config.min_supervised:
        result.dropped[f"fewer than {config.min_supervised} supervised tokens"] += 1
    elif (identity := bytes.fromhex(cut.row_id)) in result.known:
        result.dropped["twice"] += 1
    else:
        result.known.add(identity)
        result.rows.append(cut)


def usable_prompts(
    path: str, config: CorpusConfig, tokenizer: Tokenizer, quarantine: Path
) -> list[Prompt]:
    """Prompts that the template renders; the others are listed in ``quarantine``.

    Raises:
        DataError: too many lines are unusable, or there is no prompt.
    """
    prompts = []
    bad = Quarantine(config.max_quarantined)
    for source, value in islice(iter_source(path), config.limit):
        bad.read_line()
        try:
            if isinstance(value, DataError):
                raise value
            prompt = prompt_of(source, value)
            render_prompt(tokenizer, prompt)
            prompts.append(prompt)
        except DataError as error:
            bad.errors.append(error)
    bad.write(quarantine)
    bad.require_usable()
    if not prompts:
        raise DataError(path, "holds no prompts", 'one object a line: {"turns": ["..."]}')
    return prompts


def render_prompt(tokenizer: Tokenizer, prompt: Prompt) -> None:
    """Renders the first turn, to see whether the template accepts it.

    Raises:
        DataError: it does not; in the template's own words.
    """
    messages = [{"role": "user", "content": prompt.turns[0]}]
    if prompt.system is not None:
        messages.insert(0, {"role": "system", "content": prompt.system})
    try:
        render(tokenizer, messages, True)
    except DataError as error:
        raise DataError(prompt.source, str(error), reason=error.reason) from error
