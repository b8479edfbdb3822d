"""Batches that are given before the last loss is read, and plans of every kind: the bits of the slow loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from robustness import assert_same, pipe_of, sgd_step, squared_error, state_of
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, _core

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def model_of(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def batches(count: int, rows: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(11)
    return [(torch.randn(rows, 4), torch.randn(rows, 4)) for _ in range(count)]


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_submitted_batches_train_like_called_ones(devices: int, microbatches: int) -> None:
    roundpipe.devices(f"virtual:{devices},debug")
    called, submitted = pipe_of(model_of(), microbatches), pipe_of(model_of(), microbatches)
    expected, losses, pending = [], [], None
    for value, label in batches(12):
        expected.append(called.forward_backward((value,), label=label, loss_fn=squared_error))
        called.step(sgd_step(called))
        following = submitted.submit((value,), label=label, loss_fn=squared_error)
        submitted.step(sgd_step(submitted))
        if pending is not None:
            losses.append(pending.loss())
        pending = following
    assert pending is not None
    losses.append(pending.loss())
    assert all(torch.equal(loss, other) for loss, other in zip(losses, expected, strict=True))
    assert_same(state_of(submitted), state_of(called))


def overlapping_plans(interleave: float, layers: int, microbatches: int, devices: int) -> list[_core.Plan]:
    """Steps whose last jobs stand behind the first of the next: the planner's stages, their order stretched."""
    costs = [_core.LayerCost(forward_ms=1.0, backward_ms=2.0)] * layers
    cluster = _core.Cluster(devices=[(1.0, 0)] * devices)
    choice = _core.search(
        costs, cluster, microbatches=microbatches, replicas=False, interleave=False, effort=1_000_000
    )[0]
    jobs = [
        (
            *(job.phase, job.layers.first, job.layers.last, job.microbatches.first, job.microbatches.last, 0),
            job.order * interleave,
        )
        for job in choice.recipe.jobs
    ]
    recipe = _core.Plan(layers, microbatches, devices, 0, jobs)
    placer = _core.Placer(recipe, costs, cluster, _core.TimingRules())
    return [placer.next() for _ in range(10)]


def test_steps_that_overlap_in_their_order_give_the_same_bits() -> None:
    plans = overlapping_plans(1.6, 9, 2, 4)
    assert any(job.order > 1 for job in plans[0].jobs)
    roundpipe.devices("virtual:4,debug")
    plain, overlapped = pipe_of(model_of(9), 2), pipe_of(model_of(9), 2)
    pending: list[roundpipe.Pending] = []
    losses, expected = [], []
    for (value, label), plan in zip(batches(10), plans, strict=True):
        expected.append(plain.forward_backward((value,), label=label, loss_fn=squared_error))
        plain.step(sgd_step(plain))
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
        pending.append(overlapped.submit((value,), label=label, loss_fn=squared_error, run_config=config))
        overlapped.step(sgd_step(overlapped))
    losses = [each.loss() for each in pending]
    assert all(torch.equal(loss, other) for loss, other in zip(losses, expected, strict=True))
    assert_same(state_of(overlapped), state_of(plain))


def test_a_loss_is_read_once() -> None:
    pipe = pipe_of(model_of(), 2)
    pending = pipe.submit((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pending.loss()
    with pytest.raises(ValueError, match="taken already"):
        pending.loss()


def test_a_nan_loss_changes_nothing_even_when_the_step_came_first() -> None:
    roundpipe.devices("virtual:2")
    pipe = pipe_of(model_of(), 2)
    list(pipe.optim_parameters())
    before = {name: tensor.clone() for name, tensor in state_of(pipe).items()}
    pending = pipe.submit((torch.full((4, 4), float("nan")),), loss_fn=lambda outputs, _: outputs.sum())
    with pytest.raises(RoundPipeError, match="is NaN"):
        pipe.step(sgd_step(pipe))
        pending.loss()
    assert_same(state_of(pipe), before)
    pipe.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pipe.step(sgd_step(pipe), is_async=False)
    assert all(tensor.isfinite().all() for tensor in state_of(pipe).values())


def test_layers_are_measured_and_planned_anew() -> None:
    roundpipe.devices("virtual:2")
    times = [1.0, 1.0, 1.0, 12.0, 1.0, 1.0]
    pipe = RoundPipe(
        nn.Sequential(*[roundpipe.EmulatedLayer(ms, 2 * ms) for ms in times]),
        model_run_config=RoundPipeRunConfig(num_microbatch=4),
    )
    for _ in range(6):
        pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda outputs, _: outputs.sum())
        pipe.synchronize()
    # How much each takes is the machine's; model_planner_test.cpp checks with given times what is made of them.
    assert sum(cost.forward_ms for cost in pipe.costs()) > 0
    plan = pipe.last_plan()
    assert plan is not None
    auto = roundpipe.ModelExecutePlan.auto("fused", pipe)
    auto.check_valid(6, "fused")
