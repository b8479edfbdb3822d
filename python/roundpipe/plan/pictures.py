"""What the simulator predicts, as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe import _core
from roundpipe.plan.performance.pictures import Span, cut_to_window

_STEPS_SHOWN = 2


def spans_of(
    timeline: _core.Timeline, plans: Sequence[_core.Plan], links: _core.LinkTimeline | None = None
) -> list[Span]:
    """What a picture of a simulated timeline shows, with its transfers if they are simulated."""
    window = _steady_window(timeline, plans)
    spans = _spans_of_work(timeline, plans, window)
    return spans if links is None else spans + _spans_of_transfers(links, window)


def _steady_window(timeline: _core.Timeline, plans: Sequence[_core.Plan]) -> tuple[float, float]:
    """Start and end in milliseconds of what a picture shows: steps at the pace that is printed.

    A single step is shown whole. Of many, the first fill the pipeline and the last drain it, so the window begins where
    the pace is measured from, at the end of a step in the middle, and ends before the last two.
    """
    if len(plans) == 1:
        return 0.0, timeline.makespan_ms
    before = len(plans) // 2 - 1
    start_ms = max((event.end_ms for event in timeline.events if event.step == before), default=0.0)
    return start_ms, start_ms + min(_STEPS_SHOWN, len(plans) - before - 3) * timeline.steady_step_ms


def _spans_of_work(timeline: _core.Timeline, plans: Sequence[_core.Plan], window: tuple[float, float]) -> list[Span]:
    """The spans of a simulated timeline within a window, with recompute separate from backward."""
    spans = []
    for event in timeline.events:
        if event.start_ms >= window[1] or event.end_ms <= window[0]:
            continue
        layers = plans[event.step].jobs[event.job].layers
        label = f"step {event.step}, layers {layers!r}, microbatch {event.microbatch}"
        kind = "head" if event.phase == "fused" else event.phase
        start_ms = event.start_ms
        if event.phase == "backward" and event.recompute_ms > 0:
            spans.append(Span(event.device, "recompute", start_ms, start_ms + event.recompute_ms, label, event.step))
            start_ms += event.recompute_ms
        spans.append(Span(event.device, kind, start_ms, event.end_ms, label, event.step))
    return cut_to_window(spans, window)


def _spans_of_transfers(links: _core.LinkTimeline, window: tuple[float, float]) -> list[Span]:
    """The chunks on every device's links within a window."""
    chunks = (
        Span(
            chunk.device,
            "upload" if chunk.up else "download",
            chunk.start_ms,
            chunk.end_ms,
            f"step {chunk.step}, job {chunk.job}: {chunk.kind}",
            chunk.step,
        )
        for chunk in links.transfers
    )
    return cut_to_window(chunks, window)
