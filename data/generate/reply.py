"""From a server's reply to an answer: which tokens it sampled, and what makes a reply unusable."""

from collections.abc import Mapping, Sequence
from typing import Any

from data.errors import ServerError
from data.generate.base import Answer, Failure, FailureClass, Job, Outcome

Fields = Mapping[str, Any]
# Names under which servers hand over reasoning apart from the text.
_REASONING = ("reasoning_content", "reasoning")
_HINTS = ("reason", "think")


class ReplyReader:
    """Reads replies of ``/v1/completions`` for one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - any transformers tokenizer
        stop_ids: Sequence[int],
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)

    def read(self, job: Job, reply: Fields) -> Outcome:
        """The answer, or why the reply is none.

        Raises:
            ServerError: the server did not see the context that it was sent.
        """
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return Failure(job, FailureClass.server_error, "the reply holds no choice")
        self._require_context(job, reply, choice)
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            return Failure(job, FailureClass.server_error, f"finish_reason is {reason!r}")
        text, sampled = str(choice.get("text") or ""), _token_ids(choice)
        if not text and not sampled:
            return Failure(job, FailureClass.empty, "neither text nor tokens")
        name = _unknown_reasoning(choice)
        if name is not None:
            return Failure(job, FailureClass.unknown_reasoning, f"text under the key '{name}'")
        reasoning = next((str(choice[n]) for n in _REASONING if choice.get(n)), None)
        if sampled:
            return self._answer(job, sampled, choice, reasoning)
        if reasoning is not None:
            # The target sampled the reasoning and its marks too; which tokens, nobody said.
            problem = "reasoning was taken out of the text, and token_ids are missing"
            return Failure(job, FailureClass.unknown_reasoning, problem)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if not ids:
            return Failure(job, FailureClass.empty, "text without tokens")
        return self._answer(job, ids, choice, None)

    def _answer(self, job: Job, ids: list[int], choice: Fields, reasoning: str | None) -> Outcome:
        at = next((i for i, t in enumerate(ids) if t in self._stop_ids), None)
        if at is not None:
            ids, text_ids = ids[: at + 1], ids[:at]
        elif choice["finish_reason"] == "stop":
            ids, text_ids = [*ids, self._stop_of(choice)], ids
        else:
            text_ids = ids
        finish = "stop" if ids[-1] in self._stop_ids else "length"
        return Answer(job, ids, self._tokenizer.decode(text_ids), finish, reasoning)

    def _stop_of(self, choice: Fields) -> int:
        """The stop token that the server left out: the one that it names, or the tokenizer's."""
        named = choice.get("stop_reason")
        eos = self._tokenizer.eos_token_id
        candidates = [i for i in (named, eos) if type(i) is int and i in self._stop_ids]
        return candidates[0] if candidates else self._stop_ids[0]

    @staticmethod
    def _require_context(job: Job, reply: Fields, choice: Fields) -> None:
        """Not every server says what it saw; one that does is believed."""
        seen = choice.get("prompt_token_ids") or list(job.context)
        usage = reply.get("usage")
        count = (usage.get("prompt_tokens") if isinstance(usage, dict) else None) or len(seen)
        if seen != list(job.context) or count != len(seen):
            raise ServerError(
                f"a server saw another context than it was sent ({len(job.context)} tokens sent, "
                f"{count} seen; {job.request.prompt.source})",
                "turn off what adds tokens to a prompt of token ids there, or take another server",
            )


def _token_ids(choice: Fields) -> list[int]:
    """The sampled tokens, if the server tells them."""
    ids = choice.get("token_ids")
    known = isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)
    return list(ids) if known and ids else []


def _unknown_reasoning(choice: Fields) -> str | None:
    """A key that holds text and looks like reasoning, but is none of the known names."""
    for name, value in choice.items():
        looks = any(hint in name.lower() for hint in _HINTS) and not name.endswith("_reason")
        if looks and name not in _REASONING and isinstance(value, str) and value:
            return name
    return None
