"""Layers that draw random numbers, the documented loop around them, and a user who draws beside both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from roundpipe import RoundPipe

WIDTH = 16
MICROBATCHES = 4


class MayCheckpoint(nn.Module):
    """Calls `draw`, in a checkpoint where asked to: "plain" or "reentrant"."""

    def __init__(self, checkpointed: str = "", dropout: float = 0.4) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def draw(self, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self.draw(value)
        drawn = checkpoint(self.draw, value, use_reentrant=self.checkpointed == "reentrant")
        assert isinstance(drawn, torch.Tensor)
        return drawn


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (1 + 0.1 * torch.rand_like(gradient))


class Noisy(nn.Module):
    """Adds noise to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        noisy = _NoisyGradient.apply(self.linear(value))
        assert isinstance(noisy, torch.Tensor)
        return noisy


class _SeededBackward(torch.autograd.Function):
    """A layer boundary: seeds what the backward of the layer below draws from."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seed: int) -> torch.Tensor:
        ctx.seed = seed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        torch.manual_seed(ctx.seed)
        return gradient.clone(), None


def plain_loop(
    layers: nn.Sequential,
    model: RoundPipe,
    batch: torch.Tensor,
    calls: range,
    loss_fn: Callable[[torch.Tensor], torch.Tensor],
    device: str = "cpu",
) -> list[torch.Tensor]:
    """The documented loop on `device`; returns the loss of each call, on the host."""
    losses = []
    for call in calls:
        total = torch.zeros(())
        for m, part in enumerate(batch.tensor_split(MICROBATCHES)):
            hidden = part.to(device, copy=True)
            for index, layer in enumerate(layers):
                torch.manual_seed(model.layer_seed(call, m, index))
                hidden = layer(hidden)
                seed = model.layer_seed(call, m, index, backward=True)
                hidden = _SeededBackward.apply(hidden, seed)  # type: ignore[no-untyped-call]
            torch.manual_seed(model.layer_seed(call, m, len(layers)))
            loss = loss_fn(hidden)
            loss.backward()
            total = total + loss.detach().cpu()
        losses.append(total)
    return losses


@contextmanager
def drawing_all_the_time(device: str = "cpu", pause_s: float = 0) -> Iterator[None]:
    """A thread of the user that draws from, and seeds, the default generators."""
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(pause_s):
            torch.rand(3, device=device)
            torch.manual_seed(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
