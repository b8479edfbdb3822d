"""`report.html`: one page about a run that needs no network, with pictures that are part of it."""

from __future__ import annotations

import dataclasses
import html
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import roundpipe
from roundpipe.files import write_text
from roundpipe.plan.performance.pictures import Span, legend_of, svg_of
from roundpipe.train.config import TrainConfig
from roundpipe.train.progress import duration

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 30
_MOST_POINTS = 1000
_COLOURS = ("#1d4e89", "#e07b39")
_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors")

Points = list[tuple[float, float]]


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
    write_text(path, _PAGE.format(title=html.escape(title), sections="\n".join(filter(None, sections))))


def _of(lines: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> Points:
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
    pictures = [
        ("loss", [("training", _of(lines, "loss")), ("held out", _of(lines, "evaluation_loss"))]),
        ("learning rate", [("learning rate", _of(lines, "learning_rate"))]),
        ("norm of the gradients", [("norm", _of(lines, "grad_norm"))]),
        ("scale of the loss", [("scale", _of(lines, "loss_scale"))]),
        ("tokens a second", [("tokens a second", speeds)]),
        ("devices busy, %", [("busy", _of(lines, "devices_busy", 100))]),
        (
            "memory, GB",
            [("fullest device", _of(lines, "device_bytes", 1e-9)), ("host process", _of(lines, "host_bytes", 1e-9))],
        ),
    ]
    shown = [_curve(name, curves) for name, curves in pictures if any(points for _, points in curves)]
    return _section("Curves", '<div class="curves">' + "\n".join(shown) + "</div>")


def _curve(name: str, curves: Sequence[tuple[str, Points]]) -> str:
    """One chart over the steps."""
    curves = [(label, _thinned(points)) for label, points in curves if points]
    xs = [x for _, points in curves for x, _ in points]
    ys = [y for _, points in curves for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    if high == low:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    right = right if right > left else left + 1

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(name)}">']
    for tick in range(5):
        y = low + (high - low) * tick / 4
        at = place(left, y).split(",")[1]
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{y:.4g}</text>')
        x = left + (right - left) * tick / 4
        at = place(x, low).split(",")[0]
        parts.append(f'<text x="{at}" y="{_HEIGHT - 10}" text-anchor="middle">{x:,.0f}</text>')
    for colour, (_, points) in zip(_COLOURS, curves, strict=False):
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(points) < 40:
            for x, y in points:
                across, down = place(x, y).split(",")
                parts.append(
                    f'<circle cx="{across}" cy="{down}" r="2.5" fill="{colour}">'
                    f"<title>step {x:,.0f}: {y:.6g}</title></circle>"
                )
    parts.append("</svg>")
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(label)}</span>'
        for colour, (label, _) in zip(_COLOURS, curves, strict=False)
    )
    caption = f'{html.escape(name)} <span class="legend">{legend}</span>'
    return f"<figure><figcaption>{caption}</figcaption>{''.join(parts)}</figure>"


def _thinned(points: Points) -> Points:
    """At most so many points as a chart can show: means of neighbours."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    parts = []
    for prompt in dict.fromkeys(sample["prompt"] for sample in samples):
        mine = [sample for sample in samples if sample["prompt"] == prompt]
        rows = [(f"step {sample['step']:,}", sample["text"]) for sample in mine]
        expected = [("the data", mine[0]["expected"])] if mine[0]["expected"] else []
        parts.append(_text(prompt) + _table([*rows, *expected]))
    return _section("Samples", "\n".join(parts))


def _timeline(report: RunReport) -> str:
    if not report.timeline:
        return ""
    end_ms = max(span.end_ms for span in report.timeline) or 1.0
    picture = svg_of("the last step", report.timeline, end_ms)
    legend = f'<p class="legend">{legend_of(report.timeline)}</p>'
    return _section("A step on the devices", legend + picture + (_text(report.step) if report.step else ""))


def _memory(report: RunReport) -> str:
    return _section("Memory of the host", _text(report.host))


def _configuration(config: TrainConfig) -> str:
    values = dataclasses.asdict(config)
    changed = {name for name, value in values.items() if value != _defaults()[name]}
    rows = [(name + (" *" if name in changed else ""), "" if v is None else str(v)) for name, v in values.items()]
    return _table(rows) + "<p>* differs from the default</p>"


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


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{body}"


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px auto; max-width: 1360px; color: #1a1a1a; background: #fff; }}
h1 {{ font-size: 18px; }}
h2 {{ font-size: 15px; font-weight: 600; margin: 26px 0 6px; }}
pre {{ background: #f4f5f7; padding: 8px; white-space: pre-wrap; }}
table {{ border-collapse: collapse; }}
th {{ text-align: left; font-weight: 500; vertical-align: top; white-space: nowrap; }}
th, td {{ padding: 3px 18px 3px 0; border-bottom: 1px solid #eee; }}
td {{ white-space: pre-wrap; }}
.curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 18px; }}
figure {{ margin: 0; }}
.legend span {{ display: inline-block; margin: 0 0 0 14px; }}
.legend i {{ display: inline-block; width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px; }}
svg {{ display: block; width: 100%; height: auto; background: #f8f9fa; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #444; }}
</style></head><body><h1>{title}</h1>
{sections}
</body></html>
"""
