"""Shows a row token by token, so that a person sees at a glance what will be trained."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from data.batch import ASSISTANT, CONTEXT, CachedRow, Row, Segment
from data.chat import Tokenizer

_SUPERVISED, _CONTEXT = "bold green", "dim"
_WIDTH = 120


def explain_rows(
    rows: Sequence[Row], tokenizer: Tokenizer, stop_ids: Sequence[int], html: Path | None
) -> None:
    """Prints rows in colour; with ``html`` writes the same as one page."""
    console = Console(record=html is not None, width=_WIDTH if html else None)
    for row in rows:
        console.print(row_text(row, tokenizer))
        console.print(row_table(row, tokenizer, stop_ids))
    if html is not None:
        html.parent.mkdir(parents=True, exist_ok=True)
        console.save_html(str(html))


def cached_row(row: CachedRow, index: int) -> Row:
    """The tokens and the mask that a cache holds, as a row that can be shown."""
    segments = []
    ids, mask = row.token_ids.tolist(), row.loss_mask.tolist()
    for supervised, run in groupby(zip(mask, ids, strict=True), lambda item: item[0]):
        tokens = tuple(token for _, token in run)
        segments.append(Segment(tokens, supervised, ASSISTANT if supervised else CONTEXT))
    return Row(tuple(segments), source=f"row {index} of the cache")


def row_text(row: Row, tokenizer: Tokenizer) -> Text:
    """The row as running text; supervised parts stand out."""
    text = Text(f"{row.source}  class {row.class_name or '-'}  finish {row.finish_reason}\n")
    for segment in row.segments:
        style = _SUPERVISED if segment.supervised else _CONTEXT
        text.append(tokenizer.decode(list(segment.token_ids)), style=style)
    text.append(f"\n{row.num_supervised} of {len(row)} tokens are supervised\n", style="bold")
    return text


def row_table(row: Row, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> Table:
    """One line a token: index, id, text, role, why it is or is not supervised, anchor."""
    table = Table("index", "id", "text", "role", "supervised", "anchor", show_edge=False)
    mask = [*row.loss_mask, False]
    index = 0
    for segment in row.segments:
        for token in segment.token_ids:
            why = _why(segment.supervised, token in stop_ids)
            # An anchor needs its own token and the next one supervised.
            anchor = "yes" if mask[index] and mask[index + 1] else ""
            style = _SUPERVISED if segment.supervised else _CONTEXT
            shown = escape(repr(tokenizer.decode([token])))
            table.add_row(str(index), str(token), shown, segment.role, why, anchor, style=style)
            index += 1
    return table


def _why(supervised: bool, is_stop: bool) -> str:
    if supervised:
        return "yes: it ends the answer" if is_stop else "yes: the target generates it"
    return "no: serving is given it"
