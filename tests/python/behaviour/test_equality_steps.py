"""Optimizer steps: an asynchronous run equals a loop with weights one step old, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_loops import (
    BASE_SEED,
    assert_same,
    assert_same_model,
    cut,
    fused_loop,
    seeds_of,
    use_devices,
)
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import sweep

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def _devices() -> None:
    use_devices(2)
    torch.manual_seed(BASE_SEED)


def build() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)


class OneStepOld:
    """The reference: gradients at `reading`, updates to `newest`.

    A call reads the weights from before the last update; after a synchronous step or synchronize() the newest.
    """

    def __init__(self, model: nn.Module, make: Make, optim_dtype: torch.dtype | None = None) -> None:
        self.reading = copy.deepcopy(model)
        self.newest = [
            nn.Parameter(p.detach().to(optim_dtype or p.dtype, copy=True))
            for p in model.parameters()
            if p.requires_grad
        ]
        self.optimizer = make(self.newest)
        self.before = [p.detach().clone() for p in self.trainable()]

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.reading.parameters() if p.requires_grad]

    def step(self, update: Callable[[], None], is_async: bool = True) -> None:
        for newest, reading in zip(self.newest, self.trainable(), strict=True):
            if reading.grad is not None:
                gradient = reading.grad.to(newest.dtype)
                newest.grad = gradient if newest.grad is None else newest.grad + gradient
            reading.grad = None
        update()
        self._read(self.before if is_async else self.newest)
        self.before = [p.detach().clone() for p in self.newest]

    def synchronize(self) -> None:
        self._read(self.newest)

    @torch.no_grad()
    def _read(self, values: list[Any]) -> None:
        for reading, value in zip(self.trainable(), values, strict=True):
            reading.copy_(value)


class Run:
    """A model in the pipeline, and the reference beside it."""

    def __init__(self, model: nn.Sequential, make: Make, microbatches: int = 3, **options: Any) -> None:
        self.microbatches = microbatches
        self.plain = OneStepOld(model, make, options.get("optim_dtype"))
        self.model = model
        self.pipe = RoundPipe(
            model, name="run", model_run_config=RoundPipeRunConfig(num_microbatch=microbatches), **options
        )
        self.parameters = [p for p in self.pipe.optim_parameters() if p.requires_grad]
        self.optimizer = make(self.parameters)

    def call(self, step: int, dtype: torch.dtype = torch.float32) -> None:
        x, y = (tensor.to(dtype) for tensor in batch(step))
        seeds = seeds_of(self.pipe, self.pipe.calls, self.microbatches)
        loss = self.pipe.forward_backward((x,), label=y, loss_fn=F.mse_loss)
        expected = fused_loop(list(self.plain.reading), (x,), {}, y, F.mse_loss, seeds)
        assert_same(loss, expected, f"loss of step {step}")

    def step(self, update: Callable[[torch.optim.Optimizer, list[nn.Parameter]], None], is_async: bool = True) -> None:
        self.pipe.step(lambda: update(self.optimizer, self.parameters), is_async=is_async)
        self.plain.step(lambda: update(self.plain.optimizer, self.plain.newest), is_async)

    def synchronize(self) -> None:
        self.pipe.synchronize()
        self.plain.synchronize()
        assert_same_model(self.model, self.plain.reading, "after synchronize")
        for ours, theirs in zip(self.parameters, self.plain.newest, strict=True):
            assert_same(ours.detach(), theirs.detach(), "optimizer's parameter")


def plain_update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    optimizer.step()
    optimizer.zero_grad()


def clipped_update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    plain_update(optimizer, parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asynchronous_is_one_step_old(name: str) -> None:
    run = Run(build(), OPTIMIZERS[name])
    for step in range(5):
        run.call(step)
        run.step(clipped_update if step % 2 else plain_update)
    run.synchronize()


def test_several_calls_a_step_and_gradients_kept_over_steps() -> None:
    """zero_grad only every other step: the optimizer's gradients add up."""
    run = Run(build(), OPTIMIZERS["momentum"])

    def update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        optimizer.step()
        if run.pipe.calls % 4 == 0:
            optimizer.zero_grad()

    for step in range(4):
        run.call(2 * step)
        run.call(2 * step + 1)
        run.pipe.step(lambda step=step: _sometimes(run.optimizer, step))
        run.plain.step(lambda step=step: _sometimes(run.plain.optimizer, step))
    run.synchronize()


def _sometimes(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.step()
    if step % 2:
        optimizer.zero_grad()


def test_a_step_without_a_call_and_a_call_without_a_step() -> None:
    run = Run(build(), OPTIMIZERS["adamw"])
    run.step(plain_update)
    run.call(0)
    run.step(plain_update)
    run.step(plain_update)
    run.call(1)
    run.call(2)
    run.step(plain_update, is_async=False)
    run.call(3)
    run.synchronize()
    run.call(4)
    run.step(plain_update)
    run.synchronize()


def test_forward_and_backward_in_asynchronous_steps() -> None:
    """The backward of a call reads the weights that its forward read, though a step was made in between."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    run = Run(model, OPTIMIZERS["momentum"], microbatches=1)
    for step in range(4):
        x, y = batch(step)
        loss = F.mse_loss(run.pipe(x), y)
        expected = F.mse_loss(run.plain.reading(x), y)
        assert_same(loss.detach(), expected.detach(), f"loss {step}")
        loss.backward()
        expected.backward()
        run.step(plain_update)
    run.synchronize()
    late, expected = (
        F.mse_loss(run.pipe(batch(5)[0]), batch(5)[1]),
        F.mse_loss(run.plain.reading(batch(5)[0]), batch(5)[1]),
    )
    late.backward()
    expected.backward()
    run.synchronize()


class Wide(nn.Module):
    """A layer with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.float()).to(x.dtype))


