"""Prompts in, the target's own answers out, as rows that keep token ids.

A draft accepts what the target would say, so it is trained on what the target says. Rows are keyed
by a hash of prompt, turn, sample and settings, and a back-end answers whatever has no row yet: in
process (`data.generate.local`), or any OpenAI-compatible server (`data.generate.server`).
"""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from data.chat import Message, encode_prompt
from data.config import RegenerateConfig
from data.corpus import Prompt
from data.errors import DataError
from data.files import sole_writer
from data.fingerprint import Fingerprint
from data.generate.base import Backend, Job, Request
from data.generate.breaker import Breaker
from data.generate.ledger import Ledger, quarantine_path
from data.generate.local import LocalBackend
from data.progress import Meter
from data.target import Target, TargetFiles

# Keys that decide how answers are fetched and which are kept, not what they are.
_OPERATIONAL = (
    "batch_size",
    "truncated",
    "servers",
    "server_model",
    "concurrency",
    "timeout_s",
    "max_retries",
    "max_failures",
)


@dataclass(frozen=True)
class Summary:
    """What a run of `regenerate` did.

    Attributes:
        rows: rows in the file.
        written: rows of this run.
        new_tokens: completion tokens of this run's rows.
        finish_reasons: rows in the file by ``finish_reason``.
        failures: requests that have no row, by error class; the quarantine lists them.
        unasked: later turns that were not played because an earlier one has no answer.
        quarantine: where the failures are listed.
    """

    rows: int
    written: int
    new_tokens: int
    finish_reasons: dict[str, int]
    failures: dict[str, int]
    unasked: int
    quarantine: Path


def regenerate(
    target: Target | TargetFiles,
    prompts: Sequence[Prompt],
    config: RegenerateConfig,
    output: Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str] = (),
    accepted: Callable[[], None] = lambda: None,
) -> Summary:
    """Answers every turn of every prompt and appends the rows to ``output``.

    Rows that ``output`` already holds are kept and not drawn again. The file's fingerprint lies
    beside it, and so does a quarantine of the requests that failed: the next start asks for them
    again. ``accepted`` is called once the file and the inputs are found to fit.

    Raises:
        FingerprintMismatchError: the file's rows come from another target, tokenizer or template,
            or were drawn with other settings (field ``regenerate``).
        DataError: a prompt cannot be rendered.
        ServerError: the servers cannot be used, or ``max_failures`` requests failed in a row;
            what was answered until then is on disk.
    """
    with sole_writer(output.parent):
        settings = sampling_settings(config)
        beside = fingerprint_path(output)
        fingerprint = fingerprint.extended(regenerate=settings)
        if output.exists():
            stored = Fingerprint.load(beside)
            fingerprint.require_match(stored, "this run", str(output), allow_mismatch)
        else:
            fingerprint.save(beside)
        accepted()
        run = _Run(target, prompts, config, Ledger(output, config.truncated), settings)
        return run.play(_backend(target, config))


def sampling_settings(config: RegenerateConfig) -> str:
    """What an answer depends on; rows of two different texts are never mixed in one file.

    The batch size is left out: it may be lowered when memory is short; answers then stay valid,
    but are not the bits that another size would give. So are the keys that say how servers are
    asked. That a server answered is part of it, and the name of its model if one was given: the
    law should be the same as in process, but whether a server really runs these weights in this
    precision, without an adapter, cannot be seen from here, so its rows must be told apart.
    """
    settings = {k: v for k, v in asdict(config).items() if k not in _OPERATIONAL}
    if config.servers:
        settings |= {"backend": "server", "server_model": config.server_model}
    return json.dumps(settings)


def fingerprint_path(rows: Path) -> Path:
    """Where the fingerprint of a file of rows lies."""
    return rows.with_name(f"{rows.stem}.fingerprint.json")


def _backend(target: Target | TargetFiles, config: RegenerateConfig) -> Backend:
    if config.servers:
        from data.generate.server import ServerBackend  # a second of imports that most runs spare

        return ServerBackend(target.tokenizer, target.stop_ids, config)
    if isinstance(target, Target):
        return LocalBackend(target, config)
    raise TypeError("answering in process needs the target's weights")


class _Run:
    """One run over all prompts, wave by wave: turn n of every prompt, then turn n + 1."""

    def __init__(
        self,
        target: Target | TargetFiles,
        prompts: Sequence[Prompt],
        config: RegenerateConfig,
        ledger: Ledger,
        settings: str,
    ) -> None:
        self._target, self._prompts, self._config = target, prompts, config
        self._ledger, self._settings = ledger, settings
        self._unasked = 0

    def play(self, backend: Backend) -> Summary:
        """Fetches what is missing."""
        waves = [self._requests(turn) for turn in range(max(len(p.turns) for p in self._prompts))]
        total = sum(len(wave) for wave in waves)
        done = sum(r.key(self._settings) in self._ledger for wave in waves for r in wave)
        breaker = Breaker(self._config.max_failures, bool(self._ledger.rows))
        with self._ledger as ledger, Meter("regenerate", total, "rows", done) as meter:
            for wave in waves:
                jobs = self._jobs(wave)
                meter.add(len(wave) - len(jobs))
                times = Counter(job.key for job in jobs)
                with closing(backend.answer(jobs, ledger)) as groups:
                    for group in groups:
                        fresh = ledger.record(group)
                        meter.add(sum(times[key] for key in fresh), self._note(meter.elapsed_s))
                        for outcome in group:
                            breaker.observe(outcome)
        reasons = Counter(row.finish_reason for row in ledger.rows.values())
        return Summary(
            len(ledger.rows),
            ledger.written,
            ledger.new_tokens,
            dict(reasons),
            ledger.failures,
            self._unasked,
            quarantine_path(ledger.path),
        )

    def _requests(self, turn: int) -> list[Request]:
        return [
            Request(prompt, turn, sample)
            for prompt in self._prompts
            if turn < len(prompt.turns)
            for sample in range(self._config.samples_per_prompt)
        ]

    def _jobs(self, wave: Sequence[Request]) -> list[Job]:
        jobs = []
        for request in wave:
            context = self._context(request)
            if context is None:
                self._unasked += 1
            else:
                jobs.append(Job(request, request.key(self._settings), array("I", context)))
        return jobs

    def _context(self, request: Request) -> list[int] | None:
        """Ids of the prompt of one turn; earlier turns hold the answers that were drawn for them.
        None when one of those has no answer.
        """
        prompt = request.prompt
        messages: list[Message] = []
        if prompt.system is not None:
            messages.append({"role": "system", "content": prompt.system})
        for turn in range(request.turn + 1):
            messages.append({"role": "user", "content": prompt.turns[turn]})
            if turn < request.turn:
                key = Request(prompt, turn, request.sample).key(self._settings)
                earlier = self._ledger.rows.get(key)
                if earlier is None:
                    return None
                messages.append({"role": "assistant", "content": earlier.completion})
        try:
            return encode_prompt(self._target.tokenizer, messages)
        except DataError as error:
            raise DataError(prompt.source, str(error)) from error

    def _note(self, elapsed_s: float) -> str:
        rate = f"{self._ledger.new_tokens / elapsed_s:.0f} tokens/s" if elapsed_s else ""
        failures = [f"{n} {error}" for error, n in sorted(self._ledger.new_failures.items())]
        return ", ".join([rate, *failures])
