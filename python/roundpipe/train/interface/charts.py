"""Curves over the steps of a run, as SVG that is part of a page."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.plan.performance.axes import around, tick_label, tick_step, ticks

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 420, 230
_RIGHT, _TOP, _BOTTOM = 22, 12, 40
_LETTER = 6.6  # width of a letter of a label
_MOST_POINTS, _FEW_POINTS = 1000, 40
_MOST_TICKS = 5
_COLOURS = ("#1d4e89", "#e07b39")

STYLE = """
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 26px; }
figure { margin: 0; display: flex; flex-direction: column; }
figure svg { margin-top: auto; }
figcaption { font-weight: 600; margin: 0 0 4px; }
.note { color: #555; font-weight: 400; margin: 2px 0 6px; }
.legend { font-weight: 400; }
.legend span { display: inline-block; margin: 0 14px 0 0; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px; }
svg { display: block; width: 100%; height: auto; background: #f8f9fa; }
svg text { font: 12px system-ui, sans-serif; fill: #444; }
"""


@dataclass(frozen=True)
class Chart:
    """A chart whose curves have one unit.

    Attributes:
        name: its title, with the unit.
        note: one line for who sees such a curve for the first time.
        curves: their labels and points, by step.
        from_zero: whether the axis begins at 0, as sizes are compared.
        top: where the axis ends at least.
    """

    name: str
    note: str
    curves: Sequence[tuple[str, Points]]
    from_zero: bool = True
    top: float | None = None

    def figure(self) -> str:
        """The chart with its title and legend; empty without points."""
        curves = [(label, _thinned(points)) for label, points in self.curves if points]
        if not curves:
            return ""
        caption = f"<figcaption>{html.escape(self.name)}</figcaption>"
        note = f'<p class="note">{html.escape(self.note)}</p>'
        legend = f'<p class="legend">{_legend(curves)}</p>' if len(curves) > 1 else ""
        return f"<figure>{caption}{note}{legend}{self._svg(curves)}</figure>"

    def _svg(self, curves: Sequence[tuple[str, Points]]) -> str:
        xs = [x for _, points in curves for x, _ in points]
        first, last = min(xs), max(max(xs), min(xs) + 1)
        low, high, step = self._range([y for _, points in curves for _, y in points])
        labels = {y: tick_label(y, step) for y in ticks(low, high, step)}
        left = 14 + _LETTER * max(map(len, labels.values()))

        def across(x: float) -> float:
            return left + (x - first) / (last - first) * (_WIDTH - left - _RIGHT)

        def down(y: float) -> float:
            return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(self.name)}">']
        for y, label in labels.items():
            at = f"{down(y):.1f}"
            parts.append(f'<line x1="{left:.1f}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6:.1f}" y="{at}" dy="4" text-anchor="end">{label}</text>')
        steps = tick_step(last - first, _MOST_TICKS, whole=True)
        for x in ticks(first, last, steps):
            parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{x:,.0f}</text>')
        parts.append(f'<text x="{(left + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 7}" text-anchor="middle">step</text>')
        for colour, (_, points) in zip(_COLOURS, curves, strict=False):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
            for x, y in points if len(points) < _FEW_POINTS else ():
                parts.append(
                    f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5" fill="{colour}">'
                    f"<title>step {x:,.0f}: {y:.6g}</title></circle>"
                )
        return "".join([*parts, "</svg>"])

    def _range(self, ys: Sequence[float]) -> tuple[float, float, float]:
        """Where the axis begins and ends, and the step of its ticks."""
        low, high = min(ys), max(ys)
        if self.from_zero:
            low = min(0.0, low)
        high = high if self.top is None else max(high, self.top)
        if high == low:
            low, high = (low, low + 1) if self.from_zero else (low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10)
        step = tick_step(high - low, _MOST_TICKS)
        return *around(low, high, step), step


def _legend(curves: Sequence[tuple[str, Points]]) -> str:
    return "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(label)}</span>'
        for colour, (label, _) in zip(_COLOURS, curves, strict=False)
    )


def _thinned(points: Points) -> Points:
    """At most so many points as a chart can show: means of neighbours."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
