"""A parameter is in one model at a time: two would undo each other's steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.model.wrap import AutoRoundPipe


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def total(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().sum()


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


def test_a_second_wrapper_is_refused_and_the_first_goes_on() -> None:
    module, plain = net(), net()
    first = roundpipe.RoundPipe(module, name="first")
    shares = nn.Sequential(nn.Linear(4, 4), module[0])
    for other in (module, shares, nn.Sequential(module[2])):
        with pytest.raises(ValueError, match="is in the model first already"):
            roundpipe.RoundPipe(other, name="second")
    with pytest.raises(ValueError, match="is in the model first already"):
        roundpipe.wrap_model_to_roundpipe(nn.ModuleDict({"part": module}), use_sequential_preset=False)
    optimizer, theirs = torch.optim.SGD(first.parameters(), 0.01), torch.optim.SGD(plain.parameters(), 0.01)
    for _ in range(2):
        first.forward_backward((X,), loss_fn=total)
        total(plain(X), None).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        first.synchronize()
        for ours, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted)


def test_garbage_that_was_not_collected_yet_does_not_hold_parameters() -> None:
    module = net()
    gc.disable()
    try:
        circle: list[Any] = [roundpipe.RoundPipe(module, name="first")]
        circle.append(circle)
        del circle
        second = roundpipe.RoundPipe(module, name="second")
    finally:
        gc.enable()
    assert second(X).shape == (12, 1)


class Around(nn.Module):
    """A root on the host with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["fused", "copies", "function"])
def test_parts_of_a_model_are_stepped_by_one_model(way: str) -> None:
    root = Around()
    inner = roundpipe.RoundPipe(root.inner, name="inner")
    root.inner = inner  # type: ignore[assignment]
    first = AutoRoundPipe(root, name="first")
    second = AutoRoundPipe(root, name="second")

    def step(model: Any) -> Any:
        if way == "fused":
            return roundpipe.optim.SGD(model, lr=0.01)
        if way == "function":
            return model.step(lambda: None)
        return list(model.optim_parameters())

    optimizer = step(first)
    for other in (second, inner):
        with pytest.raises(ValueError, match="is stepped by first already"):
            step(other)
    del first, other
    third = AutoRoundPipe(root, name="third")
    if way == "fused":
        step(third)
    del optimizer
