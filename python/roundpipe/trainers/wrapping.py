"""Puts a trainer's plain model into the pipeline, cut into microbatches only where its loss is that of the batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from roundpipe.model.call.run_config import RoundPipeRunConfig
from roundpipe.model.pipe import RoundPipe
from roundpipe.model.wrap import wrap_model_to_roundpipe
from roundpipe.trainers.fused_head import make_followable


def into_pipeline(where: str, model: nn.Module, router_loss: bool = False) -> Any:
    """Wraps a model; its loss, as merged, is that of the whole batch. Draws no random numbers.

    Args:
        where: tags the messages.
        model: a plain one, on the host or on one device.
        router_loss: whether its caller asks for the router loss, whatever the model's config says.

    Raises:
        ValueError: the model is on several devices, its forward was assigned, or it cannot be wrapped.
    """
    make_followable(where, model)
    places = getattr(model, "hf_device_map", None)
    if places and any(str(place) != "cpu" for place in places.values()):
        raise ValueError(
            f"[{where}] the model was loaded with a device_map ({places}), expected all of it on the host; leave "
            "device_map out, as the pipeline moves layers to devices by itself"
        )
    whole = router_loss or _adds_router_loss(model)
    if whole:
        warnings.warn(
            f"[{where}] the model adds a router loss, which is one of the whole batch: a batch runs as one microbatch, "
            "and devices mostly wait for each other; output_router_logits=False leaves that loss out",
            stacklevel=5,
        )
    config = RoundPipeRunConfig(num_microbatch=1 if whole else None)
    # The caller's draws, such as the order of the rows, must not notice the sample batches of wrapping.
    with torch.random.fork_rng(devices=[]):
        wrapped: Any = wrap_model_to_roundpipe(model.to("cpu"), model_run_config=config, check_loss=False)
    if is_unfollowed(wrapped):
        wrapped.model_run_config.num_microbatch = 1  # the loss that it returns is not known to add up
    return wrapped


def is_unfollowed(model: Any) -> bool:
    """Whether a model is one pipeline as a whole, but not as a followed model: nobody knows what its loss averages."""
    return type(model) is RoundPipe and model._language_model is None


def _adds_router_loss(model: nn.Module) -> bool:
    """Whether the model's loss has a part that is no sum over rows or tokens: the balance of its experts."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return False
    return any(getattr(each, "output_router_logits", False) for each in (config, config.get_text_config()))
