"""Two systems train the same model in turn, each in a process of its own and its best setting; and ever longer rows."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from support.budget import Deadline
from support.contestants import Contestant, Mode
from support.flops import StepFlops
from support.processes import RunError, TrainingServer
from support.training_request import Lap, LapResult, Ready, Recompute

# Steps that are timed change next to nothing, so that the losses of all systems are the same in all of them.
TIMED_LEARNING_RATE = 1e-8
# Steps before the timed ones of a lap: plans are made, and memory that was given back is taken again.
WARM_UP = 1
# Timed steps of one lap of which the longest takes so many times the shortest are shown one by one.
UNEVEN = 1.3
# Of the memory that a system may take: what a setting may be predicted to take.
FULL = 0.92


@dataclass(frozen=True)
class Size:
    """Of a batch."""

    rows: int
    tokens: int

    @property
    def total(self) -> int:
        return self.rows * self.tokens

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,}"


@dataclass(frozen=True)
class Setting:
    """How a system goes through a batch."""

    microbatches: int
    recompute: Recompute

    def __str__(self) -> str:
        kept = ", nothing recomputed" if self.recompute == "none" else ""
        return f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}{kept}"


class ContestantError(Exception):
    """Somebody gave no figures."""


class LossesDifferError(ContestantError):
    """Somebody trains something else."""


@dataclass
class Side:
    """A contestant and its process, which starts with its `with` block and takes memory once it is told to set up.

    Attributes:
        ready: what it said when it was set up.
        peak_bytes: of the device, in its last lap.
        losses: of the last lap.
        uploaded_bytes: of its timed steps.
    """

    contestant: Contestant
    expect: bool = False
    ready: Ready | None = None
    peak_bytes: int = 0
    host_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    uploaded_bytes: int = 0
    _server: TrainingServer | None = None
    _learnt: Lap | None = None  # what the weights have learnt so far

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def flops(self) -> StepFlops:
        assert self.ready is not None
        return StepFlops(self.ready.flops_per_token, self.ready.flops_per_token_and_position)

    def teraflops(self, size: Size, rate: float) -> float:
        """A second, at `rate` tokens a second."""
        return rate * self.flops.of_rows(size.rows, size.tokens) / size.total / 1e12

    def __enter__(self) -> Self:
        self._server = TrainingServer(self.contestant.request, self.contestant.folder, self.expect).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.__exit__(kind, error, trace)

    def set_up(self, deadline: Deadline) -> Ready:
        """Once for each start. Raises ContestantError."""
        assert self._server is not None
        try:
            self.ready = self._server.set_up(deadline.left_s)
        except RunError as error:
            raise ContestantError(str(error)) from error
        return self.ready

    def ask(self, lap: Lap, deadline: Deadline) -> LapResult | None:
        """None: it ran out of memory, and has started again.

        Raises:
            ContestantError: it gave no answer, or losses that are no numbers.
        """
        assert self._server is not None
        try:
            result = self._server.train(lap, deadline.left_s)
        except RunError as error:
            if not error.out_of_memory:
                raise ContestantError(f"at {lap.rows} x {lap.tokens:,} tokens: {error}") from error
            result = LapResult(None, [])
        if result.seconds is None:
            self.__exit__(None, None, None)
            self.__enter__()
            self.set_up(deadline)
            learnt, self._learnt = self._learnt, None
            if learnt is not None:  # or its losses would be those of other weights
                self.ask(learnt, deadline)
                self._learnt = learnt
            return None
        if not all(map(math.isfinite, result.losses)):
            raise ContestantError(f"its losses are {result.losses}")
        self.peak_bytes, self.host_bytes = result.device_peak_bytes, result.host_memory_bytes
        self.losses, self.uploaded_bytes = result.losses, result.uploaded_bytes
        seconds = result.step_seconds[lap.warm_up :]
        if seconds and max(seconds) > UNEVEN * min(seconds):
            say(f"{self.name}: steps of {', '.join(f'{s:.2f}' for s in result.step_seconds)} s, the first to warm up")
        return result

    def lap(self, size: Size, setting: Setting, mode: Mode, steps: int, deadline: Deadline) -> float:
        """Tokens a second of `steps` steps after one that warms up. Raises ContestantError."""
        result = self.ask(timed(size, setting, mode, steps), deadline)
        if result is None or result.seconds is None:
            raise ContestantError(f"out of memory at {size} tokens in {setting}")
        return steps * size.total / result.seconds

    def first_losses(self, tokens: int, deadline: Deadline) -> list[float]:
        """Of three steps that learn, of two rows, from the weights that everybody starts with."""
        lap = Lap(2, tokens, 1, "sync", 0, 3)
        result = self.ask(lap, deadline)
        if result is None:
            raise ContestantError(f"out of memory at 2 x {tokens:,} tokens")
        self._learnt = lap
        return result.losses


def timed(size: Size, setting: Setting, mode: Mode, steps: int, warm_up: int = WARM_UP, profiled: bool = False) -> Lap:
    """A lap that everybody can make at any time: it leaves the weights as they are, nearly."""
    return Lap(
        *(size.rows, size.tokens, setting.microbatches, mode, warm_up, steps, setting.recompute),
        *(TIMED_LEARNING_RATE, profiled),
    )


def best_setting(
    side: Side, size: Size, limit_bytes: int, deadline: Deadline, smaller: tuple[Size, Setting] | None = None
) -> Setting:
    """The quickest of those that fit, each tried for one step after one that warms up.

    The peaks of one row and of two tell how many rows of a microbatch fit. From as many, microbatches get smaller as
    long as that makes a step shorter.

    Args:
        limit_bytes: of the device; 0: it is not known, and the first that fits is taken.
        smaller: what was best for a batch of fewer rows. Microbatches of as many rows are taken for this one, too, or
            of twice as many if they were that whole batch and these fit: to try long steps takes the others' time.

    Raises:
        ContestantError: nothing fits, or it failed.
    """
    if side.contestant.microbatches:
        return Setting(side.contestant.microbatches, side.contestant.recomputes[0])
    found: dict[Setting, float] = {}

    def attempt(recompute: Recompute, rows: int) -> float:
        setting = Setting(max(1, size.rows // rows), recompute)
        result = side.ask(timed(size, setting, "sync", 1), deadline)
        if not result or not result.seconds:
            return 0.0
        found[setting] = size.total / result.seconds
        say(f"{side.name}: {size} tokens in {setting}: {found[setting]:,.0f} tokens/s, {side.peak_bytes / 1e9:.1f} GB")
        return found[setting]

    if smaller is not None:
        before, setting = smaller
        rows = before.rows // setting.microbatches
        if setting.microbatches == 1 and deadline.left_s > 0:
            rows = max(rows, min(2 * rows, _most_rows(side, size, setting.recompute, limit_bytes, deadline)))
        return Setting(size.rows // rows, setting.recompute)
    for recompute in side.contestant.recomputes:
        rows = _most_rows(side, size, recompute, limit_bytes, deadline)
        best = 0.0
        while rows >= 1:
            rate = attempt(recompute, rows)
            if rate < best or deadline.left_s == 0:
                break
            best, rows = rate, rows // 2
    if not found:
        raise ContestantError(f"out of memory at {size} tokens, in one row a microbatch, too")
    return max(found, key=lambda setting: found[setting])


def _most_rows(side: Side, size: Size, recompute: Recompute, limit_bytes: int, deadline: Deadline) -> int:
    """Of a microbatch, halves of the batch; 0: not even one."""
    peaks = []
    for rows in (1, 2):
        if side.ask(timed(Size(rows, size.tokens), Setting(1, recompute), "sync", 1, warm_up=0), deadline) is None:
            break
        peaks.append(side.peak_bytes)
    if len(peaks) < 2 or size.rows < 2:
        return len(peaks)
    a_row = peaks[1] - peaks[0]
    rows = size.rows
    while limit_bytes and rows > 2 and peaks[0] + (rows - 1) * a_row > FULL * limit_bytes:
        rows //= 2
    return rows


@dataclass
class Comparison:
    """Of one size and mode.

    Attributes:
        rates: tokens a second of each round: ours, then the other's.
        distance: the largest relative one of their losses.
    """

    rates: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    distance: float = 0.0

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.rates[0]), statistics.median(self.rates[1])

    @property
    def ratios(self) -> list[float]:
        """Of each round, in which both took turns."""
        return [mine / theirs for mine, theirs in zip(*self.rates, strict=True)]


def compare(
    sides: tuple[Side, Side],
    settings: tuple[Setting, Setting],
    size: Size,
    mode: Mode,
    steps: int,
    rounds: int,
    deadlines: tuple[Deadline, Deadline],
) -> Comparison:
    """Lets both train in turn, `rounds` rounds or as many as the other's time allows, at least one.

    Args:
        deadlines: when each is stopped: ours goes on after the other's time is over.

    Raises:
        ContestantError: one of them gave no answer, or the time was over before.
    """
    compared = Comparison()
    took_s = 0.0
    for number in range(rounds):
        left_s = deadlines[1].left_s
        if number and took_s > left_s:
            break
        losses = []
        for rates, side, setting, until in zip(compared.rates, sides, settings, deadlines, strict=True):
            if deadlines[1].left_s == 0:
                raise ContestantError("its share of the time was over")
            rates.append(side.lap(size, setting, mode, steps, until))
            losses.append(side.losses)
        took_s = left_s - deadlines[1].left_s
        compared.distance = max(compared.distance, distance(*losses))
        rates = ", ".join(f"{side.name} {of[-1]:,.0f}" for side, of in zip(sides, compared.rates, strict=True))
        say(f"{size} tokens, {mode}, round {number + 1}: {rates} tokens/s")
    return compared


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative one of two losses of the same step."""
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class LongestRow:
    """What came of ever longer rows.

    Attributes:
        tokens: of the longest that trained; 0: none did.
        refused: of the shortest that did not fit; 0: none was refused in time.
        losses: by tokens.
        tokens_per_s: of the longest.
        peak_bytes: of the device, then.
        ended: why it did not go on with a row that may train; "" if it did.
    """

    tokens: int
    refused: int
    losses: dict[int, float]
    tokens_per_s: float
    peak_bytes: int
    ended: str = ""


