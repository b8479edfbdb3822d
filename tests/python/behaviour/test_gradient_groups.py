"""Devices that share trainable layers by groups of microbatches: the bits of the rule, whatever the plan."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from reference_loops import BASE_SEED, Pair, groups_of, use_devices
from roundpipe import RoundPipe, RoundPipeRunConfig, _core
from sweeps import mostly_long, sweep

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH = 6


def squared(outputs: Tensor, label: Tensor) -> Tensor:
    return ((outputs - label).float() ** 2).sum()


class Sometimes(nn.Module):
    """Uses its weight only for microbatches with a positive first value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.flatten()[0] > 0 else x


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(BASE_SEED)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
        Sometimes(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ).to(dtype)


def tied_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = model_of(dtype)
    model[3].weight = model[5].weight = model[0].weight
    return model


def parts_of(microbatches: int, ends: list[int], dice: random.Random) -> list[tuple[int, int]]:
    """Ranges of microbatches, cut at some of `ends`."""
    edges = [0, *[end for end in ends if dice.random() < 0.6], microbatches]
    return list(itertools.pairwise(edges))


def plan_with_replicas(
    layers: int, microbatches: int, groups: int, devices: int, *, fused: bool, seed: int
) -> _core.Plan:
    """Random stages, each divided among random devices: anywhere on the way up, between groups on the way down."""
    dice = random.Random(seed)
    group = groups_of(microbatches, groups)
    anywhere = list(range(1, microbatches))
    ends = [m for m in anywhere if group[m] != group[m - 1]]

    def stages(first: int, last: int) -> list[tuple[int, int]]:
        edges = [first, *sorted(dice.sample(range(first + 1, last), dice.randrange(last - first))), last]
        return list(itertools.pairwise(edges))

    jobs: list[Any] = []

    def add(phase: str, stage: tuple[int, int], at: list[int]) -> None:
        for first, last in parts_of(microbatches, at, dice):
            jobs.append((phase, *stage, first, last, dice.randrange(devices), len(jobs) / 1000))

    head = dice.randrange(1, layers) if fused else layers
    for stage in stages(0, head):
        add("forward", stage, anywhere)
    if fused:
        add("fused", (head, layers), ends)
    for stage in reversed(stages(0, head)):
        add("backward", stage, ends)
    return _core.Plan(layers, microbatches, devices, 0, jobs)


