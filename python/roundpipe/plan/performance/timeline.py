"""What the devices did in real calls, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from roundpipe import _core
from roundpipe.plan.performance.pictures import Span, write


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The work of devices in one or more calls; the first work begins at 0 ms.

    Times are those at which a device did the work, and spans of one device do not overlap.

    Attributes:
        spans: of every device, by call and then as they ended. `step` counts the calls from 0.
        devices: number of devices of the latest call, whether they did any work or not.
    """

    spans: list[Span]
    devices: int

    @property
    def length_ms(self) -> float:
        """From the beginning of the first work to the end of the last."""
        return max((span.end_ms for span in self.spans), default=0.0)

    @property
    def busy_share(self) -> float:
        """The share of the devices' time in which they worked; the rest is the bubble."""
        busy_ms = sum(span.end_ms - span.start_ms for span in self.spans)
        return busy_ms / (self.devices * self.length_ms) if self.length_ms > 0 else 0.0

    def save(self, path: str | Path) -> None:
        """Writes the timeline, one row for each device.

        Args:
            path: .json is a trace for ui.perfetto.dev and chrome://tracing, .png a picture, .html a page that explains
                each bar when the mouse is over it, without network access.

        Raises:
            ValueError: the path has another ending, or the file cannot be written.
        """
        title = f"measured: {self.length_ms:,.1f} ms, devices busy {100 * self.busy_share:.1f} %"
        write(Path(path), title, [(title, self.spans)])


def timeline_of(calls: Sequence[Iterable[_core.Record]], plan: _core.Plan | None, what: str) -> Timeline:
    """The timeline of calls from their records.

    Args:
        calls: records of each call; calls without any are left out.
        plan: of the latest call.
        what: names the model in the error.

    Raises:
        ValueError: there is no record.
    """
    spans = spans_of_records(calls)
    if not spans:
        raise ValueError(f"[timeline] no device has finished any work of {what} yet, expected a call before")
    return Timeline(spans, max(1 + max(span.device for span in spans), plan.devices if plan else 0))


def spans_of_records(calls: Sequence[Iterable[_core.Record]]) -> list[Span]:
    """The spans of real calls; the first start is time 0."""
    spans: list[Span] = []
    steps = 0
    for records in calls:
        before = len(spans)
        for record in records:
            kind = "head" if record.phase == "fused" else record.phase
            label = f"layers [{record.layers.first}, {record.layers.last}), microbatch {record.microbatch}"
            start_ms = record.start_ms
            if record.recomputed_ms > 0:
                spans.append(Span(record.device, "recompute", start_ms, record.recomputed_ms, label, steps))
                start_ms = record.recomputed_ms + record.waited_ms
            spans.append(Span(record.device, kind, start_ms, record.end_ms, label, steps))
        steps += len(spans) > before
    earliest = min((span.start_ms for span in spans), default=0.0)
    for span in spans:
        span.start_ms -= earliest
        span.end_ms -= earliest
    return spans
