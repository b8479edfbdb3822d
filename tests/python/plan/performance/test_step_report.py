"""A step, predicted beside measured: on virtual devices whose links have known rates and whose layers known times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import EmulatedLayer, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.plan import costs as cost_files
from roundpipe.plan.machine import load, measured
from roundpipe.plan.performance.step_report import StepReport

MICROBATCHES = 3
LINK_GB_PER_S = 0.2


def trained(steps: int, forward_ms: float, weight_bytes: int, is_async: bool = True, layers: int = 6) -> RoundPipe:
    chain = nn.Sequential(*[EmulatedLayer(forward_ms, 2 * forward_ms, weight_bytes) for _ in range(layers)])
    model = RoundPipe(chain, name="emulated", model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES))
    optimizer = optim.SGD(model, lr=0.0)
    batch = torch.ones(MICROBATCHES, 1000)
    for _ in range(steps):
        assert model.forward_backward((batch,), loss_fn=lambda outputs, _: outputs.sum()) == batch.numel()
        model.step(optimizer, is_async)
    model.synchronize()
    return model


def assert_names_its_limit(report: StepReport) -> None:
    """A busy machine may limit a step by anything, so what is named is compared with the report's own times."""
    most_ms, what = max(
        ((report.predicted_ms - ms, name) for name, ms in report.unlimited_ms.items()), default=(0.0, "")
    )
    if report.limited_by.startswith("link of device "):
        assert what.startswith("links ")
    elif report.limited_by in report.unlimited_ms:
        assert report.limited_by == what and most_ms > 0
    else:
        assert report.limited_by in ("compute", "fill and drain", "dependencies")
    assert report.compute_ms <= 1.001 * report.predicted_ms


def test_links_that_limit_a_step_are_named_and_measured(tmp_path: Path) -> None:
    roundpipe.devices(f"virtual:2,threads=1,link={LINK_GB_PER_S}GB/s")
    model = trained(12, forward_ms=0.05, weight_bytes=4_000_000)
    report = model.step_report()
    # A busy machine wakes threads late, at the beginning of what is timed or at its end: C++ tests have the numbers.
    assert len(report.links_gb_per_s) == 2 and all(up > 0 and down > 0 for up, down in report.links_gb_per_s)
    assert {"links up", "links down"} <= report.unlimited_ms.keys()
    assert_names_its_limit(report)
    assert report.measured_steps >= 3
    # Six layers go up twice and down once, over two links: what no plan can undercut.
    least_ms = 6 * 2 * 4 / (2 * LINK_GB_PER_S)
    assert report.measured_ms >= 0.9 * least_ms
    assert 0 < report.predicted_bubble_percent < 100
    assert json.loads(json.dumps(report.document()))["limited_by"] == report.limited_by
    text = str(report)
    assert "predicted" in text and "measured" in text and report.plan in text and "notation" in text

    path = tmp_path / "machine.toml"
    machine = measured(model)
    machine.save(path)
    assert load(path) == machine
    assert machine.rates["link_up_gb_per_s"] == pytest.approx(min(up for up, _ in report.links_gb_per_s), rel=0.01)
    cost_files.save(model.costs(), tmp_path / "costs.json", "emulated")
    assert all(cost.gradient_bytes == 4_000_000 for cost in cost_files.load(str(tmp_path / "costs.json")).layers)


def test_a_step_of_one_device() -> None:
    roundpipe.devices("virtual:1,threads=1")
    report = trained(6, forward_ms=3, weight_bytes=4000).step_report()
    assert_names_its_limit(report)
    assert report.speeds == (1.0,)
    # Each of the layers but the fused ones is recomputed; sleeping takes at least its time.
    assert report.measured_ms >= 0.95 * 6 * MICROBATCHES * 9


def test_a_step_in_synchronous_training() -> None:
    roundpipe.devices("virtual:2,threads=1")
    report = trained(6, forward_ms=3, weight_bytes=4000, is_async=False).step_report()
    assert not report.asynchronous
    assert_names_its_limit(report)
    assert report.predicted_bubble_percent > 0


def test_the_share_of_the_time_in_which_devices_compute() -> None:
    model = trained(6, forward_ms=3, weight_bytes=4000)
    share = model.busy_share()
    report = model.step_report()
    assert share is not None and 0 < share <= 1
    assert share == pytest.approx(1 - report.measured_bubble_percent / 100, abs=0.2)
    assert RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).busy_share() is None


def test_nothing_is_said_before_something_is_measured() -> None:
    roundpipe.devices("virtual:1")
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), name="fresh")
    with pytest.raises(ValueError, match=r"^\[step_report\] 0 training steps of fresh have been measured"):
        model.step_report()
    with pytest.raises(ValueError, match=r"^\[machine\] the model has made too few training steps"):
        measured(model)
    for _ in range(4):
        model.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.sum())
    model.synchronize()
    assert isinstance(model.step_report(), StepReport)
    with pytest.raises(ValueError, match=r"^\[machine\] no rate of the link up has been measured"):
        measured(model)
