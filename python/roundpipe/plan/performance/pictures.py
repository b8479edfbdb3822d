"""Pictures of timelines: PNG, HTML and the trace format of Chrome and Perfetto."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from roundpipe.files import replacing, write_text
from roundpipe.plan.performance.axes import tick_label, tick_step, ticks

# Differ in lightness as well, so that they can be told apart without colours.
COLOURS = {
    "forward": "#4c9be8",
    "recompute": "#b8c4d0",
    "backward": "#1d4e89",
    "head": "#e07b39",
    "upload": "#7bc47f",
    "download": "#c17bc4",
}

# Height of a PNG; beyond twice as many, matplotlib refuses.
_MOST_PIXELS = 30_000
# Rows with a name: matplotlib takes a minute to lay out a thousand.
_MOST_NAMED = 128
_MOST_TICKS = 10
# Top and height in a device's row, as fractions of it; computation is drawn above the links.
_COMPUTE = (0.0, 0.7)
_PLACE = {"upload": (0.72, 0.13), "download": (0.87, 0.13)}


@dataclasses.dataclass
class Span:
    """One activity of a device from `start_ms` to `end_ms`; `kind` is a key of `COLOURS`."""

    device: int
    kind: str
    start_ms: float
    end_ms: float
    label: str
    step: int = 0


def cut_to_window(spans: Iterable[Span], window: tuple[float, float]) -> list[Span]:
    """The parts of spans within a window, whose start becomes time 0."""
    start_ms, end_ms = window
    return [
        dataclasses.replace(
            span, start_ms=max(span.start_ms, start_ms) - start_ms, end_ms=min(span.end_ms, end_ms) - start_ms
        )
        for span in spans
        if span.start_ms < end_ms and span.end_ms > start_ms
    ]


def require_ending(path: Path) -> None:
    """Raises a ValueError for a file that `write` does not know how to write."""
    if path.suffix not in (".html", ".png", ".json"):
        raise ValueError(f"[timeline] {path} ends in '{path.suffix}', expected .html, .png or .json")


def write(path: Path, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes timelines with their titles, as the path's ending says: a page, a picture, or a trace of the first.

    Raises:
        ValueError: the path has another ending, or the file cannot be written.
    """
    require_ending(path)
    if path.suffix == ".html":
        _write_html(path, title, rows)
    elif path.suffix == ".png":
        _write_png(path, rows)
    else:
        _write_trace(path, rows[0][1])


def _write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Writes a trace that chrome://tracing and ui.perfetto.dev can open; one row for each device."""
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": device, "args": {"name": f"device {device}"}}
        for device in sorted({span.device for span in spans})
    ]
    events += [
        {
            "name": span.kind,
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": span.device,
            "ts": round(span.start_ms * 1000, 3),
            "dur": round((span.end_ms - span.start_ms) * 1000, 3),
            "args": {"what": span.label},
        }
        for span in spans
    ]
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _write_png(path: Path, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes one panel for each schedule, with one row for each device and a common time scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [1 + max((span.device for span in spans), default=0) for _, spans in rows]
    # As wide as a page of text, so that the letters are as large as the text around the picture.
    figure = Figure(figsize=(9.2, 0.8 + sum(0.2 * height + 0.42 for height in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    used: set[str] = set()
    links = any(span.kind in _PLACE for _, spans in rows for span in spans)
    for panel, (title, spans), height in zip(panels, rows, heights, strict=True):
        for kind in COLOURS:
            top, share = _PLACE.get(kind, _COMPUTE if links else (0.0, 1.0))
            for device in range(height):
                bars = [(s.start_ms, s.end_ms - s.start_ms) for s in spans if s.device == device and s.kind == kind]
                if bars:
                    used.add(kind)
                    at = (device - 0.45 + 0.9 * top, 0.9 * share)
                    panel.broken_barh(bars, at, facecolors=COLOURS[kind], edgecolors="white", linewidths=0.15)
        panel.set_title(title, loc="left", fontsize=11, fontweight="bold")
        named = range(0, height, math.ceil(height / _MOST_NAMED))
        panel.set_yticks(named, [f"device {device}" for device in named], fontsize=8)
        panel.set_ylim(height - 0.5, -0.5)
        panel.set_facecolor("#f1f2f4")
        panel.tick_params(length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlim(left=0)
    panels[-1].margins(x=0.005)
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[-1].set_xlabel("milliseconds", fontsize=9)
    legend = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    if legend:
        figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=9, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=min(200, _MOST_PIXELS / figure.get_figheight()), format="png")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px; color: #1a1a1a; background: #fff; }}
h2 {{ font-size: 15px; font-weight: 600; margin: 22px 0 6px; }}
.legend span {{ display: inline-block; margin-right: 18px; }}
.legend i {{ display: inline-block; width: 14px; height: 14px; margin-right: 6px; vertical-align: -2px; }}
svg {{ display: block; width: 100%; height: auto; background: #f4f5f7; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #444; }}
svg rect:hover {{ stroke: #000; stroke-width: 1; }}
</style></head><body><h1 style="font-size:18px">{title}</h1>
<p class="legend">{legend}</p>
{panels}
</body></html>
"""


def _write_html(path: Path, title: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes one self-contained page; a tooltip describes each bar."""
    end_ms = max((span.end_ms for _, spans in rows for span in spans), default=1.0) or 1.0
    panels = [f"<h2>{html.escape(name)}</h2>\n{svg_of(name, spans, end_ms)}" for name, spans in rows]
    legend = legend_of(span for _, spans in rows for span in spans)
    write_text(path, _PAGE.format(title=html.escape(title), legend=legend, panels="\n".join(panels)))


def svg_of(name: str, spans: Sequence[Span], end_ms: float) -> str:
    """One panel as an SVG element for a page: a row for each device, from time 0 to `end_ms`."""
    width, left, right, row_px = 1400, 70, 36, 22
    height = 1 + max((span.device for span in spans), default=0)
    scale = (width - left - right) / end_ms
    parts = [f'<svg viewBox="0 0 {width} {height * row_px + 24}" role="img" aria-label="{html.escape(name)}">']
    for device in range(height):
        parts.append(f'<text x="4" y="{device * row_px + 15}">device {device}</text>')
    for span in spans:
        top, share = _PLACE.get(span.kind, _COMPUTE)
        parts.append(
            f'<rect x="{left + span.start_ms * scale:.2f}" y="{span.device * row_px + 1 + top * (row_px - 2):.1f}" '
            f'width="{max(0.3, (span.end_ms - span.start_ms) * scale):.2f}" height="{share * (row_px - 2):.1f}" '
            f'fill="{COLOURS[span.kind]}"><title>{span.kind}: {html.escape(span.label)}, '
            f"{span.start_ms:.1f} to {span.end_ms:.1f} ms</title></rect>"
        )
    step = tick_step(end_ms, _MOST_TICKS)
    for at in ticks(0.0, end_ms, step):
        place = f'x="{left + at * scale:.1f}" y="{height * row_px + 16}" text-anchor="middle"'
        parts.append(f"<text {place}>{tick_label(at, step)} ms</text>")
    parts.append("</svg>")
    return "\n".join(parts)


def legend_of(spans: Iterable[Span]) -> str:
    """The colours of these spans, for a page."""
    used = {span.kind for span in spans}
    return "".join(
        f'<span><i style="background:{colour}"></i>{kind}</span>' for kind, colour in COLOURS.items() if kind in used
    )
