"""Layers that take time instead of computing."""

from __future__ import annotations

import torch
from torch import nn

from roundpipe.following.layers.values import split


class EmulatedLayer(nn.Module):
    """A layer that occupies its virtual device for a given time and returns its input.

    In a RoundPipe model on virtual devices, the real engine then schedules layers with a real model's durations, so
    eight devices can be measured on two cores. Outside a RoundPipe model, it is the identity.

    Args:
        forward_ms: duration of the forward of one microbatch, in ms.
        backward_ms: duration of the backward without the recompute, in ms.
        weight_bytes: size of the weights that are transferred; at least 4.
        update_ms: duration of a `roundpipe.optim` optimizer's update of the layer, in ms; 0 = a real update.
        gradient_bytes: size of the trained weights, at least 4; the others are frozen. None = all are trained.
    """

    def __init__(
        self,
        forward_ms: float,
        backward_ms: float,
        weight_bytes: int = 4,
        update_ms: float = 0.0,
        gradient_bytes: int | None = None,
    ) -> None:
        super().__init__()
        trained_bytes = weight_bytes if gradient_bytes is None else gradient_bytes
        if forward_ms < 0 or backward_ms < 0 or update_ms < 0 or not 4 <= trained_bytes <= weight_bytes:
            raise ValueError(
                f"[EmulatedLayer] got forward_ms={forward_ms}, backward_ms={backward_ms}, weight_bytes={weight_bytes}, "
                f"update_ms={update_ms}, gradient_bytes={gradient_bytes}; expected times of at least 0, at least 4 "
                "bytes, and no more gradients than weights"
            )
        self.forward_ms = forward_ms
        self.backward_ms = backward_ms
        self.update_ms = update_ms
        self.weight = nn.Parameter(torch.zeros(trained_bytes // 4))
        frozen = (weight_bytes - trained_bytes) // 4
        self.frozen = nn.Parameter(torch.zeros(frozen), requires_grad=False) if frozen else None

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The identity, `value` of any shape."""
        return value.clone()


class NativeEmulatedLayer:
    """Tells the engine to run an `EmulatedLayer` natively."""

    def __init__(self, module: EmulatedLayer, name: str) -> None:
        self.name = name
        self.emulated = module
        self.structure = split(torch.empty(0))[1]