def small_model(dtype: torch.dtype) -> nn.Sequential:
    """A layer of few bytes, one of many, one of two dtypes, and a tied pair."""
    model = nn.Sequential(
        nn.Linear(5, 6),
        nn.Tanh(),
        nn.Linear(6, 60),
        nn.GELU(),
        nn.Linear(60, 6),
        Wide(),
        nn.Linear(6, 60),
        nn.Linear(60, 3),
    ).to(dtype)
    model[5].norm.float()
    model[6].weight = model[2].weight = nn.Parameter(torch.randn(60, 6, dtype=dtype) * 0.3)
    return model


@sweep(
    "optim_dtype, microbatches, is_async, dtype",
    [torch.float32, torch.float64, None],
    [1, 3],
    [True, False],
    [torch.bfloat16, torch.float16],
    ids=str,
)
def test_weights_of_16_bits(
    optim_dtype: torch.dtype | None, microbatches: int, is_async: bool, dtype: torch.dtype
) -> None:
    run = Run(small_model(dtype), OPTIMIZERS["momentum"], microbatches, optim_dtype=optim_dtype)
    for step in range(3):
        for call in range(1 + step % 2):
            run.call(step + 10 * call, dtype)
        run.step(clipped_update, is_async)
    run.synchronize()


@pytest.mark.parametrize(("is_async", "after"), [(True, 3), (True, 0), (False, 2)])
def test_state_goes_to_another_run_and_back(is_async: bool, after: int) -> None:
    """A run that is saved, loaded into fresh models and goes on has the bits of one that goes on itself."""
    run = Run(build(), OPTIMIZERS["adamw"])
    for step in range(after):
        run.call(step)
        run.step(plain_update, is_async)
    saved = {name: tensor.clone() for name, tensor in run.pipe.state_dict().items()}
    optimizer_state = copy.deepcopy(run.optimizer.state_dict())
    run.synchronize()

    torch.manual_seed(BASE_SEED + 1)
    other = Run(build(), OPTIMIZERS["adamw"])
    other.call(0)
    other.step(plain_update, is_async)
    other.pipe.load_state_dict(saved)
    other.optimizer.load_state_dict(optimizer_state)
    other.plain.reading.load_state_dict(saved)
    other.plain.optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    with torch.no_grad():
        for newest, reading in zip(other.plain.newest, other.plain.trainable(), strict=True):
            newest.copy_(reading)
        other.plain.before = [newest.clone() for newest in other.plain.newest]
    for name, tensor in other.pipe.state_dict().items():
        assert_same(tensor, saved[name], name)
    for step in range(after, after + 3):
        other.call(step)
        other.step(plain_update, is_async)
    other.synchronize()


class Encoder(nn.Module):
    """An embedding, a list of blocks and a head under one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).flatten(0, 1)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("wrapping", ["automatic", "whole"])
def test_wrapped_encoder(wrapping: str, is_async: bool) -> None:
    model = Encoder()
    plain = OneStepOld(model, OPTIMIZERS["adamw"])
    names = [name for name, _ in model.named_parameters()]
    options = {"lower_threshold": 64} if wrapping == "automatic" else {"upper_threshold": 10**9}
    pipe = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1), **options)
    ours = dict(pipe.optim_named_parameters())
    assert list(ours) == names
    optimizer = OPTIMIZERS["adamw"](list(ours.values()))
    tokens = torch.arange(24).view(6, 4) % 11
    for _ in range(4):
        loss_fn = lambda out, y: F.cross_entropy(out, y.flatten())  # noqa: E731
        loss = pipe.forward_backward((tokens,), label=tokens, loss_fn=loss_fn)
        expected = loss_fn(plain.reading(tokens), tokens)
        expected.backward()
        assert_same(loss, expected.detach(), "loss")
        pipe.step(lambda: plain_update(optimizer, []), is_async=is_async)
        plain.step(lambda: plain_update(plain.optimizer, []), is_async)
    pipe.synchronize()
    plain.synchronize()
    for name, parameter in plain.reading.named_parameters():
        assert_same(ours[name].detach(), parameter.detach(), name)


def test_script_in_the_style_of_the_published_readme() -> None:
    """Nothing but the public names, as a user of the published package writes them."""
    from roundpipe import ModelExecutePlan
    from roundpipe import RoundPipe as Pipe

    plain = build().eval()
    net = copy.deepcopy(plain)
    model = Pipe(net, optim_dtype=torch.float32, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    optimizer = torch.optim.Adam(model.optim_parameters(), lr=1e-2)
    reference = OneStepOld(plain, lambda p: torch.optim.Adam(p, lr=1e-2))

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(outputs, labels) / 4

    def step_fn() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        x, y = batch(step)
        plan = ModelExecutePlan.auto("fused", model)
        loss = model.forward_backward(
            input_args=(x,), label=y, loss_fn=loss_fn, run_config=RoundPipeRunConfig(execute_plan=plan)
        )
        model.step(step_fn)

        losses = []
        for part, target in zip(cut(x, 4), cut(y, 4), strict=True):
            part_loss = loss_fn(reference.reading(part), target)
            part_loss.backward()
            losses.append(part_loss.detach())
        assert_same(loss, sum(losses[1:], losses[0]), f"loss {step}")

        def update() -> None:
            torch.nn.utils.clip_grad_norm_(reference.newest, 1.0)
            reference.optimizer.step()
            reference.optimizer.zero_grad()

        reference.step(update)
    model.synchronize()
    reference.synchronize()
    assert_same_model(net, reference.reading, "trained")
    with torch.no_grad():
        x = batch(9)[0]
        assert_same(model(x), torch.cat([reference.reading(part) for part in cut(x, 4)]), "outputs")
