"""Prompts in, the target's own answers out, as rows that keep token ids (in process, batched).

A draft accepts what the target would say, so it is trained on what the target says. Rows are keyed
by a hash of prompt, turn, sample and settings. Batches are planned over *all* prompts and seeded
one by one, so that a run that is killed and started again writes exactly the rows that an unbroken
one would have written.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from data.batch import content_hash
from data.chat import Message, encode_prompt
from data.config import RegenerateConfig
from data.corpus import Prompt, read_jsonl
from data.errors import DataError
from data.files import sole_writer
from data.fingerprint import Fingerprint
from data.progress import Meter
from data.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One answer to be drawn: turn ``turn`` of a prompt, sample ``sample``."""

    prompt: Prompt
    turn: int
    sample: int

    def key(self, settings: str) -> str:
        """Identity of the answer: the same prompt and settings give the same key."""
        turns = [self.prompt.system, *self.prompt.turns[: self.turn + 1]]
        return content_hash([turns, self.sample, settings])


@dataclass(frozen=True)
class Summary:
    """What a run of `regenerate` did; ``written`` counts rows of this run only."""

    rows: int
    written: int
    new_tokens: int
    finish_reasons: dict[str, int]


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
    output: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str] = (),
    accepted: Callable[[], None] = lambda: None,
) -> Summary:
    """Answers every turn of every prompt and appends the rows to ``output``.

    Rows that ``output`` already holds are kept and not drawn again. The file's fingerprint lies
    beside it. ``accepted`` is called once the file and the inputs are found to fit.

    Raises:
        FingerprintMismatchError: the file's rows come from another target, tokenizer or template,
            or were drawn with other settings (field ``regenerate``).
        DataError: a prompt cannot be rendered.
    """
    with sole_writer(output.parent):
        return _regenerate(target, prompts, config, output, fingerprint, allow_mismatch, accepted)


def _regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
    output: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str],
    accepted: Callable[[], None],
) -> Summary:
    settings = sampling_settings(config)
    beside = fingerprint_path(output)
    fingerprint = fingerprint.extended(regenerate=settings)
    if output.exists():
        stored = Fingerprint.load(beside)
        fingerprint.require_match(stored, "this run", str(output), allow_mismatch)
        _cut_torn_line(output)
    else:
        fingerprint.save(beside)
    accepted()
    rows = {str(value["key"]): value for _, value in _known_rows(output)}
    known = len(rows)
    waves = max(len(p.turns) for p in prompts)
    total = sum(len(p.turns) for p in prompts) * config.samples_per_prompt
    new_tokens = 0
    with output.open("a", encoding="utf-8") as file, Meter("regenerate", total, "rows") as meter:
        for turn in range(waves):
            for requests in _batches(target, prompts, turn, config, rows, settings):
                missing = [r for r in requests if r.key(settings) not in rows]
                if missing:
                    answered = _answer(target, requests, config, rows, settings)
                    # A prompt that occurs twice has one answer.
                    fresh = {str(r["key"]): r for r in answered if r["key"] not in rows}
                    file.writelines(json.dumps(row) + "\n" for row in fresh.values())
                    file.flush()
                    os.fsync(file.fileno())
                    rows |= fresh
                    new_tokens += sum(len(_ids(row["completion_ids"])) for row in fresh.values())
                meter.add(len(requests), f"{new_tokens / meter.elapsed_s:.0f} tokens/s")
    reasons = Counter(str(row["finish_reason"]) for row in rows.values())
    return Summary(len(rows), len(rows) - known, new_tokens, dict(reasons))


def sampling_settings(config: RegenerateConfig) -> str:
    """What an answer depends on. The batch size is left out: it may be lowered when memory is
    short; answers then stay valid, but are not the bits that another size would give.
    """
    return json.dumps({k: v for k, v in asdict(config).items() if k != "batch_size"})


def fingerprint_path(rows: Path) -> Path:
    """Where the fingerprint of a file of rows lies."""
    return rows.with_name(f"{rows.stem}.fingerprint.json")


def _known_rows(output: Path) -> Iterable[tuple[str, dict[str, object]]]:
    if not output.exists():
        return
    for source, value in read_jsonl(output):
        if "key" not in value or "completion_ids" not in value:
            raise DataError(source, "not a regenerated row", "give another run.name")
        yield source, value


def _cut_torn_line(path: Path) -> None:
    """Removes what a killed writer left behind the last complete line."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        log.warning("%s: removed a torn last line of %d bytes", path, len(content) - end)
        os.truncate(path, end)


def _batches(
    target: Target,
    prompts: Sequence[Prompt],
    turn: int,
    config: RegenerateConfig,
    rows: dict[str, dict[str, object]],
    settings: str,
) -> Iterator[list[Request]]:
    """All requests of one turn, longest context first: the first batch is the largest, so that
    one that does not fit fails at once, and little is padded.
    """
    requests = [
        Request(prompt, turn, sample)
        for prompt in prompts
        if turn < len(prompt.turns)
        for sample in range(config.samples_per_prompt)
    ]
    length = {r: len(_context(target, r, rows, settings)) for r in requests}
    requests.sort(key=lambda r: -length[r])
    for start in range(0, len(requests), config.batch_size):
        yield requests[start : start + config.batch_size]


def _context(
    target: Target, request: Request, rows: dict[str, dict[str, object]], settings: str
) -> list[int]:
    """Ids of the prompt of one turn; earlier turns hold the answers that were drawn for them."""
    prompt = request.prompt
    messages: list[Message] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    for turn in range(request.turn + 1):
        messages.append({"role": "user", "content": prompt.turns[turn]})
        if turn < request.turn:
            earlier = rows[Request(prompt, turn, request.sample).key(settings)]
            messages.append({"role": "assistant", "content": str(earlier["completion"])})
    try:
        return encode_prompt(target.tokenizer, messages)
    except DataError as error:
        raise DataError(prompt.source, str(error)) from error


def _answer(
    target: Target,
    requests: Sequence[Request],
    config: RegenerateConfig,
    rows: dict[str, dict[str, object]],
    settings: str,
) -> Iterator[dict[str, object]]:
    contexts = [_context(target, r, rows, settings) for r in requests]
    longest = max(len(c) for c in contexts)
    pad = target.stop_ids[0]
    ids = torch.tensor([[pad] * (longest - len(c)) + c for c in contexts], device=target.device)
    mask = torch.tensor(
        [[0] * (longest - len(c)) + [1] * len(c) for c in contexts], device=target.device
    )
    sampling: dict[str, object] = {"do_sample": False, "temperature": None, "top_p": None}
    if config.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
        }
    batch_key = content_hash([config.seed, [r.key(settings) for r in requests]])
    torch.manual_seed(int(batch_key[:15], 16))
    with torch.inference_mode():
        output = target.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            eos_token_id=list(target.stop_ids),
            pad_token_id=pad,
            **sampling,
        )
    for request, context, answer in zip(
        requests, contexts, output[:, longest:].tolist(), strict=True
    ):
        stop = next((i for i, t in enumerate(answer) if t in target.stop_ids), None)
        completion = answer if stop is None else answer[: stop + 1]
        text = completion if stop is None else completion[:-1]
        yield {
            "key": request.key(settings),
            "class": request.prompt.class_name,
            "source": request.prompt.source,
            "turn": request.turn,
            "sample": request.sample,
            "prompt": request.prompt.turns[request.turn],
            "completion": target.tokenizer.decode(text),
            "finish_reason": "length" if stop is None else "stop",
            "prompt_ids": context,
            "completion_ids": completion,
        }


def _ids(value: object) -> list[int]:
    return value if isinstance(value, list) else []
