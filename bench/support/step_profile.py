"""What a card did during a step, from torch's profiler: time by kind of kernel, gaps, and copies over the link."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

# The first that is found in a kernel's name tells its kind.
KINDS = {
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "softmax and loss": ("softmax", "nll_loss", "cross_entropy"),
    "sums": ("reduce", "norm"),
    "element-wise": ("elementwise", "catarray", "fill", "rotary", "swiglu", "index", "gather", "scatter", "triton"),
}


def kind_of(name: str) -> str:
    """Of a kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def covered_ms(spans: Iterable[tuple[float, float]]) -> float:
    """How much time at least one of the spans of (start, end) covers, in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(kernels: list[tuple[str, float, float]], copies: list[tuple[str, float, float, int]]) -> dict[str, Any]:
    """Of kernels as (name, start ms, end ms) and copies as (direction, start ms, end ms, bytes).

    Returns:
        "span_ms" from the first kernel's begin to the last one's end, "busy_ms" of it with a kernel running, the
        longest gap, and tables: "kinds" and "kernels" as (name, ms, count), "copies" as (direction, ms, GB, GB/s).
    """
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    for name, start, end in kernels:
        kinds[kind_of(name)].append(end - start)
        names[name].append(end - start)
    moved: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for direction, start, end, size in copies:
        moved[direction].append((start, end, size))

    def ranked(groups: dict[str, list[float]], most: int) -> list[tuple[str, float, int]]:
        rows = [(name, sum(times), len(times)) for name, times in groups.items()]
        return sorted(rows, key=lambda row: -row[1])[:most]

    links = []
    for direction, parts in sorted(moved.items()):
        busy_ms, size = covered_ms((start, end) for start, end, _ in parts), sum(size for *_, size in parts)
        links.append((direction, busy_ms, size / 1e9, size / busy_ms / 1e6 if busy_ms else 0.0))
    if not kernels:
        return {"span_ms": 0.0, "busy_ms": 0.0, "longest_gap_ms": 0.0, "kinds": [], "kernels": [], "copies": links}
    first, last = min(start for _, start, _ in kernels), max(end for *_, end in kernels)
    gap, reached = 0.0, first
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        gap, reached = max(gap, start - reached), max(reached, end)
    return {
        "span_ms": last - first,
        "busy_ms": covered_ms((start, end) for _, start, end in kernels),
        "longest_gap_ms": gap,
        "kinds": ranked(kinds, len(KINDS) + 1),
        "kernels": [(name[:100], ms, count) for name, ms, count in ranked(names, 16)],
        "copies": links,
    }


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """The summary of what the accelerator does while `step` runs; empty tables without one."""
    activities = list(torch.profiler.supported_activities() - {torch.profiler.ProfilerActivity.CPU})
    if not torch.accelerator.is_available() or not activities:
        step()
        return summary([], [])
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return summary(*events_of(json.loads(trace.read_text())["traceEvents"]))


def events_of(
    trace: Iterable[dict[str, Any]],
) -> tuple[list[tuple[str, float, float]], list[tuple[str, float, float, int]]]:
    """Kernels and copies, as `summary` takes them, of a trace in Chrome's format, whose times are in microseconds."""
    kernels, copies = [], []
    for event in trace:
        if event.get("ph") != "X":
            continue
        name, start_ms = event["name"], event["ts"] / 1e3
        end_ms = start_ms + event["dur"] / 1e3
        if event.get("cat") == "kernel":
            kernels.append((name, start_ms, end_ms))
        elif event.get("cat") == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            size = int(event.get("args", {}).get("bytes", 0))
            copies.append(("up" if "HtoD" in name else "down", start_ms, end_ms, size))
    return kernels, copies
