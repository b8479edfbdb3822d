"""Adapts the user's loss function to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from roundpipe import _core
from roundpipe.following.layers.shell import holding_nothing


class LossScaler(Protocol):
    """What a loss function needs of a `GradScaler`."""

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses."""

    def loss_scale(self) -> _core.LossScale | None:
        """For losses that the engine makes itself; None: they are not scaled."""


def as_losses(value: Any) -> list[Any]:
    """Returns the result of a loss function, one loss or several, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def outputs_as_loss(outputs: Any, label: Any) -> Any:
    """The default loss function: the model's outputs are the losses."""
    return outputs


class ScaledOutputs:
    """`outputs_as_loss` times the scale of a scaler: for a model whose own loss is to be scaled.

    Args:
        scaler: None: the loss is not scaled.
        any_rows: a batch may have nothing of what is trained, such as pictures: its loss counts, and has no gradient.
    """

    def __init__(self, scaler: LossScaler | None, any_rows: bool = False) -> None:
        self.scaler, self.any_rows = scaler, any_rows

    def __call__(self, outputs: Any, label: Any) -> Any:
        return outputs if self.scaler is None else self.scaler.scale(outputs)


def is_own_loss(loss_fn: Callable[[Any, Any], Any]) -> bool:
    """Whether a loss function leaves the loss to the model."""
    return loss_fn is outputs_as_loss or isinstance(loss_fn, ScaledOutputs)


class OwnLoss:
    """The loss among a model's outputs as a loss function: a part of the batch's loss.

    Args:
        loss_in: finds the loss; None if there is none.
        parts: the number of microbatches whose losses are averaged.
        scaler: scales the part.
        any_rows: see `ScaledOutputs`.
    """

    def __init__(
        self, loss_in: Callable[[Any], Any], parts: int, scaler: LossScaler | None = None, any_rows: bool = False
    ) -> None:
        self._loss_in, self._scaler = loss_in, scaler
        self.parts, self.any_rows = parts, any_rows
        self.scale = None if scaler is None else scaler.loss_scale()

    def __call__(self, outputs: Any, label: Any) -> torch.Tensor:
        value = self._loss_in(outputs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ValueError(
                "[forward_backward] the model returned no loss, expected one; give labels in input_kwargs, or a loss_fn"
            )
        part = value if self.parts == 1 else value / self.parts
        if self.any_rows and not part.requires_grad:
            part = part.detach().requires_grad_()  # a leaf, whose backward does nothing
        return part if self._scaler is None else self._scaler.scale(part)


class MicrobatchLoss:
    """The function that the engine calls with `(tensors, structure)` pairs for the losses of one microbatch.

    Args:
        loss_fn: the user's loss function.

    Attributes:
        is_single: whether `loss_fn` returned one loss instead of a list. Set by calls.
        own_parts: `OwnLoss.parts`, with which the engine makes the loss of a native head itself; None for others, and
            for a loss of any rows.
        own_scale: `OwnLoss.scale`, by which it multiplies that loss; None for others, and if it is not scaled.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self._loss_fn = loss_fn
        own = loss_fn if isinstance(loss_fn, OwnLoss) else None
        self.own_parts = None if own is None or own.any_rows else own.parts
        self.own_scale = None if own is None else own.scale
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
                    "reduce it by .sum() / the rows of the whole batch, since the losses of microbatches are added"
                )
        if not losses:
            raise ValueError("[forward_backward] loss_fn returned no loss, expected at least one")
        return losses
