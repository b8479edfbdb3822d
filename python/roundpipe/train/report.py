"""`report.html`: one page about a run that needs no network, with pictures that are part of it."""

from __future__ import annotations

import dataclasses
import html
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import roundpipe
from roundpipe.files import write_text
from roundpipe.plan.performance.pictures import Span, legend_of, svg_of
from roundpipe.plan.performance.sizes import unit_of
from roundpipe.train.config import TrainConfig
from roundpipe.train.interface.charts import STYLE, Chart
from roundpipe.train.interface.progress import duration

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors")


@dataclass(frozen=True)
class RunReport:
    """What the page shows.

    Attributes:
        metrics: the lines of metrics.jsonl.
        samples: the lines of samples.jsonl.
        timeline: the activities of the last step's devices.
        step: the step as predicted and as measured, as text; "" if too few were made.
        host: the host memory of the weights and the optimizer, as text.
        data: a summary of the data, as text.
        devices: the pool, as text.
    """

    config: TrainConfig
    metrics: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]]
    timeline: Sequence[Span]
    step: str
    host: str
    data: str
    devices: str


def write_report(path: Path, report: RunReport) -> None:
    """Writes the page.

    Raises:
        ValueError: it cannot be written.
    """
    title = f"{report.config.model or report.config.adapter} on {', '.join(report.config.data or [])}"
    sections = [_summary(report), _curves(report), _samples(report.samples), _timeline(report), _memory(report)]
    sections += [_section("Data", _text(report.data)), _section("Configuration", _configuration(report.config))]
    sections.append(_section("Versions", _table(_versions(report.devices))))
    write_text(path, _PAGE.format(title=html.escape(title), charts=STYLE, sections="\n".join(filter(None, sections))))


