"""Two systems train the same model in turn, each in a process of its own; and one system trains ever longer rows."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from support.budget import Deadline
from support.contestants import Contestant, Mode
from support.processes import RunError, TrainingServer
from support.training_request import Lap

ROUNDS = 3
WARM_UP = 1  # steps before the timed ones of a lap: memory that was given back is taken again


@dataclass(frozen=True)
class Size:
    """Of a batch."""

    rows: int
    tokens: int
    microbatches: int

    @property
    def total(self) -> int:
        return self.rows * self.tokens

    def __str__(self) -> str:
        parts = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"{self.rows} x {self.tokens:,} tokens in {parts}"


class ContestantError(Exception):
    """Somebody gave no figures; `too_large` is the batch that did not fit, if that is why."""

    def __init__(self, contestant: Contestant, reason: str, too_large: Size | None = None) -> None:
        super().__init__(reason)
        self.contestant = contestant
        self.too_large = too_large


@dataclass
class Comparison:
    """What came out.

    Attributes:
        rates: tokens a second of each round, by name and mode.
        distance: the largest relative one of two losses of the same step.
        cut: what was made smaller to keep to the time; empty: nothing.
    """

    size: Size
    rounds: int = 0
    rates: dict[tuple[str, Mode], list[float]] = field(default_factory=dict)
    distance: float = 0.0
    cut: str = ""

    def rate(self, name: str, mode: Mode) -> float:
        return statistics.median(self.rates[name, mode])

    def ratio(self, name: str, other: str, mode: Mode) -> float:
        """The median over the rounds, in each of which both took turns."""
        pairs = zip(self.rates[name, mode], self.rates[other, mode], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def compare(
    sides: Sequence[Contestant], sizes: Sequence[Size], alone: Sequence[Mode], steps: int, deadline: Deadline
) -> Comparison:
    """Lets `sides` train in turn until `deadline`, at the latest.

    The modes are those that all sides have. The size is the largest of `sizes` with which a round of all of them is
    done in time, found by climbing up from the smallest; all sides make the same steps, so their losses are compared.

    Args:
        sides: one or more.
        sizes: the smallest first.
        alone: modes that the first one also runs by itself in the end.
        steps: of a lap.
        deadline: what is not there by then is stopped.

    Raises:
        ContestantError: a side gave no figures.
    """
    modes: list[Mode] = [mode for mode in sides[0].modes if all(mode in side.modes for side in sides)]
    with ExitStack() as stack:
        servers = [stack.enter_context(TrainingServer(side.request, side.folder)) for side in sides]
        losses: list[list[float]] = [[] for _ in sides]

        def lap(index: int, size: Size, mode: Mode, warm_up: int, steps: int) -> float:
            asked = Lap(size.rows, size.tokens, size.microbatches, mode, warm_up, steps)
            try:
                result = servers[index].train(asked, deadline.left_s)
            except RunError as error:
                too_large = size if error.out_of_memory else None
                raise ContestantError(sides[index], f"at {size}: {error}", too_large) from error
            if result.seconds is None:
                raise ContestantError(sides[index], f"out of memory at {size}", size)
            if not all(map(math.isfinite, result.losses)):
                raise ContestantError(sides[index], f"its losses are {result.losses}")
            losses[index] += result.losses
            return result.seconds

        for side, server in zip(sides, servers, strict=True):
            try:
                server.wait_ready(deadline.left_s)
            except RunError as error:
                raise ContestantError(side, str(error)) from error
        laps = (WARM_UP + steps) * (len(sides) * len(modes) + len(alone))
        climbed = 0
        seconds = sum(lap(index, sizes[0], "sync", 1, 1) for index in range(len(sides))) / len(sides)
        # A larger batch takes at most as many times longer as it has more tokens.
        while climbed + 1 < len(sizes):
            more = sizes[climbed + 1].total / sizes[climbed].total
            if (laps + len(sides)) * seconds * more > deadline.left_s:
                break
            climbed += 1
            seconds = sum(lap(index, sizes[climbed], "sync", 0, 1) for index in range(len(sides))) / len(sides)
        compared = Comparison(sizes[climbed])
        if climbed + 1 < len(sizes):
            compared.cut = f"size cut to {compared.size} to keep to the time"
        for mode in [*modes, *alone]:
            for index in range(len(sides) if mode in modes else 1):
                compared.rates[sides[index].name, mode] = []

        def run(index: int, mode: Mode) -> None:
            took = lap(index, compared.size, mode, WARM_UP, steps)
            compared.rates[sides[index].name, mode].append(steps * compared.size.total / took)

        while compared.rounds < ROUNDS and (compared.rounds == 0 or laps * seconds < deadline.left_s):
            for mode in modes:
                for index in range(len(sides)):
                    run(index, mode)
            compared.rounds += 1
            _say(f"round {compared.rounds} of {' and '.join(side.name for side in sides)}")
        for other in losses[1:]:
            for mine, theirs in zip(losses[0], other, strict=True):
                compared.distance = max(compared.distance, abs(mine - theirs) / abs(theirs))
        for mode in alone:
            for _ in range(compared.rounds):
                run(0, mode)
        if compared.rounds < ROUNDS:
            compared.cut = "; ".join(
                filter(None, [compared.cut, f"{compared.rounds} of {ROUNDS} rounds to keep to the time"])
            )
        return compared


@dataclass(frozen=True)
class LongestRow:
    """`tokens` trained, 0 if none did; `end` says what came after them, `full` whether that was the memory's end."""

    tokens: int
    end: str
    full: bool = False


def longest_row(contestant: Contestant, grid: Sequence[int], deadline: Deadline) -> LongestRow:
    """Rows of ever more tokens, two steps of each, in one process, until the memory is full.

    Raises:
        ContestantError: it gave no figures, or failed for another reason than memory.
    """
    longest = 0
    with TrainingServer(contestant.request, contestant.folder) as server:
        try:
            server.wait_ready(deadline.left_s)
        except RunError as error:
            raise ContestantError(contestant, str(error)) from error
        for tokens in grid:
            if deadline.left_s == 0 and longest:
                return LongestRow(longest, f"{tokens:,} were not tried: the time was over")
            try:
                result = server.train(Lap(1, tokens, 1, "sync", 0, 2), deadline.left_s)
            except RunError as error:
                if error.out_of_memory:
                    return LongestRow(longest, f"{tokens:,} do not fit", full=True)
                if longest:
                    return LongestRow(longest, f"{tokens:,}: {error}")
                raise ContestantError(contestant, f"{tokens:,} tokens: {error}") from error
            if result.seconds is None:
                return LongestRow(longest, f"{tokens:,} do not fit", full=True)
            if not all(map(math.isfinite, result.losses)):
                raise ContestantError(contestant, f"{tokens:,} tokens: the losses are {result.losses}")
            longest = tokens
            _say(f"{contestant.name}: {tokens:,} tokens train")
    return LongestRow(longest, "all that was tried fits")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
