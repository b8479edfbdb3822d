"""Fused optimizers on a model in the pipeline against a hand-written loop, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from fused_reference import FusedPair
from reference_loops import assert_same, use_devices
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.train.demo.plain_loop import fused_adamw
from sweeps import sweep

WIDTH = 32  # torch's own vector tails round otherwise, so sizes are multiples of 16
OPTIONS = {"lr": 1e-2, "weight_decay": 0.02}


def build(dtype: torch.dtype = torch.float32, layers: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]).to(dtype)


def adamw(masters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return fused_adamw([m for _, m in masters], **OPTIONS)


def pair(model: nn.Sequential, **options: Any) -> FusedPair:
    return FusedPair(model, lambda pipe: roundpipe.optim.AdamW(pipe, **OPTIONS), adamw, **options)


def batch(dtype: torch.dtype = torch.float32, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH).to(dtype), torch.randn(rows, WIDTH).to(dtype)


@sweep("count, is_async, dtype", [1, 2, 5, 8], [True, False], [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_loop_on_any_number_of_devices(count: int, is_async: bool, dtype: torch.dtype) -> None:
    use_devices(count)
    run = pair(build(dtype), microbatches=4)
    for _ in range(4):
        run.call(*batch(dtype))
        run.step(is_async)
    run.compare()


@pytest.mark.parametrize("is_async", [True, False])
def test_masters_of_24_bits_are_the_same_on_any_number_of_devices(is_async: bool) -> None:
    data = [batch(torch.bfloat16) for _ in range(4)]
    states = []
    for count in (1, 2, 3, 4):
        use_devices(count)
        model = build(torch.bfloat16)
        pipe = RoundPipe(model, name="narrow", model_run_config=RoundPipeRunConfig(num_microbatch=4))
        optimizer = roundpipe.optim.AdamW(pipe, **OPTIONS, masters="24bit")
        for inputs, label in data:
            pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
            pipe.step(optimizer, is_async)
        pipe.synchronize()
        assert optimizer.host_memory().masters == sum(p.numel() for p in model.parameters())
        kept = optimizer.state_dict()["state"].values()
        states.append([*model.parameters(), *(entry["master_remainder"].clone() for entry in kept)])
    assert states[0][-1].dtype == torch.int8
    # Layers of the same shape round by numbers of their own.
    assert len({bytes(p.view(torch.uint8).numpy()) for p in states[0][10:] if p.dim() == 2}) == 5
    for other in states[1:]:
        for mine, theirs in zip(states[0], other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("is_async", [True, False])
def test_schedulers_groups_and_clipping(is_async: bool) -> None:
    use_devices(2)

    def ours(pipe: RoundPipe) -> torch.optim.Optimizer:
        return roundpipe.optim.AdamW(
            pipe,
            **OPTIONS,
            groups=[
                {"params": "0.*", "lr": 3e-3},
                {"params": lambda name, p: name.startswith("4.") and p.dim() == 2, "betas": (0.8, 0.9)},
            ],
            decay_norms_and_biases=False,
        )

    def theirs(masters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = []
        for name, master in masters:
            options: dict[str, Any] = {"params": [master]}
            if name.startswith("0."):
                options["lr"] = 3e-3
            if name == "4.0.weight":
                options["betas"] = (0.8, 0.9)
            if master.dim() < 2:
                options["weight_decay"] = 0.0
            groups.append(options)
        return fused_adamw(groups, **OPTIONS)

    run = FusedPair(build(torch.bfloat16), ours, theirs)
    make = torch.optim.lr_scheduler.LambdaLR
    schedulers = (make(run.ours, lambda s: 1 / (1 + s)), make(run.theirs, lambda s: 1 / (1 + s)))
    for step in range(5):
        run.call(*batch(torch.bfloat16))
        run.step(is_async, schedulers, math.inf if step == 2 else 0.02)
    run.compare()
    assert run.ours.param_groups[0]["lr"] == pytest.approx(3e-3 / 6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr": 0.01}),
        ("Adadelta", {}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"lr": 1e-3}),
        ("Rprop", {"lr": 1e-3}),
        ("ASGD", {}),
        ("Adafactor", {}),
        ("Adam", {"amsgrad": True}),
    ],
)
def test_every_algorithm_follows_torch(name: str, options: dict[str, Any]) -> None:
    use_devices(2)
    torch.manual_seed(2)
    model = build(layers=3)
    theirs_model = build(layers=3)
    pipe = RoundPipe(model, name="all")
    ours = getattr(roundpipe.optim, name)(pipe, **options)
    theirs = getattr(torch.optim, name)(theirs_model.parameters(), **options)
    for _ in range(4):
        inputs, label = batch()
        pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
        pipe.step(ours, is_async=False)
        for part, target in zip(inputs.tensor_split(3), label.tensor_split(3), strict=True):
            nn.functional.mse_loss(theirs_model(part), target).backward()
        theirs.step()
        theirs.zero_grad()
    pipe.synchronize()
    for (key, mine), other in zip(model.named_parameters(), theirs_model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_saved_run_goes_on_with_the_same_bits(is_async: bool) -> None:
    use_devices(2)
    data = [batch(torch.bfloat16) for _ in range(6)]

    def make() -> tuple[nn.Sequential, RoundPipe, torch.optim.Optimizer]:
        model = build(torch.bfloat16)
        pipe = RoundPipe(model, name="resume")
        return model, pipe, roundpipe.optim.AdamW(pipe, **OPTIONS)

    def steps(pipe: RoundPipe, optimizer: Any, batches: list[Any]) -> None:
        for inputs, label in batches:
            pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
            pipe.step(optimizer, is_async)
        pipe.synchronize()

    model, pipe, optimizer = make()
    steps(pipe, optimizer, data[:3])
    saved = {
        "model": {k: v.clone() for k, v in pipe.state_dict().items()},
        "optimizer": torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict()),
        "calls": pipe.calls,
    }
    steps(pipe, optimizer, data[3:])

    other_model, other, other_optimizer = make()
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    other.calls = saved["calls"]
    steps(other, other_optimizer, data[3:])
    for mine, theirs in zip(model.parameters(), other_model.parameters(), strict=True):
        assert_same(mine.detach(), theirs.detach(), "weight")
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), other_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert_same(mine, theirs, "state")


def test_state_is_torchs() -> None:
    use_devices(1)
    model = build()
    pipe = RoundPipe(model, name="layout")
    optimizer = roundpipe.optim.AdamW(pipe, **OPTIONS)
    inputs, label = batch()
    pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
    pipe.step(optimizer)
    state = optimizer.state_dict()
    theirs = torch.optim.AdamW(model.parameters(), **OPTIONS)
    assert {k: v.shape for k, v in state["state"][0].items()} == {
        "step": (),
        "exp_avg": (WIDTH, WIDTH),
        "exp_avg_sq": (WIDTH, WIDTH),
    }
    theirs.load_state_dict(state)
    # And back.
    optimizer.load_state_dict(theirs.state_dict())
    assert_same(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"], "exp_avg")


def test_gradients_kept_in_fp32_are_not_rounded_between_calls() -> None:
    use_devices(1)
    results = {}
    for gradients in ("weights", "float32"):
        torch.manual_seed(4)
        model = build(torch.bfloat16, layers=2)
        pipe = RoundPipe(model, name="wide")
        optimizer = roundpipe.optim.SGD(pipe, lr=1.0, gradients=gradients)
        before = [p.detach().float().clone() for p in model.parameters()]
        plain = build(torch.bfloat16, layers=2)
        torch.manual_seed(4)
        exact = [torch.zeros_like(p, dtype=torch.float32) for p in plain.parameters()]
        for _ in range(6):
            inputs, label = batch(torch.bfloat16)
            pipe.forward_backward(
                (inputs,),
                label=label,
                loss_fn=nn.functional.mse_loss,
                run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1),
            )
            plain.zero_grad()
            nn.functional.mse_loss(plain(inputs), label).backward()
            for total, p in zip(exact, plain.parameters(), strict=True):
                total += p.grad.float()  # type: ignore[union-attr]
        pipe.step(optimizer)
        state = optimizer.state_dict()["state"]
        moved = []
        for index, p in enumerate(pipe.parameters()):
            master = torch.empty_like(p, dtype=torch.float32)
            roundpipe._core.join(p.detach(), state[index]["master_remainder"], master)
            moved.append(before[index] - master)
        results[gradients] = max(float((m - e).abs().max() / e.abs().max()) for m, e in zip(moved, exact, strict=True))
    assert results["float32"] < 1e-5 < results["weights"]


def test_a_second_optimizer_takes_over_with_the_masters_of_the_first() -> None:
    use_devices(1)
    model = build(torch.bfloat16)
    pipe = RoundPipe(model, name="second")
    first = roundpipe.optim.AdamW(pipe, **OPTIONS)
    inputs, label = batch(torch.bfloat16)
    for _ in range(3):
        pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
        pipe.step(first)
    remainder = first.state_dict()["state"][0]["master_remainder"].clone()
    assert remainder.any()
    second = roundpipe.optim.SGD(pipe, lr=0.0)
    with pytest.raises(ValueError, match="another one was made since"):
        pipe.step(first)
    assert torch.equal(second.state_dict()["state"][0]["master_remainder"], remainder)
