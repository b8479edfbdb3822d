"""The files and the display of a run: `metrics.jsonl`, the loss curve, the progress bar."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roundpipe.demo.guessing import Guessing
from roundpipe.demo.training import EvaluationRecord, StepRecord
from roundpipe.runs.lines import json_line

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss.png"


def prepare_folder(folder: Path, resume: bool = False) -> Path:
    """Creates the run's folder. Raises ValueError if it cannot be made, or holds a run that is not to go on."""
    if not resume and (folder / METRICS_FILE).exists():
        raise ValueError(
            f"[demo] {folder} holds the {METRICS_FILE} of a previous run; expected a new or empty folder; "
            "give another --out, move the old run away, or let it go on with --resume"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"[demo] cannot create {folder}: {error.strerror}; expected a folder that can be written; "
            "choose another --out"
        ) from None
    return folder


def read_run(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder: the first line of its metrics; None if there is no run."""
    try:
        with (folder / METRICS_FILE).open(encoding="utf-8") as lines:
            first = json.loads(next(lines, ""))
    except (FileNotFoundError, ValueError):
        return None
    return first if isinstance(first, dict) and first.get("kind") == "run" else None


class MetricsWriter:
    """Writes one JSON object per line, each flushed at once; `kind` names its type. docs/demo.md lists the kinds.

    With `resume`, lines are appended to those that are there; a last one that is not whole is removed.
    """

    def __init__(self, path: Path, resume: bool = False) -> None:
        if resume and path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        # "x": two runs that start in the same folder at once must not mix their lines.
        self._file = path.open("a" if resume else "x", encoding="utf-8")

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        self._file.write(json_line({"kind": kind, **values}))
        self._file.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class RunReporter:
    """The loop's observer: writes metrics, moves the progress bar, keeps the records for the curve.

    If the output is not a terminal, it occasionally prints a line instead of a bar. Use it as a context manager.
    """

    def __init__(self, metrics: MetricsWriter, console: Console, steps: int) -> None:
        self.stop_requested = False
        self.step_records: list[StepRecord] = []
        self.evaluation_records: list[EvaluationRecord] = []
        self._metrics = metrics
        self._console = console
        self._steps = steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  held out {task.fields[held_out]}  {task.fields[speed]} tokens/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, loss="-", held_out="-", speed="-")

    def on_step(self, record: StepRecord) -> None:
        self.step_records.append(record)
        self._metrics.write("step", asdict(record))
        recent = self.step_records[-20:]
        speed = sum(1 / one.tokens_per_s for one in recent)
        per_second = f"{len(recent) / speed:,.0f}"
        self._progress.update(self._task, completed=record.step, loss=f"{record.loss:.3f}", speed=per_second)
        if not self._console.is_terminal and record.step % max(1, self._steps // 20) == 0:
            left_s = record.elapsed_s / record.step * (self._steps - record.step)
            self._console.print(
                f"step {record.step}/{self._steps}  loss {record.loss:.3f}  {per_second} tokens/s  {left_s:.0f} s left",
                soft_wrap=True,
            )

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluation_records.append(record)
        self._metrics.write("evaluation", asdict(record))
        self._progress.update(self._task, held_out=f"{record.held_out_loss:.3f}")
        self._console.print(
            f"after {record.step} steps: held-out loss {record.held_out_loss:.3f} nats per token, "
            f"next token right {record.held_out_accuracy:.1%}",
            soft_wrap=True,
        )

    def go_on_after(self, steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> None:
        """Takes over the records of the run before, which are in its metrics already."""
        self.step_records, self.evaluation_records = list(steps), list(evaluations)
        self._progress.update(self._task, completed=len(steps))

    def __enter__(self) -> RunReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def draw_curve(
    path: Path,
    steps: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord],
    guessing: Guessing,
    required_loss: float,
) -> None:
    """Draws training and held-out loss over tokens as a PNG; lines mark the required loss and that of guessing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [one.tokens for one in steps],
        [one.loss for one in steps],
        color="#9bb7d4",
        linewidth=1,
        label="training",
    )
    axes.plot(
        [one.tokens for one in evaluations],
        [one.held_out_loss for one in evaluations],
        color="#b03a2e",
        marker="o",
        label="held-out files",
    )
    axes.axhline(guessing.uniform_loss, color="#888888", linestyle=":", label="guessing: ln(vocabulary)")
    axes.axhline(guessing.frequency_loss, color="#888888", linestyle="-.", label="guessing by frequency")
    axes.axhline(required_loss, color="#3a7d44", linestyle="--", label="required at the end")
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
