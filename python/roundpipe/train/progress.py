"""What a run shows while it goes on: a bar on a terminal and in a notebook, else lines."""

from __future__ import annotations

import statistics
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from roundpipe.train.loop import EvaluationRecord, StepRecord

_RECENT = 20  # steps that the time left is estimated from


def duration(seconds: float) -> str:
    """A time for people: 1:05:09, or 5:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Screen:
    """Shows steps and evaluations. Use it as a context manager.

    Args:
        steps: of the whole run.
        after_step: the step that training goes on from.
        log_every: steps between lines, where there is no bar.
    """

    def __init__(self, steps: int, after_step: int, log_every: int) -> None:
        self._steps, self._log_every = steps, log_every
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._held_out = ""
        self._console = Console(highlight=False)
        self._is_live = self._console.is_terminal or self._console.is_jupyter
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("", total=steps, completed=after_step)

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one, at once also into a pipe."""
        if self._is_live:
            self._console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def on_step(self, record: StepRecord) -> None:
        self._seconds.append(record.seconds)
        left_s = statistics.median(self._seconds) * (self._steps - record.step)
        text = f"{record.text()}  {duration(left_s)} left"
        if self._is_live:
            self._bar.update(self._task, completed=record.step, description=text + self._held_out)
        elif record.step % self._log_every == 0 or record.step == self._steps:
            self.say(f"step {record.step}/{self._steps}  {text}")

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._held_out = f"  held out {record.loss:.4f}"
        self.say(record.text())

    def __enter__(self) -> Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
