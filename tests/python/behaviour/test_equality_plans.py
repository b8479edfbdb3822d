"""Bits do not depend on how the layers are cut or on how many devices there are; autocast and compiled layers."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_loops import (
    BASE_SEED,
    Pair,
    assert_same,
    assert_same_model,
    cut,
    fused_loop,
    plan_of,
    seeds_of,
    use_devices,
)
from roundpipe import RoundPipe, RoundPipeRunConfig


def test_outputs_are_returned_with_the_loss() -> None:
    use_devices(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    pipe = RoundPipe(model)
    x = torch.randn(7, 5)
    seeds = seeds_of(pipe, 0, 3)

    def loss_fn(out: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        return out.square().mean(), (out * 2).abs_().sum() * 0.1

    losses, out = pipe.forward_backward(
        (x,), loss_fn=loss_fn, return_outputs=True, run_config=RoundPipeRunConfig(num_microbatch=3)
    )
    outputs, totals = [], []

    def both(output: Tensor, label: Any) -> Tensor:
        outputs.append(output.detach().clone())
        parts = loss_fn(output, label)
        totals.append([part.detach() for part in parts])
        return parts[0] + parts[1]

    fused_loop(list(plain), (x,), {}, None, both, seeds)
    assert_same(out, torch.cat(outputs), "outputs")
    assert isinstance(losses, list)
    for index, loss in enumerate(losses):
        values = [total[index] for total in totals]
        assert_same(loss, sum(values[1:], values[0]), f"loss {index}")
    pipe.synchronize()
    assert_same_model(model, plain, "gradients")


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_autocast_around_the_call(grain: Any, microbatches: int) -> None:
    """The workers take the caller's autocast over, for the recompute too; the cache of casts changes no bits."""
    use_devices(2)
    torch.manual_seed(BASE_SEED)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    torch.manual_seed(BASE_SEED)
    pair = Pair(model, lambda out, y: F.mse_loss(out.float(), y))
    x, y = torch.randn(6, 2, 6, 6), torch.randn(6, 3)
    plan = plan_of(6, [2, 4], [1, 3, 5], True)
    for _ in range(2):
        # torch keeps casts of the weights until the region ends, so a step ends it.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair.train(
                (x,),
                label=y,
                microbatches=microbatches,
                steps=1,
                config=RoundPipeRunConfig(recompute_grain=grain, execute_plan=plan),
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pair.pipe(x).dtype == torch.bfloat16
    assert pair.pipe(x).dtype == torch.float32


def test_autocast_forward_then_backward_outside() -> None:
    """As torch advises: the backward runs outside of the autocast region, in the dtypes of the forward."""
    use_devices(2)
    torch.manual_seed(BASE_SEED)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = torch.randn(6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = pipe(x), plain(x)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert_same(out.detach(), expected.detach(), "outputs")
    pipe.synchronize()
    assert_same_model(model, plain, "gradients")


def test_microbatches_of_a_split_function_and_many_of_them() -> None:
    use_devices(4)
    torch.manual_seed(BASE_SEED)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    pipe = RoundPipe(model)
    x, y = torch.randn(20, 5), torch.randn(20, 3)
    sizes = [2, 7, 3, 8]
    config = RoundPipeRunConfig(
        num_microbatch=4,
        split_input=lambda args, kwargs, n: ([(part,) for part in args[0].split(sizes)], [{}] * n),
        split_label=lambda label, n: list(label.split(sizes)),
    )
    loss = pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss, run_config=config)
    losses = []
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        part_loss = F.mse_loss(plain(part), target)
        part_loss.backward()
        losses.append(part_loss.detach())
    assert_same(loss, sum(losses[1:], losses[0]), "loss")
    pipe.synchronize()
    assert_same_model(model, plain, "uneven")
    pair = Pair(copy.deepcopy(plain), F.mse_loss)
    pair.train((torch.randn(40, 5),), label=torch.randn(40, 3), microbatches=20, steps=1)


def test_compiled_in_place_keeps_its_options() -> None:
    """Each device compiles the layer with the backend and the options that it was compiled with."""
    use_devices(2)
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], options: dict[str, int]) -> Any:
        seen.append(options)
        return graph.forward

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() + 1

    model = nn.Sequential(nn.Linear(5, 5), Layer())
    plain = copy.deepcopy(model)
    model[1].compile(backend=backend, options={"level": 3}, dynamic=True)
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x = torch.randn(6, 5)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), plain(x))
    assert seen and all(options == {"level": 3} for options in seen)
    seen.clear()
    plain[1].compile(backend=backend, disable=True)
    assert RoundPipe(plain)(x).shape == (6, 3) and not seen


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on the CPU")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_compiled_layer(backend: str, way: str) -> None:
    """Traced anew for each device. Against the same backend in the loop, as a compiler may change bits."""
    use_devices(2)
    torch.manual_seed(BASE_SEED)
    inner = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 5))
    model = nn.Sequential(nn.Linear(5, 5), inner, nn.Linear(5, 3))
    plain = copy.deepcopy(model)
    for owner in (model, plain):
        if way == "wrapped":
            owner[1] = torch.compile(owner[1], backend=backend)
        else:
            owner[1].compile(backend=backend)
    pipe = RoundPipe(model)
    x, y = torch.randn(6, 5), torch.randn(6, 3)
    for _ in range(2):
        loss = pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss, run_config=RoundPipeRunConfig(num_microbatch=2))
        losses = []
        for part, target in zip(cut(x, 2), cut(y, 2), strict=True):
            part_loss = F.mse_loss(plain(part), target)
            part_loss.backward()
            losses.append(part_loss.detach())
        assert_same(loss, losses[0] + losses[1], "loss")
    pipe.synchronize()
    assert_same_model(model, plain, "compiled")
