"""Members that share work, each with room for a bounded number of requests."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

Member = TypeVar("Member")


class Pool(Generic[Member]):
    """Hands out the member with the fewest requests in flight; those that failed last come last.

    A failing member is still asked when the others are full: that is how its return is noticed.
    """

    def __init__(self, members: Sequence[Member], concurrency: int) -> None:
        self.members = tuple(members)
        self._limit = concurrency
        self._in_flight = [0] * len(members)
        self._failing = [False] * len(members)
        self._freed = asyncio.Condition()

    @property
    def room(self) -> int:
        """Requests that may be in flight together."""
        return self._limit * len(self.members)

    async def take(self, tried: Collection[Member]) -> Member:
        """Waits for room at a member that is not in ``tried``."""
        async with self._freed:
            while True:
                free = [
                    i
                    for i, member in enumerate(self.members)
                    if member not in tried and self._in_flight[i] < self._limit
                ]
                if free:
                    best = min(free, key=lambda i: (self._failing[i], self._in_flight[i]))
                    self._in_flight[best] += 1
                    return self.members[best]
                await self._freed.wait()

    async def give_back(self, member: Member, *, failed: bool) -> None:
        """Ends a request; ``failed`` when the member, not the request, was to blame."""
        async with self._freed:
            i = self.members.index(member)
            self._in_flight[i] -= 1
            self._failing[i] = failed
            self._freed.notify_all()