def _of(lines: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> list[tuple[float, float]]:
    """A metric by step, without values that are not finite."""
    return [(line["step"], factor * line[name]) for line in lines if line.get(name) is not None]


def _summary(report: RunReport) -> str:
    losses, evaluations = _of(report.metrics, "loss"), _of(report.metrics, "evaluation_loss")
    seconds = sum(value for _, value in _of(report.metrics, "seconds"))
    tokens = sum(value for _, value in _of(report.metrics, "tokens"))
    rows = [("steps", f"{len(losses):,}"), ("tokens", f"{tokens:,.0f}"), ("time of the steps", duration(seconds))]
    if seconds:
        rows.append(("tokens a second", f"{tokens / seconds:,.0f}"))
    if len(evaluations) > 1:
        rows.append(("held-out loss", f"{evaluations[0][1]:.4f} before, {evaluations[-1][1]:.4f} after training"))
    elif losses:
        rows.append(("loss", f"{losses[0][1]:.4f} in the first step, {losses[-1][1]:.4f} in the last"))
    if right := _of(report.metrics, "evaluation_accuracy", 100):
        rows.append(("held-out answers right", f"{right[0][1]:.0f} % before, {right[-1][1]:.0f} % after training"))
    if scales := _of(report.metrics, "loss_scale"):
        skipped = _of(report.metrics, "skipped_steps")[-1][1]
        rows.append(("skipped steps", f"{skipped:,.0f}, as a gradient in float16 was inf or NaN"))
        rows.append(("scale of the loss", f"{scales[0][1]:g} in the first step, {scales[-1][1]:g} in the last"))
    return _table(rows)


def _curves(report: RunReport) -> str:
    lines = report.metrics
    speeds = [
        (line["step"], line["tokens"] / line["seconds"]) for line in lines if line.get("seconds") and line.get("tokens")
    ]
    charts = [
        Chart(
            "loss",
            "How wrong the model's predictions are: it should fall. Where held-out data gets worse while training gets "
            "better, the model learns by heart.",
            [("training", _of(lines, "loss")), ("held out", _of(lines, "evaluation_loss"))],
            from_zero=False,
        ),
        Chart(
            "answers right, %",
            "How often the model prefers the better answer, or tells a good one from a bad one: half is chance.",
            [("training", _of(lines, "accuracy", 100)), ("held out", _of(lines, "evaluation_accuracy", 100))],
            top=100,
        ),
        Chart(
            "learning rate",
            "How far a step moves the weights, as the schedule says.",
            [("learning rate", _of(lines, "learning_rate"))],
        ),
        Chart(
            "norm of the gradients",
            "How strongly a batch pulls at the weights, before clipping. Single peaks are usual, a steady rise is not.",
            [("norm", _of(lines, "grad_norm"))],
        ),
        Chart(
            "scale of the loss",
            "What losses are multiplied by, so that float16 holds small gradients. It falls after an overflow.",
            [("scale", _of(lines, "loss_scale"))],
        ),
        Chart("tokens a second", "The speed of training. First steps may take longer.", [("tokens a second", speeds)]),
        Chart(
            "devices busy, %",
            "The share of time in which devices compute. If it is low, they wait for links, the optimizer or data.",
            [("busy", _of(lines, "devices_busy", 100))],
            top=100,
        ),
        _bytes_chart("memory of the fullest device", "The most that a device has had in use.", lines, "device_bytes"),
        _bytes_chart("memory of the host process", "With the weights and the optimizer.", lines, "host_bytes"),
    ]
    return _section("Curves", '<div class="curves">' + "\n".join(chart.figure() for chart in charts) + "</div>")


def _bytes_chart(name: str, note: str, lines: Sequence[dict[str, Any]], metric: str) -> Chart:
    points = _of(lines, metric)
    unit, unit_name = unit_of(round(max((y for _, y in points), default=0)))
    return Chart(f"{name}, {unit_name}", note, [(name, [(x, y / unit) for x, y in points])])


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    parts = []
    for prompt in dict.fromkeys(sample["prompt"] for sample in samples):
        mine = [sample for sample in samples if sample["prompt"] == prompt]
        rows = [(f"step {sample['step']:,}", sample["text"]) for sample in mine]
        expected = [("the data", mine[0]["expected"])] if mine[0]["expected"] else []
        parts.append(_text(prompt) + _table([*rows, *expected]))
    note = "What the model wrote at evaluations, with the most likely token each time, and what the data has there."
    return _section("Samples", "\n".join(parts), note)


def _timeline(report: RunReport) -> str:
    if not report.timeline:
        return ""
    end_ms = max(span.end_ms for span in report.timeline) or 1.0
    picture = svg_of("the last step", report.timeline, end_ms)
    legend = f'<p class="legend">{legend_of(report.timeline)}</p>'
    return _section(
        "A step on the devices",
        f'{legend}<div class="wide">{picture}</div>' + (_text(report.step) if report.step else ""),
        "What each device did in the last step: the thick bars compute, the thin ones below move weights and values. "
        "Gaps are time that it waits.",
    )


def _memory(report: RunReport) -> str:
    return _section("Memory of the host", _text(report.host), "What weights and the optimizer take there.")


def _configuration(config: TrainConfig) -> str:
    values = config.in_effect()
    changed = {name for name, value in values.items() if value != _defaults()[name]}
    rows = [(name + (" *" if name in changed else ""), "" if v is None else str(v)) for name, v in values.items()]
    return '<p class="note">* differs from the default</p>' + _table(rows)


def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(TrainConfig())


def _versions(devices: str) -> Iterable[tuple[str, str]]:
    yield "roundpipe", roundpipe.__version__
    yield "python", platform.python_version()
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    yield "system", platform.platform()
    yield "devices", devices


def _section(title: str, body: str, note: str = "") -> str:
    explained = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<h2>{html.escape(title)}</h2>\n{explained}{body}"


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px auto; padding: 0 16px; max-width: 1360px; color: #1a1a1a; }}
h1 {{ font-size: 18px; overflow-wrap: anywhere; }}
h2 {{ font-size: 15px; font-weight: 600; margin: 30px 0 6px; }}
pre {{ background: #f4f5f7; padding: 8px; white-space: pre-wrap; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; }}
th {{ text-align: left; font-weight: 500; vertical-align: top; }}
th, td {{ padding: 3px 18px 3px 0; border-bottom: 1px solid #eee; }}
td {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
.wide svg {{ min-width: 900px; }}
{charts}</style></head><body><h1>{title}</h1>
{sections}
</body></html>
"""
