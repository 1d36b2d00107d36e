"""Who gets the next request, and when a run stops."""

import asyncio
from array import array

import pytest

from data.config import RegenerateConfig
from data.corpus import Prompt
from data.errors import ServerError
from data.generate.base import Answer, Failure, FailureClass, Job, Outcome, Request
from data.generate.breaker import Breaker
from data.generate.pool import Pool
from data.generate.server import Crew, ServerBackend

JOB = Job(Request(Prompt(("q",), "", "p.jsonl:7"), 0, 0), "0" * 32, array("I", [1]))
GOOD = Answer(JOB, [1], "x", "stop")
SERVER_FAILED = [
    FailureClass.timeout,
    FailureClass.connection,
    FailureClass.rate_limit,
    FailureClass.server_error,
]
ROW_FAILED = [FailureClass.bad_request, FailureClass.empty]


def bad(error: FailureClass) -> Failure:
    return Failure(JOB, error, "words")


def stops_after(outcomes: list[Outcome], answered_before: bool) -> int | None:
    """How many outcomes a breaker of 3 lets pass before it raises; None: all."""
    breaker = Breaker(3, answered_before)
    for i, outcome in enumerate(outcomes):
        try:
            breaker.observe(outcome)
        except ServerError:
            return i
    return None


@pytest.mark.parametrize("answered_before", [True, False])
@pytest.mark.parametrize("error", SERVER_FAILED)
def test_failures_in_a_row_stop_the_run(error: FailureClass, answered_before: bool) -> None:
    failures: list[Outcome] = [bad(error)] * 3
    assert stops_after(failures, answered_before) == 2
    assert stops_after([*failures[:2], GOOD, *failures[:2], GOOD], answered_before) is None
    assert stops_after([GOOD, *failures], answered_before) == 3


@pytest.mark.parametrize("error", ROW_FAILED)
def test_bad_rows_stop_it_only_when_no_row_was_ever_good(error: FailureClass) -> None:
    failures: list[Outcome] = [bad(error)] * 9
    assert stops_after(failures, answered_before=False) == 2
    assert stops_after(failures, answered_before=True) is None
    assert stops_after([GOOD, *failures], answered_before=False) is None


def test_bad_rows_between_do_not_hide_a_dead_server() -> None:
    dead, long = bad(FailureClass.connection), bad(FailureClass.bad_request)
    assert stops_after([dead, long, dead, long, dead], answered_before=True) == 4


def test_unknown_reasoning_stops_nothing() -> None:
    assert stops_after([bad(FailureClass.unknown_reasoning)] * 9, answered_before=False) is None


def test_message_says_what_failed_and_how_to_go_on() -> None:
    with pytest.raises(ServerError, match=r"(?s)p\.jsonl:7: timeout: words.*same command"):
        Breaker(1, True).observe(bad(FailureClass.timeout))


def test_least_busy_member_comes_next() -> None:
    async def go() -> list[str]:
        pool = Pool(["a", "b", "c"], 2)
        taken = [await pool.take([]) for _ in range(4)]
        await pool.give_back("b", failed=False)
        await pool.give_back("c", failed=False)
        return [*taken, await pool.take([]), await pool.take([])]

    assert asyncio.run(go()) == ["a", "b", "c", "a", "b", "c"]


def test_failing_member_comes_last_until_it_works_again() -> None:
    async def go() -> list[str]:
        pool = Pool(["a", "b"], 2)
        await pool.give_back(await pool.take([]), failed=True)
        taken = [await pool.take([]) for _ in range(3)]
        await pool.give_back(taken[-1], failed=False)
        await pool.give_back("b", failed=False)
        return [*taken, await pool.take([])]

    assert asyncio.run(go()) == ["b", "b", "a", "a"]


def test_member_that_was_tried_is_not_taken_again() -> None:
    async def go() -> str:
        pool = Pool(["a", "b"], 1)
        return await pool.take(["a"])

    assert asyncio.run(go()) == "b"


def test_full_pool_makes_wait_until_a_request_ends() -> None:
    async def go() -> tuple[bool, str]:
        pool = Pool(["a"], 1)
        await pool.take([])
        waiting = asyncio.create_task(pool.take([]))
        await asyncio.sleep(0.01)
        early = waiting.done()
        await pool.give_back("a", failed=False)
        return early, await asyncio.wait_for(waiting, 5)

    assert asyncio.run(go()) == (False, "a")


def test_answers_that_arrive_with_an_error_are_handed_over_before_it() -> None:
    async def go() -> None:
        crew = Crew(ServerBackend(None, [1], RegenerateConfig()), Pool([], 1), [])
        for outcome in (ServerError("gone", "start it"), GOOD):
            crew.outcomes.put_nowait(outcome)
        assert await crew.arrived() == [GOOD]
        with pytest.raises(ServerError, match="gone"):
            await crew.arrived()

    asyncio.run(go())
