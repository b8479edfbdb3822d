"""Adapts the user's loss function to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roundpipe import _core
from roundpipe.layers.shell import holding_nothing

NAN_LOSS = (
    "[forward_backward] the loss{} is NaN; the batch's gradients are dropped; check the data, lower the "
    "learning rate, or pass check_loss=False to RoundPipe"
)


def as_losses(value: Any) -> list[Any]:
    """Returns the result of a loss function, one loss or several, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run_loss(loss_fn: Callable[[Any, Any], Any], single: list[bool], check: bool) -> Callable[..., list[torch.Tensor]]:
    """Returns the function that the engine calls with `(tensors, structure)` pairs for the losses of one microbatch.

    Args:
        single: a list of one entry, set to whether `loss_fn` returned one loss instead of a list.
        check: refuse a NaN loss.
    """

    def run(outputs: Any, label: Any, context: Any) -> list[torch.Tensor]:
        with holding_nothing():
            result = loss_fn(outputs[1].join(outputs[0]), label[1].join(label[0]))
        single[0] = not isinstance(result, (list, tuple))
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
        if check and any(bool(loss.isnan()) for loss in losses):
            raise _core.RoundPipeError(NAN_LOSS.format(""))
        return losses

    return run
