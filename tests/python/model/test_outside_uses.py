"""Parameters of a pipeline that code outside of its layers uses, too: on the host beside a part, or in a penalty."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

ONE = RoundPipeRunConfig(num_microbatch=1)


class Text(nn.Module):
    """A part whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(states))  # type: ignore[no-any-return]


class Root(nn.Module):
    """Uses the weight on the host so often before and after its part."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.text, self.scale = Text(), nn.Parameter(torch.ones(8))
        self.before, self.after = before, after

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = nn.functional.one_hot(tokens, 11)[..., :8] * self.scale
        for _ in range(self.before):
            states = states + self.text.table(tokens)
        states = self.text(states)
        for _ in range(self.after):
            states = nn.functional.linear(states, self.text.table.weight.t()) @ self.text.middle.weight
            states = nn.functional.linear(states, self.text.table.weight)
        return states.sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace("_original_model.", ""): p.grad.clone() for name, p in named if p.grad is not None}


def check_same(mine: nn.Module, theirs: nn.Module) -> None:
    found, expected = gradients(mine), gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (2, 0), (0, 2), (2, 2)])
def test_host_code_uses_parameters_of_a_part(before: int, after: int, two_devices: None) -> None:
    torch.manual_seed(before + 7 * after)
    root = Root(before, after)
    with torch.no_grad():  # whole numbers of few bits, whose sums have one value in every order
        for parameter in root.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape) * torch.randint(0, 2, parameter.shape))
    plain, tokens = copy.deepcopy(root), torch.randint(0, 11, (4, 3))
    wrapped = wrap_model_to_roundpipe(root, upper_threshold=640, model_run_config=ONE)
    assert isinstance(wrapped, AutoRoundPipe)
    for _ in range(2):  # gradients add up
        assert torch.equal(wrapped.forward_backward((tokens,)), plain(tokens).detach())
        plain(tokens).backward()
        wrapped.synchronize()
        check_same(root, plain)


def test_rounded_sums_of_two_uses_have_the_same_bits(two_devices: None) -> None:
    torch.manual_seed(5)
    root = Root(1, 0)
    plain, tokens = copy.deepcopy(root), torch.randint(0, 11, (4, 3))
    wrapped = wrap_model_to_roundpipe(root, upper_threshold=640, model_run_config=ONE)
    loss = wrapped(tokens)
    loss.backward()
    plain(tokens).backward()
    wrapped.synchronize()
    check_same(root, plain)


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.125 * sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]


def loss_first(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    return loss + penalty(model)  # type: ignore[no-any-return]


def penalty_first(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    added = penalty(model)
    return added + model(rows).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("total", [loss_first, penalty_first])
def test_a_penalty_over_the_parameters(
    total: Callable[[nn.Module, torch.Tensor], torch.Tensor], two_devices: None
) -> None:
    plain, wrapped, rows = _sequential()
    total(wrapped, rows).backward()
    total(plain, rows).backward()
    wrapped.synchronize()
    check_same(wrapped._original_model, plain)


@pytest.mark.parametrize("way", ["function", "fused"])
def test_a_penalty_with_a_backward_of_its_own(way: str, two_devices: None) -> None:
    """Before the step, while the engine has the sums of the call."""
    plain, wrapped, rows = _sequential()
    own = list(wrapped._original_model.parameters())
    optimizer: Any
    if way == "fused":
        optimizer = roundpipe.optim.SGD(wrapped, lr=0.5)
    else:
        optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.5)
    wrapped.forward_backward((rows,), loss_fn=lambda outputs, _: outputs.square().mean())
    (0.125 * sum(p.square().sum() for p in own)).backward()  # type: ignore[union-attr]
    wrapped.step(optimizer if way == "fused" else optimizer.step, is_async=False)
    plain(rows).square().mean().backward()
    penalty(plain).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def _sequential() -> tuple[nn.Module, Any, torch.Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    return copy.deepcopy(model), RoundPipe(model, model_run_config=ONE), torch.randn(4, 8)
