"""Adapts the user's loss function to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe.layers.shell import holding_nothing


def as_losses(value: Any) -> list[Any]:
    """Returns the result of a loss function, one loss or several, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def outputs_as_loss(outputs: Any, label: Any) -> Any:
    """The default loss function: the model's outputs are the losses."""
    return outputs


class OwnLoss:
    """The loss among a model's outputs as a loss function: a part of the batch's loss.

    Args:
        loss_in: finds the loss; None if there is none.
        parts: the number of microbatches whose losses are averaged.
    """

    def __init__(self, loss_in: Callable[[Any], Any], parts: int) -> None:
        self._loss_in = loss_in
        self.parts = parts

    def __call__(self, outputs: Any, label: Any) -> torch.Tensor:
        value = self._loss_in(outputs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ValueError(
                "[forward_backward] the model returned no loss, expected one; give labels in input_kwargs, or a loss_fn"
            )
        return value if self.parts == 1 else value / self.parts


class MicrobatchLoss:
    """The function that the engine calls with `(tensors, structure)` pairs for the losses of one microbatch.

    Args:
        loss_fn: the user's loss function.

    Attributes:
        is_single: whether `loss_fn` returned one loss instead of a list. Set by calls.
        own_parts: `OwnLoss.parts`, with which the engine makes the loss of a native head itself; None for others.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self._loss_fn = loss_fn
        self.own_parts = loss_fn.parts if isinstance(loss_fn, OwnLoss) else None
        self.is_single = True

    def __call__(self, outputs: Any, label: Any, context: Any) -> list[torch.Tensor]:
        with holding_nothing():
            result = self._loss_fn(outputs[1].join(outputs[0]), label[1].join(label[0]))
        self.is_single = not isinstance(result, (list, tuple))
        losses = as_losses(result)
        for loss in losses:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise ValueError(
                    f"[forward_backward] loss_fn returned {shape}, expected a scalar tensor or a list of them; "
                    "reduce the loss, for example with .mean()"
                )
        if not losses:
            raise ValueError("[forward_backward] loss_fn returned no loss, expected at least one")
        return losses
