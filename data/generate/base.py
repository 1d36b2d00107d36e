"""What a back-end is: contexts in, the target's answers out, in any order."""

from array import array
from collections.abc import Container, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from data.batch import content_hash
from data.corpus import Prompt


class FailureClass(Enum):
    """Why a request has no row.

    ``length`` is an answer that was cut at its limit and dropped by ``regenerate.truncated``.
    """

    timeout = "timeout"
    connection = "connection"
    rate_limit = "rate_limit"
    server_error = "server_error"
    bad_request = "bad_request"
    empty = "empty"
    unknown_reasoning = "unknown_reasoning"
    length = "length"


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
class Job:
    """A request whose context is known.

    Attributes:
        request: what is asked.
        key: hex digits that identify the answer; two jobs with the same key are the same question.
        context: ids of the rendered prompt with its generation prompt. An array, not a list: a
            wave of a million prompts is held at once, at 4 bytes a token.
    """

    request: Request
    key: str
    context: "array[int]"


@dataclass(frozen=True)
class Answer:
    """What the target said.

    Attributes:
        job: what it answers.
        completion_ids: the sampled tokens, up to and including the stop token if there is one.
        text: the completion without its stop token.
        finish_reason: ``stop``, or ``length`` for an answer cut at its token limit.
        reasoning: what the server hands over apart from the text as the target's reasoning.
    """

    job: Job
    completion_ids: list[int]
    text: str
    finish_reason: str
    reasoning: str | None = None


@dataclass(frozen=True)
class Failure:
    """A request without an answer, and the server's words."""

    job: Job
    error: FailureClass
    message: str


Outcome = Answer | Failure


class Backend(Protocol):
    """Answers contexts. One job fails alone: as a `Failure`, never as an exception."""

    def answer(
        self, jobs: Sequence[Job], done: Container[str]
    ) -> Generator[Sequence[Outcome], None, None]:
        """Yields outcomes in groups as they arrive, in any order. Closing it ends what is open.

        Args:
            jobs: all jobs of one turn, also those that are done (they may shape the batches).
            done: keys whose answers are not needed.

        Raises:
            UserError: nothing can be answered at all; what was yielded before stays valid.
        """
