"""Timelines of real calls, and what torch's profiler shows of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe
from roundpipe.plan.performance.pictures import Span
from roundpipe.plan.performance.timeline import Timeline


def model_on(devices: int) -> RoundPipe:
    roundpipe.devices(f"virtual:{devices}")
    torch.manual_seed(0)
    return RoundPipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), name="small")


def train(model: RoundPipe, calls: int) -> None:
    for _ in range(calls):
        model.forward_backward((torch.ones(6, 4),), loss_fn=lambda outputs, _: outputs.sum())
    model.synchronize()


def test_a_timeline_has_the_work_of_each_call_once() -> None:
    model = model_on(2)
    with pytest.raises(ValueError, match=r"^\[timeline\] no device has finished any work of small yet"):
        model.timeline()
    train(model, 3)
    one, three = model.timeline(), model.timeline(calls=3)
    assert one.devices == three.devices == 2
    assert {span.step for span in one.spans} == {0}
    assert {span.step for span in three.spans} == {0, 1, 2}
    records = model.last_records()
    assert len([span for span in one.spans if span.kind != "recompute"]) == len(records)
    # A call's picture begins with its own first work.
    assert min(span.start_ms for span in one.spans) == 0
    assert one.length_ms == pytest.approx(max(record[6] for record in records) - min(record[5] for record in records))
    for device in range(2):
        spans = sorted((s.start_ms, s.end_ms) for s in three.spans if s.device == device)
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(spans))
    assert 0 < three.busy_share <= 1


def test_forward_only_calls_count() -> None:
    model = model_on(1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert {span.kind for span in model.timeline().spans} == {"forward"}


def test_a_submitted_batch_has_a_timeline_of_its_own() -> None:
    model = model_on(2)
    pending = model.submit((torch.ones(6, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pending.loss()
    train(model, 1)
    assert pending.timeline().devices == 2
    assert len([span for span in pending.timeline().spans if span.kind != "recompute"]) == len(pending.records())


def test_eight_calls_are_kept() -> None:
    model = model_on(1)
    train(model, 10)
    assert {span.step for span in model.timeline(calls=8).spans} == set(range(8))
    for calls in (0, 9, True, 1.5):
        with pytest.raises(ValueError, match=r"^\[timeline\] calls is .*, expected an integer from 1 to 8"):
            model.timeline(calls=calls)  # type: ignore[arg-type]


def test_a_device_without_work_counts_as_idle() -> None:
    model = model_on(3)
    with torch.no_grad():
        model(torch.ones(1, 4))
    timeline = model.timeline()
    assert timeline.devices == 3
    assert timeline.busy_share < 1


@pytest.mark.parametrize("ending", ["html", "png", "json"])
def test_a_timeline_is_written(ending: str, tmp_path: Path) -> None:
    model = model_on(2)
    train(model, 2)
    path = tmp_path / f"steps.{ending}"
    model.timeline(calls=2).save(path)
    if ending == "json":
        rows = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        assert len(rows) == len(model.timeline(calls=2).spans)
        assert {row["tid"] for row in rows} == {0, 1}
    elif ending == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert path.read_text().count("<rect") == len(model.timeline(calls=2).spans)


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[timeline\] .* ends in '\.txt', expected \.html, \.png or \.json"):
        Timeline([], 1).save(tmp_path / "steps.txt")
    assert not list(tmp_path.iterdir())


def test_as_many_rows_as_a_pool_has_devices_are_drawn(tmp_path: Path) -> None:
    Timeline([Span(device, "forward", 0.0, 1.0, "all") for device in (0, 1023)], 1024).save(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_names_the_work() -> None:
    model = model_on(2)
    train(model, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, 1)
    names = [event.name for event in profile.events() if event.name.startswith("roundpipe ")]
    plan = model.last_plan()
    assert plan is not None
    for layer in range(4):
        assert sum(name == f"roundpipe layer {layer} forward: {layer}" for name in names) == plan.microbatches
    jobs = [name for name in names if ", microbatch " in name]
    assert len(jobs) == len(model.last_records())
    for phase, first, end, microbatch, device, *_ in model.last_records():
        assert f"roundpipe {phase}: small layers {first} to {end - 1}, microbatch {microbatch}, device {device}" in jobs
    # Operators lie within the ranges of their layers, on the devices' threads.
    layers = [event for event in profile.events() if event.name == "roundpipe layer 0 forward: 0"]
    assert all(any(child.name == "aten::linear" for child in layer.cpu_children) for layer in layers)
