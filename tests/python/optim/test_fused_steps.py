"""Fused optimizers on a model in the pipeline against a hand-written loop, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from fused_reference import FusedPair, squared_error
from reference_loops import assert_same, use_devices
from roundpipe import GradScaler, RoundPipe
from roundpipe.demo.plain_loop import fused_adamw
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping(is_async: bool, dtype: torch.dtype) -> None:
    use_devices(3)
    run = pair(build(dtype))
    for step in range(5):
        run.call(*batch(dtype))
        norm = run.step(is_async, max_grad_norm=math.inf if step == 2 else 0.02)
        assert float(norm) == norm.item() == norm.grad_norm > 0
    run.compare()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_scaler_skips_steps_with_infinite_gradients(is_async: bool, clip: float | None) -> None:
    use_devices(2)
    run = pair(build(torch.float16))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    skipped = []
    for step in range(7):
        run.call(*batch(torch.float16), scaler=scaler, factor=math.inf if step in (2, 5) else 1.0)
        run.scale_used = float(scaler._losses.waiting_or_next())
        skipped.append(run.step(is_async, clip, scaler).skipped)
    run.compare()
    assert skipped == [False, False, True, False, False, True, False]
    assert scaler.get_scale() < 4096


@pytest.mark.parametrize("is_async", [True, False])
def test_schedulers_and_groups(is_async: bool) -> None:
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
    for _ in range(5):
        run.call(*batch(torch.bfloat16))
        run.step(is_async, schedulers=schedulers)
    run.compare()
    assert run.ours.param_groups[0]["lr"] == pytest.approx(3e-3 / 6)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_and_tied_parameters(is_async: bool, dtype: torch.dtype) -> None:
    use_devices(3)
    model = build(dtype)
    model[1][0].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    model.append(model[0])  # the same layer twice
    run = pair(model)
    frozen = [model[1][0].bias.detach().clone(), model[2][0].weight.detach().clone()]
    for _ in range(4):
        run.call(*batch(dtype))
        run.step(is_async)
    run.compare()
    assert_same(model[1][0].bias.detach(), frozen[0], "frozen beside trained")
    assert_same(model[2][0].weight.detach(), frozen[1], "frozen layer")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_several_calls_add_up(is_async: bool, dtype: torch.dtype) -> None:
    use_devices(2)
    run = pair(build(dtype))
    for calls in (2, 1, 3):
        for _ in range(calls):
            run.call(*batch(dtype))
        run.step(is_async)
    run.compare()


@pytest.mark.parametrize("pattern", ["aasa", "saas", "ssas"])
def test_modes_may_change_from_step_to_step(pattern: str) -> None:
    use_devices(2)
    run = pair(build(torch.bfloat16))
    for kind in pattern:
        run.call(*batch(torch.bfloat16))
        run.step(kind == "a")
        if kind == "s":
            # Calls read this step's weights, whatever was asynchronous before.
            run.plain.read = [m.clone() for m in run.plain.made]
    run.compare()


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


def test_eight_bit_moments_stay_close() -> None:
    use_devices(2)
    losses = {}
    for moments in ("float32", "8bit"):
        torch.manual_seed(3)
        model = build(torch.bfloat16)
        pipe = RoundPipe(model, name=moments)
        optimizer = roundpipe.optim.AdamW(pipe, lr=3e-3, moments=moments)
        inputs, label = batch(torch.bfloat16, rows=32)
        for _ in range(60):
            loss = pipe.forward_backward((inputs,), label=label, loss_fn=squared_error)
            pipe.step(optimizer)
        losses[moments] = float(loss)
        assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == (
            torch.uint8 if moments == "8bit" else torch.float32
        )
    assert losses["8bit"] == pytest.approx(losses["float32"], rel=0.05)


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


def test_parameters_show_through_the_model_right_after_a_synchronous_step() -> None:
    use_devices(2)
    model = build()
    pipe = RoundPipe(model, name="shown")
    optimizer = roundpipe.optim.AdamW(pipe, **OPTIONS)
    inputs, label = batch()
    pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
    before = model[0][0].weight.detach().clone()
    pipe.step(optimizer, is_async=False)
    shown = pipe[0][0].weight.detach().clone()
    assert not torch.equal(shown, before) and shown.isfinite().all()
    pipe.synchronize()
    assert torch.equal(shown, model[0][0].weight)


def test_zero_grad_drops_what_no_step_has_taken() -> None:
    use_devices(1)
    model = build()
    pipe = RoundPipe(model, name="zero")
    optimizer = roundpipe.optim.AdamW(pipe, **OPTIONS)
    inputs, label = batch()
    before = [p.detach().clone() for p in model.parameters()]
    pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
    optimizer.zero_grad()
    pipe.step(optimizer)
    pipe.synchronize()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


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


class Fails(nn.Module):
    """The identity, whose recomputed forward fails when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.armed and roundpipe.doing_recompute():
            raise RuntimeError("told so")
        return value + 0


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_backward_that_fails_after_the_step_leaves_the_rest_as_it_is(clip: float | None) -> None:
    use_devices(1)
    torch.manual_seed(5)
    model = build(layers=4)
    model.insert(0, nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails()))
    pipe = RoundPipe(model, name="fails")
    optimizer = roundpipe.optim.AdamW(pipe, **OPTIONS)
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(4)], [range(4, 5), range(2, 4), range(2)]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    inputs, label = batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def call() -> Any:
        return pipe.submit((inputs,), label=label, loss_fn=nn.functional.mse_loss, run_config=config)

    model[0][1].armed = True
    call()
    with pytest.raises(RuntimeError, match="told so"):
        step = pipe.step(optimizer, max_grad_norm=clip)
        assert step is not None
        assert step.abandoned_blocks >= 2 and step.updated_blocks + step.abandoned_blocks == 5
        if clip is not None:
            assert step.updated_blocks == 0 and math.isnan(step.grad_norm)
        pipe.synchronize()
    pipe.synchronize()
    assert torch.equal(model[0][0].weight, before["0.0.weight"])
    assert all(p.isfinite().all() for p in model.parameters())
    model[0][1].armed = False
    call()
    pipe.step(optimizer)
    pipe.synchronize()
    assert not torch.equal(model[0][0].weight, before["0.0.weight"])
