"""Checks the arguments of `forward_backward` and its siblings before any work is done."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.following.layers.adapters import without_adapters
from roundpipe.model.call_hooks import refuse_hooked
from roundpipe.model.forward import refuse_assigned

if TYPE_CHECKING:
    from roundpipe.model.call.run_config import ResolvedRunConfig
    from roundpipe.model.facade import ModelFacade

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # original models whose eval mode has been warned about


def check_step_call(model: ModelFacade, where: str, input_args: Any, unknown: Mapping[str, Any]) -> None:
    """Refuses calls with unclear arguments, and warns once about a model that trains in eval mode.

    Args:
        where: the method that is called.
        input_args: its first argument.
        unknown: keyword arguments that the method does not have.

    Raises:
        ValueError: the inputs are not given as `input_args` or `input_kwargs`, gradients are off, or `model.forward`
            was assigned.
    """
    if unknown:
        names = ", ".join(unknown)
        raise ValueError(
            f"[{where}] got the keyword arguments {names}, which are not its own; expected the model's in a dict: "
            f"{where}(input_kwargs=batch)"
        )
    if isinstance(input_args, Mapping):
        raise ValueError(
            f"[{where}] the first argument is a {type(input_args).__name__}, expected a tuple of positional arguments; "
            f"for the model's keyword arguments write {where}(input_kwargs=batch), for a dict as its only argument "
            f"{where}((batch,))"
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            f"[{where}] gradients are off here (torch.no_grad or inference_mode), expected them on, as {where} makes "
            "them; leave that block, or call model(...) for outputs alone"
        )
    refuse_assigned(model, where)
    refuse_hooked(model, where)
    original = model._original_model
    if not _trains(original) and original not in _told:
        _told.add(original)
        warnings.warn(
            f"[{where}] the model is in eval mode, so dropout is off (from_pretrained returns it so); call "
            "model.train() before training",
            stacklevel=3,
        )


def check_gradients(config: ResolvedRunConfig, where: str) -> None:
    """Raises ValueError if a call that makes gradients has options that turn them off."""
    if not config.requires_grad:
        raise ValueError(
            f"[{where}] the run configuration says requires_grad=False, expected True or None, as {where} makes "
            "gradients; call model(...) for outputs alone"
        )


def _trains(model: Any) -> bool:
    """Whether a model, and the model inside it if peft wrapped it, are in training mode."""
    return bool(model.training and without_adapters(model).training)
