"""Stops a run whose servers are gone, before every later row becomes an error."""

from data.errors import ServerError
from data.generate.base import Answer, FailureClass, Outcome

# The server itself failed: whatever row comes next would fail too.
_SERVER_FAILED = (
    FailureClass.timeout,
    FailureClass.connection,
    FailureClass.rate_limit,
    FailureClass.server_error,
)
# The row may be to blame (a prompt that is too long), unless no row was ever answered.
_ROW_FAILED = (FailureClass.bad_request, FailureClass.empty)


class Breaker:
    """Counts failures in a row, over all servers; an answer sets the count back.

    A refused or empty row counts only as long as nothing has ever been answered: a server that
    refuses every row is set up wrongly, one that refuses some has been sent long prompts.
    """

    def __init__(self, max_failures: int, answered_before: bool) -> None:
        self._max = max_failures
        self._works = answered_before
        self._failures = 0

    def observe(self, outcome: Outcome) -> None:
        """Takes note of one outcome.

        Raises:
            ServerError: ``max_failures`` in a row; says how to go on.
        """
        if isinstance(outcome, Answer):
            self._works, self._failures = True, 0
            return
        counts = (*_SERVER_FAILED, *(() if self._works else _ROW_FAILED))
        self._failures += outcome.error in counts
        if self._failures >= self._max:
            raise ServerError(
                f"{self._failures} requests failed in a row (the last one, "
                f"{outcome.job.request.prompt.source}: {outcome.error.value}: {outcome.message})",
                "bring the servers up again and give the same command: every answer so far is "
                "kept, only what is missing is asked for (regenerate.max_failures is the limit)",
            )
