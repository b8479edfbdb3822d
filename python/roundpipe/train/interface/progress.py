"""What a run shows while it goes on: a bar on a terminal and in a notebook, else lines."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment

from roundpipe import _core

_RECENT = 20  # steps that the time left is estimated from
_GAP = "  "  # between the parts of a line; the engine's lines have it as well
_FIRST = 3  # parts that matter more than a longer bar
_SHORTEST_BAR, _LONGEST_BAR = 4, 20


def duration(seconds: float) -> str:
    """A time for people: 1:05:09, or 5:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def parts_of(record: _core.StepRecord, left_s: float, held_out: str = "") -> list[str]:
    """The parts of a step's line behind its number, the most important first: loss, speed, time left, and the rest.

    Args:
        record: says the words.
        left_s: until the end of the run.
        held_out: of the last evaluation, if there was one.
    """
    words = record.text().split(_GAP)
    first = [next(word for word in words if "loss " in word), next(word for word in words if "tokens/s" in word)]
    left = [f"{duration(left_s)} left", *filter(None, [held_out])]
    return [*first, *left, *(word for word in words if word not in first)]


@dataclass(frozen=True)
class StepLine:
    """One line for a terminal: the step, a bar, and as many of the parts as there is room for.

    Attributes:
        step: the last one that was made.
        steps: of the whole run.
        parts: what to show behind the bar; those at the end go first.
    """

    step: int
    steps: int
    parts: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = f"step {self.step}/{self.steps} "
        # In the last column, some terminals begin a new line.
        room = options.max_width - 1 - len(head) - _SHORTEST_BAR
        shown, first = [], self.parts[:_FIRST]
        for part in first:
            if len(_GAP + part) > room:
                break
            shown.append(part)
            room -= len(_GAP + part)
        longer = max(0, min(room, _LONGEST_BAR - _SHORTEST_BAR))
        room -= longer
        for part in self.parts[_FIRST:] if len(shown) == len(first) else ():
            if len(_GAP + part) > room:
                break
            shown.append(part)
            room -= len(_GAP + part)
        yield Segment(head)
        size = _SHORTEST_BAR + longer
        bar = ProgressBar(total=max(1, self.steps), completed=self.step, width=size)
        drawn = [piece for piece in bar.__rich_console__(console, options) if isinstance(piece, Segment)]
        # Without colours, it draws only what is done.
        yield from Segment.adjust_line_length(drawn, size)
        yield Segment("".join(_GAP + part for part in shown))


class Screen:
    """Shows steps and evaluations. Use it as a context manager.

    Args:
        steps: of the whole run.
        after_step: the step that training goes on from.
        log_every: steps between lines, where there is no bar.
        console: where to; None: standard output.
    """

    def __init__(self, steps: int, after_step: int, log_every: int, console: Console | None = None) -> None:
        self._steps, self._log_every = steps, log_every
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._held_out = ""
        self._console = Console(highlight=False) if console is None else console
        is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = is_terminal or self._console.is_jupyter
        self._line = StepLine(after_step, steps)
        # The line is made anew each time, as the window may have another width by then.
        self._live = Live(get_renderable=lambda: self._line, console=self._console)

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one, at once also into a pipe."""
        if self._is_live:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self._console.file, flush=True)

    def on_step(self, record: _core.StepRecord) -> None:
        self._seconds.append(record.seconds)
        left_s = statistics.median(self._seconds) * (self._steps - record.step)
        parts = parts_of(record, left_s, self._held_out)
        if self._is_live:
            self._line = StepLine(record.step, self._steps, parts)
        elif record.step % self._log_every == 0 or record.step == self._steps:
            self.say(_GAP.join([f"step {record.step}/{self._steps}", *parts]))

    def on_evaluation(self, record: _core.EvaluationRecord) -> None:
        self._held_out = f"held out {record.loss:.4f}"
        self.say(record.text())

    def __enter__(self) -> Screen:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
