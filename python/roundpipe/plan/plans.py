"""Whole plans in files: every job of a step with its device, replicas and order."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from roundpipe import _core
from roundpipe.files import read_document, write_text

SCHEMA = "roundpipe-plan"
VERSION = 1

# Beyond these, the table of what each job computes takes gigabytes, and numbers do not fit the engine's.
_MOST_CELLS = 10_000_000
_MOST_NUMBER = 2**31 - 1

_SIZES = ("layers", "microbatches", "devices", "first_backward_layer")


def save_plan(plan: _core.Plan, path: str | Path) -> None:
    """Writes a plan (from `RoundPipe.last_plan()` or the planner) to a JSON file, atomically.

    Raises:
        ValueError: the file cannot be written.
    """
    jobs = [
        [
            job.phase,
            [job.layers.first, job.layers.last],
            [job.microbatches.first, job.microbatches.last],
            job.device,
            job.order,
        ]
        for job in plan.jobs
    ]
    sizes = {name: getattr(plan, name) for name in _SIZES}
    write_text(Path(path), json.dumps({"schema": SCHEMA, "version": VERSION, **sizes, "jobs": jobs}) + "\n")


def load_plan(path: str | Path) -> _core.Plan:
    """Reads a file written by `save_plan`; pass the plan to `RoundPipeRunConfig(execute_plan=...)`.

    Raises:
        ValueError: the file does not exist or does not hold a valid plan.
    """
    where = "load_plan"
    document = read_document(path, where, "a plan file", SCHEMA, VERSION)
    sizes: list[Any] = [document.get(name) for name in _SIZES]
    if any(type(size) is not int for size in sizes):
        raise ValueError(f"[{where}] {', '.join(_SIZES)} are {reprlib.repr(sizes)}, expected whole numbers")
    if max(map(abs, sizes)) > _MOST_NUMBER or sizes[0] * sizes[1] > _MOST_CELLS:
        raise ValueError(
            f"[{where}] {', '.join(_SIZES)} are {reprlib.repr(sizes)}, expected at most {_MOST_CELLS} layers times "
            "microbatches"
        )
    jobs = document.get("jobs")
    if not isinstance(jobs, list):
        raise ValueError(f"[{where}] jobs is {reprlib.repr(jobs)}, expected a list")
    read = [_job(job, index, where) for index, job in enumerate(jobs)]
    return _core.Plan(sizes[0], sizes[1], sizes[2], sizes[3], read)


def _job(job: Any, index: int, where: str) -> tuple[str, int, int, int, int, int, float]:
    try:
        phase, (first, last), (first_microbatch, last_microbatch), device, order = job
        whole = [first, last, first_microbatch, last_microbatch, device]
        if isinstance(phase, str) and all(type(number) is int and abs(number) <= _MOST_NUMBER for number in whole):
            return phase, first, last, first_microbatch, last_microbatch, device, float(order)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(
        f"[{where}] jobs[{index}] is {reprlib.repr(job)}, expected [phase, [first layer, last + 1], "
        "[first microbatch, last + 1], device, order]"
    )
