"""Every way to reach a parameter of a model, and what it shows while an asynchronous step is under way: the newest
weights. Reading changes nothing: calls go on with the weights that they would have read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import pipe_of, squared_error
from roundpipe import RoundPipe
from silent_program import READS

pytestmark = pytest.mark.usefixtures("two_devices")

WIDTH, ROWS = 6, 4

# The table of docs/optimizers.md.
WAYS = READS | {"state_dict()": lambda model: model.state_dict()["0.weight"]}


def trained(read: Callable[[Any], torch.Tensor] | None) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The losses of asynchronous steps, what was read after each, and the weight at the end."""
    torch.manual_seed(1)
    model = pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 2)
    optimizer = roundpipe.optim.AdamW(model, lr=0.1)
    generator = torch.Generator().manual_seed(2)
    losses, seen = [], []
    for _ in range(4):
        value, label = torch.randn(2, ROWS, WIDTH, generator=generator)
        losses.append(model.forward_backward((value,), label=label, loss_fn=squared_error))
        model.step(optimizer)
        if read is not None:
            seen.append(read(model).detach().clone())
    model.synchronize()
    return losses, seen, model.state_dict()["0.weight"].clone()


def weights_after_each_step() -> list[torch.Tensor]:
    """Of the same training, ended after 1, 2, ... steps."""
    found = []
    for steps in range(1, 5):
        torch.manual_seed(1)
        model = pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 2)
        optimizer = roundpipe.optim.AdamW(model, lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(steps):
            value, label = torch.randn(2, ROWS, WIDTH, generator=generator)
            model.forward_backward((value,), label=label, loss_fn=squared_error)
            model.step(optimizer)
        model.synchronize()
        found.append(model.state_dict()["0.weight"].clone())
    return found


@pytest.mark.parametrize("name", READS)
def test_the_newest_weights_are_read_and_training_does_not_notice(name: str) -> None:
    losses, _, end = trained(None)
    seen_losses, seen, seen_end = trained(READS[name])
    assert all(map(torch.equal, seen_losses, losses)) and torch.equal(seen_end, end)
    assert all(map(torch.equal, seen, weights_after_each_step()))


@pytest.mark.parametrize("name", WAYS)
def test_all_ways_show_the_same(name: str) -> None:
    torch.manual_seed(1)
    model = pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 1)
    optimizer = roundpipe.optim.SGD(model, lr=0.1)
    model.forward_backward((torch.ones(ROWS, WIDTH),), label=torch.zeros(ROWS, WIDTH), loss_fn=squared_error)
    model.step(optimizer)
    seen = WAYS[name](model).detach().clone()
    assert torch.equal(seen, model.state_dict()["0.weight"])


def test_values_written_into_what_was_read_are_the_next_steps() -> None:
    def run(settles: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 1)
        optimizer = roundpipe.optim.SGD(model, lr=0.1)

        def step() -> None:
            model.forward_backward((torch.ones(ROWS, WIDTH),), label=torch.zeros(ROWS, WIDTH), loss_fn=squared_error)
            model.step(optimizer)

        step()
        if settles:
            model.synchronize()
        with torch.no_grad():
            written: RoundPipe = model
            written[0].weight.mul_(0.5)
        model.synchronize()
        step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected = run(settles=True)
    for name, value in run(settles=False).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("between", ["call", "predict_memory", "assign"])
def test_what_comes_between_a_step_and_a_reading_hides_nothing(between: str) -> None:
    torch.manual_seed(1)
    model = pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 1)
    optimizer = roundpipe.optim.SGD(model, lr=0.1)
    value, label = torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    model.forward_backward((value,), label=label, loss_fn=squared_error)
    model.step(optimizer)
    expected = model[0].weight.detach().clone()
    if between == "predict_memory":
        model.predict_memory((value,), label=label, loss_fn=squared_error)
    elif between == "assign":
        bias = model[0].bias
        bias.data = torch.ones(WIDTH)
    model.forward_backward((value,), label=label, loss_fn=squared_error)
    assert torch.equal(dict(model.named_parameters())["0.weight"], expected)
