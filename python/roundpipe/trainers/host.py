"""Keeps accelerate from moving or replacing a model in the pipeline, and gives it the precision that it asks for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from roundpipe.device.pool import devices
from roundpipe.model.facade import ModelFacade

if TYPE_CHECKING:
    from accelerate import Accelerator

_USE_CPU = "ACCELERATE_USE_CPU"  # read by accelerate and transformers
MIXED = {"bf16": torch.bfloat16}


@contextmanager
def loading_on_host() -> Iterator[None]:
    """Makes a trainer that loads a model by its name, with arguments of its own, load it on the host."""
    before = os.environ.get(_USE_CPU)
    os.environ[_USE_CPU] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_USE_CPU]
        else:
            os.environ[_USE_CPU] = before


def is_in_pipeline(model: Any) -> bool:
    """Whether `model` itself is a model in the pipeline."""
    return issubclass(type(model), ModelFacade)


def original_of(model: Any) -> Any:
    """The model that a model in the pipeline stands for; any other model itself."""
    return model._original_model if is_in_pipeline(model) else model


def prepare_on_host(accelerator: Accelerator, later: Callable[[nn.Module], bool]) -> None:
    """Makes `accelerator.prepare` leave models in the pipeline, and those that will be, where they are.

    Mixed precision means the same as for a plain model: its forward runs under autocast and returns fp32 values.

    Args:
        accelerator: of one trainer.
        later: whether a plain model is put into the pipeline after it was prepared.
    """
    original = accelerator.prepare_model

    def prepare_model(
        model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if is_in_pipeline(model):
            if all(model is not known for known in accelerator._models):
                accelerator._models.append(model)
            compute_in(model, accelerator.mixed_precision)
            return model
        if later(model):
            return model
        prepared: nn.Module = original(model, device_placement, evaluation_mode)
        return prepared

    accelerator.prepare_model = prepare_model


def compute_in(model: Any, precision: str) -> None:
    """Gives the model's forward accelerate's mixed precision, on all devices that run its layers."""
    if precision in MIXED and "forward" not in vars(model):
        model.forward = convert_outputs_to_fp32(_autocast(MIXED[precision])(model.forward))


def _autocast(dtype: torch.dtype) -> Callable[[Any], Any]:
    def with_autocast(forward: Any) -> Any:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with autocasting(dtype):
                return forward(*args, **kwargs)

        return call

    return with_autocast


@contextmanager
def autocasting(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast on the host and on the kinds of devices that there are; nothing for None."""
    with ExitStack() as stack:
        if dtype is not None:
            for kind in {"cpu", *(torch.device(name).type for name in devices().torch_devices)}:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


@contextmanager
def steps_in(model: Any, precision: str) -> Iterator[None]:
    """Lets `model.forward_backward` run with the precision that `compute_in` gave to the model's forward."""
    forward = vars(model).pop("forward", None)
    try:
        with autocasting(MIXED.get(precision)):
            yield
    finally:
        if forward is not None:
            model.forward = forward


@contextmanager
def generating_in(model: Any, precision: str) -> Iterator[None]:
    """Lets `model.generate` run with the precision that accelerate gives to a plain model's forward."""
    if precision not in MIXED:
        yield
        return
    original = original_of(model)
    original.generate = _autocast(MIXED[precision])(original.generate)
    try:
        yield
    finally:
        del original.generate
