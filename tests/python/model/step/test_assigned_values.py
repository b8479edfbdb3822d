"""Values that a program assigns to parameters (`parameter.data = value`) are what the next step, call and save use:
as in PyTorch, for sharpness-aware minimization, averages that trade places with the weights, PEFT's safe merge."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import roundpipe
from robustness import pipe_of, squared_error
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("two_devices")

WIDTH, ROWS = 6, 4


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def backward(model: nn.Module, value: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    loss = squared_error(model(value), label)
    loss.backward()
    return loss.detach()


def check_same(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


# --- What programs assign, on a network of either kind ---


def climb_and_go_back(network: nn.Module, value: torch.Tensor, label: torch.Tensor) -> None:
    """SAM: the gradient is that of a place nearby."""
    backward(network, value, label)
    old = {parameter: parameter.data.clone() for parameter in network.parameters()}
    with torch.no_grad():
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=0.1)
    network.zero_grad()
    backward(network, value, label)
    for parameter in network.parameters():
        parameter.data = old[parameter]


def halve(network: nn.Module, value: torch.Tensor, label: torch.Tensor) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data / 2
    backward(network, value, label)


def trade_places(network: nn.Module, value: torch.Tensor, label: torch.Tensor) -> None:
    """Two parameters take each other's memory."""
    first, second = (parameter for parameter in network.parameters() if parameter.dim() == 2)
    first.data, second.data = second.data, first.data
    backward(network, value, label)


def transpose(network: nn.Module, value: torch.Tensor, label: torch.Tensor) -> None:
    """A parameter takes its own memory, in another order."""
    first = next(iter(network.parameters()))
    first.data = first.data.t()
    backward(network, value, label)


def assign_after_the_backward(network: nn.Module, value: torch.Tensor, label: torch.Tensor) -> None:
    backward(network, value, label)
    first = next(iter(network.parameters()))
    first.data = torch.full_like(first, 0.5)


HABITS = {
    habit.__name__: habit for habit in (climb_and_go_back, halve, trade_places, transpose, assign_after_the_backward)
}


@pytest.mark.parametrize("name", HABITS)
def test_a_plain_loop_goes_on_from_them(name: str) -> None:
    plain = chain()
    model = pipe_of(copy.deepcopy(plain), 1)
    for network in (plain, model):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        for value, label in batches(3):
            optimizer.zero_grad()
            HABITS[name](network, value, label)
            optimizer.step()
    expected = plain.state_dict()
    for key, value in model.state_dict().items():
        # Products with a weight in another order in memory may be rounded otherwise.
        tolerance = 1e-5 if name == "transpose" else 0
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)


