"""Walks through every outcome of random choices: depth first, each path with its probability."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)


class EnumeratingChooser:
    """Replays a prefix of choices, then takes the first possible option of each further choice.

    Attributes:
        probability: of the path that was walked.
    """

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self._prefix = prefix
        self._taken: list[int] = []
        self._options: list[list[int]] = []
        self.probability = 1.0

    def categorical(self, probs: Tensor) -> int:
        """Branches over every token that has a probability."""
        wide = probs.double()
        return self._choose((wide / wide.sum()).tolist())

    def accept(self, probability: float) -> bool:
        """Branches over yes and no where both are possible."""
        return bool(self._choose([1 - probability, probability]))

    def _choose(self, probs: list[float]) -> int:
        at = len(self._taken)
        possible = [i for i, p in enumerate(probs) if p > 0]
        taken = self._prefix[at] if at < len(self._prefix) else possible[0]
        self._taken.append(taken)
        self._options.append(possible)
        self.probability *= probs[taken]
        return taken

    def next_prefix(self) -> tuple[int, ...] | None:
        """Choices of the next path, or None after the last one."""
        for at in range(len(self._taken) - 1, -1, -1):
            later = [i for i in self._options[at] if i > self._taken[at]]
            if later:
                return (*self._taken[:at], later[0])
        return None


def paths(
    run: Callable[[EnumeratingChooser], Outcome],
) -> Iterator[tuple[Outcome, float]]:
    """Outcome and probability of every path; the probabilities sum to 1."""
    prefix: tuple[int, ...] | None = ()
    while prefix is not None:
        chooser = EnumeratingChooser(prefix)
        outcome = run(chooser)
        yield outcome, chooser.probability
        prefix = chooser.next_prefix()


def law_of(run: Callable[[EnumeratingChooser], Outcome]) -> dict[Outcome, float]:
    """The law of a random function: every outcome with its probability."""
    law: defaultdict[Outcome, float] = defaultdict(float)
    for outcome, probability in paths(run):
        law[outcome] += probability
    return dict(law)
