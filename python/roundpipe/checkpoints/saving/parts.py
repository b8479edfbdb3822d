"""What a training consists of, as the engine's checkpoints take it."""

from __future__ import annotations

from typing import Any

import torch

from roundpipe import _core
from roundpipe.device.pool import devices
from roundpipe.model.call.run_config import resolve
from roundpipe.model.facade import ModelFacade
from roundpipe.model.step.fused_optimizer import BoundOptimizer
from roundpipe.model.step.fused_steps import FusedSteps


def models_of(model: ModelFacade, auto_is_open: bool = False) -> list[_core.TrainedModel]:
    """The models in the pipeline.

    Args:
        model: the whole model.
        auto_is_open: a number of microbatches that "auto" has chosen may be another one.
    """
    return [
        _core.TrainedModel(
            path=path,
            pipeline=pipe._pipeline,
            name=_attributes(pipe)["_name"],
            microbatches=_microbatches(pipe, auto_is_open),
            chunk_logit_bytes=_chunk_logit_bytes(pipe),
            arithmetic=_arithmetic(pipe),
        )
        for path, pipe in model._step_group.models.pipes()
    ]


def optimizer_of(model: ModelFacade, optimizer: Any, with_options: bool) -> _core.TrainedOptimizer:
    """An optimizer's class, the format of its moments, and its groups.

    Args:
        model: what it steps.
        optimizer: the engine's or torch's.
        with_options: what the groups say beside their parameters.
    """
    moments = optimizer.format_name if isinstance(model._step_group, FusedSteps) else "torch"
    left_out = ("params", "param_names")
    groups = [
        (
            {key: value for key, value in group.items() if key not in left_out} if with_options else None,
            group["params"],
        )
        for group in optimizer.param_groups
    ]
    return _core.TrainedOptimizer(type(optimizer).__name__, moments, groups)


def fused_of(optimizer: Any) -> _core.FusedOptimizer:
    """The engine's part of an optimizer that was made for a model."""
    return _core.FusedOptimizer(optimizer.binding, optimizer.algorithm, optimizer.core_format, optimizer.core_groups())


def require_own_optimizer(model: ModelFacade, optimizer: Any) -> None:
    """Raises ValueError for an optimizer that is to be saved or loaded with a model if it is none, or not this model's;
    or if it is None, and a fused one steps the model."""
    group = model._step_group
    if optimizer is None:
        if isinstance(group, FusedSteps):
            raise ValueError(
                "[checkpoint] the model has a roundpipe.optim optimizer and none was given, expected it as the third "
                "argument, since its state belongs to the training"
            )
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"[checkpoint] optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if isinstance(group, FusedSteps):
        if not isinstance(optimizer, BoundOptimizer) or optimizer.binding is not group.binding:
            raise ValueError(
                "[checkpoint] the optimizer was not made for this model (or another one was made since), expected the "
                "one that steps it"
            )
        return
    if group.nodes is not None:
        raise ValueError(
            f"[checkpoint] {type(optimizer).__name__} of torch does not step a model that {group.nodes.size} nodes "
            "train, expected an optimizer of roundpipe.optim, or none"
        )


def _attributes(pipe: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(pipe, "__dict__")
    return attributes


def _microbatches(pipe: Any, auto_is_open: bool) -> int | None:
    """The number of microbatches in force; None while it is still to be chosen."""
    chosen = None if auto_is_open else pipe._auto_microbatches
    config = resolve(None, pipe._run_config, devices=len(devices()), chosen=chosen)
    return None if config.num_microbatch_is_open else config.num_microbatch


def _chunk_logit_bytes(pipe: Any) -> int | None:
    """Bytes of logits in a chunk of the loss; None if it does not choose its chunks."""
    followed = _attributes(pipe).get("_language_model")
    return None if followed is None else followed.chunk_logit_bytes(devices().torch_devices[0])


def _arithmetic(pipe: Any) -> str:
    """In which what is native of a followed model computes; "" for others."""
    followed = _attributes(pipe).get("_language_model")
    return "" if followed is None else followed.arithmetic or ""
