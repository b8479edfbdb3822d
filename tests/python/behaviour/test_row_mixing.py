"""Models that normalise over a batch's rows: one warning when they are wrapped, in every way of wrapping."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe


class Block(nn.Module):
    """A residual block, pictures [batch, channels, height, width] -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.convolution(x)).relu()


class PictureClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def followed() -> nn.Module:
    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2]))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "chain": (chain, RoundPipe),
    "chain wrapped": (chain, wrap_model_to_roundpipe),
    "part by part": (PictureClassifier, wrap_model_to_roundpipe),
    "every part": (PictureClassifier, lambda model, **options: wrap_model_to_roundpipe(model, None, 0, 0, **options)),
    "followed": (followed, wrap_model_to_roundpipe),
    "not followed": (followed, lambda model, **options: wrap_model_to_roundpipe(model, False, **options)),
}


def said(wrap: Callable[..., Any], model: nn.Module, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(model, **options)
    return [str(warning.message) for warning in caught if "normalises over the rows" in str(warning.message)]


@pytest.mark.parametrize("way", WAYS)
def test_batch_normalisation_is_named_once(way: str) -> None:
    make, wrap = WAYS[way]
    (message,) = said(wrap, make())
    assert "has BatchNorm" in message and "num_microbatch=1 in model_run_config" in message
    assert not said(wrap, make(), model_run_config=RoundPipeRunConfig(num_microbatch=1))


def test_without_batch_normalisation_nothing_is_said() -> None:
    assert not said(RoundPipe, nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


@pytest.mark.parametrize("thresholds", [{}, {"lower_threshold": 0, "upper_threshold": 0}])
def test_one_microbatch_is_the_plain_model(thresholds: dict[str, int]) -> None:
    torch.manual_seed(0)
    roundpipe.devices("virtual:2")
    model = PictureClassifier()
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1), **thresholds)
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    loss = wrapped.forward_backward((x,), label=y, loss_fn=nn.functional.cross_entropy)
    wrapped.synchronize()
    expected = nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(model.stem[1].running_mean, plain.stem[1].running_mean)
