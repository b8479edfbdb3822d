"""What the engine does with a card, where only a test card can say when things happen and what fails."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import roundpipe
from robustness import squared_error
from roundpipe import RoundPipe, RoundPipeRunConfig

card = pytest.importorskip("fake_card", reason="the test card is not on the path; run `make test-card`")


class Busy(torch.autograd.Function):
    """Keeps the card busy before what comes next, forward and backward, while the host goes on."""

    @staticmethod
    def forward(ctx, value, forward_ms, backward_ms):
        ctx.backward_ms = backward_ms
        if value.device.type == "card":
            card.occupy(forward_ms)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        if gradient.device.type == "card":
            card.occupy(ctx.backward_ms)
        return gradient, None, None


class Late(nn.Module):
    """Begins long after it was issued."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Busy.apply(torch.tanh(self.linear(Busy.apply(value, 3, 3))), 3, 3)


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[Late() for _ in range(3)])


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("spec", ["card:0", "card:0x4", "card:0,card:1"])
def test_layers_that_are_late_give_the_plain_bits(spec, grain):
    roundpipe.devices(spec)
    torch.manual_seed(2)
    plain = nn.Sequential(*[Late() for _ in range(4)])
    batches = [(torch.randn(8, 48), torch.randn(8, 48)) for _ in range(3)]
    config = RoundPipeRunConfig(num_microbatch=4, recompute_grain=grain)
    model = RoundPipe(copy.deepcopy(plain), model_run_config=config)
    ours, theirs = (torch.optim.SGD(it, lr=1e-2) for it in (model.optim_parameters(), plain.parameters()))
    for inputs, target in batches:
        loss = model.forward_backward((inputs,), label=target, loss_fn=squared_error)
        model.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        theirs.zero_grad()
        parts = zip(inputs.tensor_split(4), target.tensor_split(4), strict=True)
        losses = [squared_error(plain(part), wanted) for part, wanted in parts]
        for part in losses:
            part.backward()
        theirs.step()
        total = losses[0].detach()
        for part in losses[1:]:
            total = total + part.detach()
        assert torch.equal(loss, total)
    for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("spec", ["card:0", "card:0x4", "card:0,card:1"])
def test_sums_go_on_from_earlier_calls_whatever_is_late(spec):
    roundpipe.devices(spec)
    torch.manual_seed(2)
    batches = [(torch.randn(8, 48), torch.randn(8, 48)) for _ in range(6)]
    config = RoundPipeRunConfig(num_microbatch=2)
    model, plain = RoundPipe(chain(), model_run_config=config), chain()
    for inputs, target in batches:
        model.forward_backward((inputs,), label=target, loss_fn=squared_error)
        for part in zip(inputs.tensor_split(2), target.tensor_split(2), strict=True):
            squared_error(plain(part[0]), part[1]).backward()
    model.synchronize()
    for ours, theirs in zip(model._original_model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


FAULT = """
import torch, roundpipe
from torch import nn
from roundpipe import RoundPipe

roundpipe.devices("SPEC")

class Breaks(nn.Module):
    def forward(self, value):
        if self.breaks:
            torch.nn.functional.embedding(torch.tensor([99], device=value.device), value)
            while True:
                value = value + 1  # until the card says so
        return value

model = RoundPipe(nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 4)))
model[1].breaks = False
model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
model.synchronize()
model[1].breaks = True
for _ in range(2):
    try:
        model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
        model.synchronize()
    except RuntimeError as error:
        print("raised", "lost to this process" in str(error))
"""


@pytest.mark.parametrize("spec", ["card:0", "card:0,card:1"])
def test_a_lost_card_is_an_error_of_every_call_and_the_process_lives_on(spec):
    text = FAULT.replace("SPEC", spec)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["raised True"] * 2, done.stdout + done.stderr


def test_a_card_that_nobody_uses_gets_no_context():
    text = """
import torch, roundpipe
roundpipe.devices("card:1")
model = roundpipe.RoundPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)))
model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
model.synchronize()
print(torch.card.has_context(0), torch.card.has_context(1))
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr


class Takes(nn.Module):
    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.times = (forward_ms, backward_ms)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Busy.apply(self.linear(value), *self.times)


@pytest.mark.parametrize("spec", ["card:0", "card:0x2", "card:0,card:1"])
def test_layers_take_what_the_card_took(spec):
    roundpipe.devices(spec)
    times = [(40, 60), (80, 120), (50, 40)]
    config = RoundPipeRunConfig(num_microbatch=2)
    model = RoundPipe(nn.Sequential(*[Takes(*of) for of in times]), model_run_config=config)
    for _ in range(8):  # another process may keep the host from issuing in time, and the card idle
        model.forward_backward((torch.randn(4, 8),), loss_fn=lambda outputs, _: outputs.sum())
        model.synchronize()
        measured = [(cost.forward_ms, cost.backward_ms) for cost in model.costs()]
        if all(found == pytest.approx(took, rel=0.1) for took, found in zip(times, measured, strict=True)):
            return
    pytest.fail(f"measured {measured}, expected {times} within a tenth")