def trained(way: str, is_async: bool, before: int, halve_it: Callable[[nn.Parameter], None]) -> dict[str, torch.Tensor]:
    """Four steps of SGD, with a layer's values halved before one of them, when nothing runs."""
    model = pipe_of(chain(), 2)
    optimizer = (
        roundpipe.optim.SGD(model, lr=0.1) if way == "fused" else torch.optim.SGD(model.optim_parameters(), lr=0.1)
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for number, (value, label) in enumerate(batches(4)):
        if number == before:
            model.synchronize()
            for parameter in model.get_submodule("0").parameters():
                halve_it(parameter)
        model.forward_backward((value,), label=label, loss_fn=squared_error)
        model.step(optimizer if way == "fused" else update, is_async)
    return {name: value.clone() for name, value in model.state_dict().items()}


def assign_half(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data / 2


def write_half(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.div_(2)


@sweep("way, is_async, before", ["fused", "function"], [True, False], [0, 1, 3])
def test_steps_in_the_pipeline_start_from_them(way: str, is_async: bool, before: int) -> None:
    expected = trained(way, is_async, before, write_half)
    for name, value in trained(way, is_async, before, assign_half).items():
        assert torch.equal(value, expected[name]), name


def test_a_state_and_a_call_have_them() -> None:
    plain = chain()
    model = pipe_of(copy.deepcopy(plain), 1)
    value, _ = next(batches(1))
    for number in (7.0, 3.0):
        for network in (plain, model):
            for parameter in network.parameters():
                parameter.data = torch.full_like(parameter, number)
        check_same(model, plain)
        with torch.no_grad():
            assert torch.equal(model(value), plain(value))


def test_frozen_parameters() -> None:
    plain = chain()
    model = pipe_of(copy.deepcopy(plain).requires_grad_(False), 1)
    for network in (plain, model):
        for parameter in network.parameters():
            parameter.data = torch.full_like(parameter, 2.0)
    model.synchronize()
    check_same(model, plain)


@pytest.mark.parametrize("then", ["synchronize", "call", "step"])
def test_an_assignment_while_a_fused_step_is_under_way(then: str) -> None:
    """It is newer than the step, whatever comes next."""
    model = pipe_of(chain(), 1)
    optimizer = roundpipe.optim.SGD(model, lr=0.1)
    (first, label), (second, _) = batches(2)
    weight = model.get_submodule("0").weight

    def call(value: torch.Tensor) -> None:
        model.forward_backward((value,), label=label, loss_fn=squared_error)

    call(first)
    model.step(optimizer)
    weight.data = torch.full_like(weight, 0.5)
    if then == "step":
        model.step(optimizer)  # of no gradients
    elif then == "call":
        with torch.no_grad():
            model(second)
    model.synchronize()
    assert torch.equal(model.state_dict()["0.weight"], torch.full((WIDTH, WIDTH), 0.5))


def test_a_step_goes_on_from_an_assignment_while_one_was_under_way() -> None:
    model = pipe_of(chain(), 1)
    optimizer = roundpipe.optim.SGD(model, lr=1e-6)
    for number, (value, label) in enumerate(batches(3)):
        model.forward_backward((value,), label=label, loss_fn=squared_error)
        if number == 2:
            weight = model.get_submodule("0").weight
            weight.data = torch.full((WIDTH, WIDTH), 0.25)
        model.step(optimizer)
    torch.testing.assert_close(model.state_dict()["0.weight"], torch.full((WIDTH, WIDTH), 0.25), rtol=0.01, atol=0)


def test_a_write_in_place_that_a_running_step_replaces_is_refused_by_name() -> None:
    model = pipe_of(chain(), 1)
    optimizer = roundpipe.optim.SGD(model, lr=0.1)
    (value, label), _ = batches(2)
    weight = model.get_submodule("0").weight
    model.forward_backward((value,), label=label, loss_fn=squared_error)
    model.step(optimizer)
    with torch.no_grad():
        weight.mul_(0.5)  # a reference from before the step
    with pytest.raises(ValueError, match=r"parameter 'weight' was written while a step was under way"):
        model.step(optimizer)
    model.synchronize()


def test_memory_that_two_parameters_would_share_is_refused_by_name() -> None:
    model = pipe_of(chain(), 1)
    first, second = (model.get_submodule(name).weight for name in ("0", "2"))
    before = first.detach().clone()
    first.data = second.data
    with pytest.raises(ValueError, match=r"parameters .* lie in the same memory"):
        model.state_dict()
    first.data = before
    exchanged = second.detach().clone()
    first.data, second.data = second.data, first.data
    assert torch.equal(model.state_dict()["0.weight"], exchanged)
    layers = chain()
    layers[0].weight.data = layers[2].weight.data
    with pytest.raises(ValueError, match=r"parameters '0.weight' and '2.weight' lie in the same memory"):
        pipe_of(layers, 1)
    layers.requires_grad_(False)
    value, _ = next(batches(1))
    with torch.no_grad():
        expected = layers(value)
        assert torch.equal(pipe_of(layers, 1)(value), expected)


def test_another_shape_is_refused_by_name() -> None:
    model = pipe_of(chain(), 1)
    weight = model.get_submodule("0").weight
    weight.data = torch.ones(WIDTH, WIDTH + 1)
    with pytest.raises(ValueError, match=r"parameter 'weight' has become"):
        model.state_dict()
