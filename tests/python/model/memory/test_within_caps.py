"""Steps are planned within what devices have, unasked: no retry, the same bits, and no more than there is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from memory_cases import Case, convolutions, llama
from roundpipe import RoundPipe, RoundPipeRunConfig
from sweeps import mostly_long
from trials import rows_of_trials

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def trained(pool: str, case: Case, steps: int = 2, microbatches: int = 3, **options: Any) -> tuple[list[Any], Any]:
    """Losses and weights after some steps, and the model in the pipeline. A warning of a retry is an error."""
    roundpipe.devices(pool)
    pipe = case.wrap(microbatches, **options)
    optimizer = roundpipe.optim.SGD(pipe, lr=1e-3)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(steps):
            losses.append(case.step(pipe).item())
            pipe.step(optimizer)
        pipe.synchronize()
    return [losses, {name: value.clone() for name, value in case.model.state_dict().items()}], pipe


def peak() -> int:
    return max(entry["peak_bytes"] for entry in roundpipe.devices().memory_report())


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == expected[0]
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def fused_layers(pipe: Any) -> int:
    return next(job.layers.last - job.layers.first for job in pipe.last_plan().jobs if job.phase == "fused")


@pytest.mark.parametrize(
    "shares", mostly_long([(0.45, 0.75, 1.1), (0.45, 0.6, 0.75, 0.9, 1.1)], (0.45, 0.75, 1.1)), ids=len
)
def test_more_room_keeps_more_layers_on_one_device(shares: tuple[float, ...]) -> None:
    expected, _ = trained("virtual:1", llama(64, 12, 200, 8, 128), microbatches=2)
    all_kept, kept = peak(), []
    for share in shares:
        found, pipe = trained(f"virtual:1,memory={int(share * all_kept)}B", llama(64, 12, 200, 8, 128), microbatches=2)
        assert_same(found, expected)
        assert peak() <= share * all_kept
        kept.append(fused_layers(pipe))
    assert kept == sorted(kept)
    assert kept[0] < kept[len(kept) // 2] < kept[-1] == 14


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each microbatch that has been measured."""
    return rows_of_trials(monkeypatch)


def steps_of(rows: list[int], pool: str = "virtual:2,memory=64MiB", **options: Any) -> None:
    """Steps of two microbatches, with so many rows in each."""
    roundpipe.devices(pool)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]
    pipe = RoundPipe(nn.Sequential(*layers), model_run_config=RoundPipeRunConfig(num_microbatch=2), **options)
    for count in rows:
        batch = torch.randn(2 * count, 32)
        pipe.forward_backward((batch,), label=batch, loss_fn=lambda out, label: (out - label).square().mean())
    pipe.synchronize()


def test_nothing_is_measured_where_nobody_wants_it(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of([4, 8], pool="virtual:2")
    steps_of([4, 8], device_memory="unmeasured")
    monkeypatch.setenv("ROUNDPIPE_DEVICE_MEMORY", "unmeasured")
    steps_of([4, 8])
    assert measured == []
    steps_of([4, 8], device_memory="32MiB")
    assert measured == [4, 8]


def test_measuring_leaves_asynchronous_steps_as_they_are() -> None:
    def run(pool: str) -> list[Any]:
        roundpipe.devices(pool)
        case = convolutions(8, 16, 4, 12)
        pipe = case.wrap(3)
        optimizer = roundpipe.optim.AdamW(pipe, lr=1e-2)
        losses = []
        for rows in (4, 6, 12, 5, 12):  # each of the first three is measured in the middle of an asynchronous step
            label = case.label[:rows]
            losses.append(pipe.forward_backward((case.kwargs["x"][:rows],), label=label, loss_fn=case.loss))
            pipe.step(optimizer)
        pipe.synchronize()
        return [[loss.item() for loss in losses], {n: v.clone() for n, v in case.model.state_dict().items()}]

    assert_same(run("virtual:3,memory=200MB"), run("virtual:3"))


def test_a_layer_that_cannot_be_measured_runs_all_the_same() -> None:
    class Once(nn.Module):
        """Fails where it runs outside of a step."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if not allowed:
                allowed.append(True)
                raise ValueError("not now")
            return self.linear(value)

    allowed: list[bool] = []
    roundpipe.devices("virtual:1,memory=64MiB")
    pipe = RoundPipe(nn.Sequential(Once(), nn.Linear(8, 8)), model_run_config=RoundPipeRunConfig(num_microbatch=2))
    batch = torch.randn(4, 8)
    loss = pipe.forward_backward((batch,), label=batch, loss_fn=lambda out, label: (out - label).square().mean())
    assert loss.isfinite() and allowed


def test_a_step_that_does_not_fit_leaves_smaller_ones_as_they_were() -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)]
    pipe = RoundPipe(nn.Sequential(*layers), model_run_config=RoundPipeRunConfig(num_microbatch=2))

    def step(rows: int) -> list[tuple[int, int]]:
        batch = torch.randn(rows, 64)
        pipe.forward_backward((batch,), label=batch, loss_fn=lambda out, label: (out - label).square().mean())
        pipe.synchronize()
        return [(job.layers.first, job.layers.last) for job in pipe.last_plan().jobs]

    assert step(64) == [(0, 6)]
    with pytest.raises(torch.OutOfMemoryError):
        step(65536)
    assert step(64) == [(0, 6)]