def longest_row(side: Side, grid: Sequence[int], first: int, deadline: Deadline) -> LongestRow:
    """One step of one row for each length: upwards from `first`, or down from it where that does not fit.

    Raises:
        ContestantError: it gave no figures at all.
    """
    setting = Setting(1, side.contestant.recomputes[0])
    best, refused = (0, 0.0, 0), 0
    losses: dict[int, float] = {}
    ended = ""
    index = grid.index(first)
    while 0 <= index < len(grid) and (deadline.left_s > 0 or not losses):
        size = Size(1, grid[index])
        try:
            result = side.ask(timed(size, setting, "sync", 1, warm_up=0), deadline)
        except ContestantError as error:
            if not losses:
                raise
            ended = str(error)
            break
        if result is None or result.seconds is None:
            say(f"{side.name}: {grid[index]:,} tokens do not fit")
            refused = grid[index]
            if losses:
                break
            index -= 1
            continue
        say(f"{side.name}: {grid[index]:,} tokens train, {side.peak_bytes / 1e9:.2f} GB")
        losses[size.tokens] = side.losses[0]
        best = (size.tokens, size.tokens / result.seconds, side.peak_bytes)
        if refused:
            break
        index += 1
    return LongestRow(best[0], refused, losses, best[1], best[2], ended)


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)