def data(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(rows, WIDTH).to(dtype), torch.randn(rows, WIDTH).to(dtype)


@sweep(
    "microbatches_and_groups, dtype, fused",
    [(6, 1), (6, 2), (7, 3), (5, 5), (4, 9)],
    [torch.float32, torch.bfloat16, torch.float64],
    [True, False],
    ids=str,
    together=1,
)
def test_bits_are_those_of_the_rule_on_any_number_of_devices(
    microbatches_and_groups: tuple[int, int], dtype: torch.dtype, fused: bool
) -> None:
    microbatches, groups = microbatches_and_groups
    x, y = data(microbatches * 2 + 1, dtype)
    for devices in (1, 2, 4):
        use_devices(devices)
        for seed in range(min(devices, 2)):  # one device shares nothing
            plan = plan_with_replicas(6, microbatches, groups, devices, fused=fused, seed=seed + devices)
            config = RoundPipeRunConfig(execute_plan=plan, gradient_groups=groups)
            pair = Pair(model_of(dtype), squared)
            pair.train((x,), label=y, microbatches=microbatches, fused=fused, calls=2, config=config)


@pytest.mark.parametrize("order", mostly_long(["layer", "microbatch"], "microbatch"))
@pytest.mark.parametrize("microbatches_and_groups", mostly_long([(6, 1), (6, 3), (7, 3), (4, 4)], (7, 3)), ids=str)
def test_tied_parameters_keep_to_the_rule(microbatches_and_groups: tuple[int, int], order: Any) -> None:
    microbatches, groups = microbatches_and_groups
    x, y = data(microbatches * 2)
    for devices in (1, 3):
        use_devices(devices)
        for seed in range(3):
            plan = plan_with_replicas(6, microbatches, groups, devices, fused=True, seed=seed)
            config = RoundPipeRunConfig(execute_plan=plan, gradient_groups=groups, tied_grad_accumulation=order)
            pair = Pair(tied_model(), squared)
            pair.train((x,), label=y, microbatches=microbatches, calls=2, config=config)


def test_the_rules_differ() -> None:
    """Otherwise the tests above would say nothing of the groups."""
    use_devices(2)
    x, y = data(12)
    sums = []
    for groups in (1, 3):
        model = model_of()
        pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=6, gradient_groups=groups))
        pipe.forward_backward((x,), label=y, loss_fn=squared)
        pipe.synchronize()
        sums.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*sums)
    assert any(not torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_a_plan_that_cuts_a_group_is_refused_before_anything_runs() -> None:
    use_devices(2)
    model = model_of()
    pipe = RoundPipe(model)
    x, y = data(6)
    plan = plan_with_replicas(6, 6, 6, 2, fused=True, seed=2)
    assert any(job.phase != "forward" and job.microbatches.last < 6 for job in plan.jobs)
    with pytest.raises(ValueError, match=r"trainable layer \d within a group of gradients: gradient_groups is 1 for 6"):
        config = RoundPipeRunConfig(num_microbatch=6, execute_plan=plan)
        pipe.forward_backward((x,), label=y, loss_fn=squared, run_config=config)
    assert pipe.forward_backward((x,), label=y, loss_fn=squared).isfinite()


def test_layers_that_do_not_train_may_be_divided_anywhere() -> None:
    use_devices(3)
    model = model_of()
    for parameter in [*model[3].parameters(), *model[4].parameters()]:
        parameter.requires_grad_(False)
    jobs: list[Any] = [("forward", 0, 5, 0, 6, 0, 0.0), ("fused", 5, 6, 0, 6, 1, 0.1)]
    jobs += [("backward", 3, 5, m, m + 2, m // 2, 0.2 + m / 100) for m in (0, 2, 4)]
    jobs += [("backward", 0, 3, 0, 6, 2, 0.5)]
    config = RoundPipeRunConfig(execute_plan=_core.Plan(6, 6, 3, 0, jobs))
    x, y = data(12)
    Pair(model, squared).train((x,), label=y, microbatches=6, calls=2, config=config)


@pytest.mark.parametrize("dtype", mostly_long([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
def test_memory_is_what_was_predicted(dtype: torch.dtype) -> None:
    """Parts of a layer that four devices share: on the host at most the predicted bytes, and more than one of them."""
    roundpipe.devices("virtual:4")
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(dtype)
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=4, gradient_groups=4))
    jobs: list[Any] = [("forward", 0, 1, 0, 4, 0, 0.0)]
    jobs += [("fused", 1, 2, m, m + 1, m, 0.1 + m / 100) for m in range(4)] + [("backward", 0, 1, 0, 4, 0, 0.2)]
    config = RoundPipeRunConfig(execute_plan=_core.Plan(2, 4, 4, 0, jobs))
    x = torch.randn(4, 256).to(dtype)
    arguments: Any = {"loss_fn": lambda outputs, _: outputs.float().square().sum(), "run_config": config}
    predicted = pipe.predict_memory((x,), **arguments)
    layer = sum(parameter.numel() for parameter in model[1].parameters()) * 4
    assert predicted.host.partial_sums >= (4 if dtype == torch.bfloat16 else 3) * layer
    pipe.forward_backward((x,), **arguments)
    pipe.synchronize()
    held = predicted.host.weights + predicted.host.gradients + predicted.host.partial_sums
    assert pipe.host_bytes() <= held * 1.01
    assert predicted.host.weights + predicted.host.gradients < pipe.host_bytes()
