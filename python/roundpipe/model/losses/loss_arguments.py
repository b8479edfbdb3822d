"""Arguments of a transformers model's call that decide its loss's weight and its other outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from roundpipe.data.microbatch import merge_outputs
from roundpipe.following.layers.adapters import without_adapters
from roundpipe.model.call.run_config import ResolvedRunConfig
from roundpipe.model.losses.ending import loss_in
from roundpipe.model.losses.reduction import asks_for_loss

_Call = tuple[tuple[Any, ...], dict[str, Any]]

TOKEN_LOSSES = "roundpipe_token_losses"
"""An argument of a causal language model's call: its loss is that of each token, [rows, tokens], 0 where the label
behind the token does not count."""


def is_part_of_a_sum(arguments: Mapping[str, Any]) -> bool:
    """Whether each microbatch's loss is a part of a sum, as in transformers: `num_items_in_batch` is given."""
    return arguments.get("num_items_in_batch") is not None


def asks_for_router_loss(config: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the loss has a part that is no sum over tokens: the balance of a model's experts.

    Args:
        config: the model's.
        arguments: of the call.
    """
    asked = arguments.get("output_router_logits")
    if asked is not None:
        return bool(asked)
    return any(getattr(each, "output_router_logits", False) for each in (config, config.get_text_config()))


def leaves_loss_to_caller(arguments: Mapping[str, Any]) -> bool:
    """Whether the call asks for the log-probability or the loss of each label and not for their mean: of TRL's fused
    head, or by `TOKEN_LOSSES`."""
    return bool(arguments.get("fused_lm_head")) or bool(arguments.get(TOKEN_LOSSES))


def adding_losses(config: ResolvedRunConfig) -> ResolvedRunConfig:
    """The options of a call whose losses are parts of a sum: merging adds them."""
    return replace(config, merge_output=_merge_adding_losses) if config.merge_output is True else config


def _merge_adding_losses(outputs: list[Any]) -> Any:
    merged = merge_outputs(outputs)
    losses = [loss_in(output) for output in outputs]
    if len(outputs) == 1 or not all(isinstance(loss, torch.Tensor) for loss in losses):
        return merged
    total = torch.stack(losses).sum()
    if isinstance(merged, tuple):
        return (total, *merged[1:])
    merged["loss"] = total
    return merged


def take_return_logits(calls: list[_Call], known: Mapping[str, Any]) -> tuple[list[_Call], bool]:
    """Removes `return_logits` from the arguments of each microbatch, and returns whether it was False.

    Args:
        calls: `(args, kwargs)` of each microbatch.
        known: the model's own arguments; if `return_logits` is one of them, it stays.
    """
    if "return_logits" in known or not any("return_logits" in kwargs for _, kwargs in calls):
        return calls, False
    unwanted = any(not kwargs.get("return_logits", True) for _, kwargs in calls)
    return [(args, {k: v for k, v in kwargs.items() if k != "return_logits"}) for args, kwargs in calls], unwanted


def take_token_losses(calls: list[_Call]) -> tuple[list[_Call], bool]:
    """Removes `TOKEN_LOSSES` from the arguments of each microbatch, and returns whether it was there and true."""
    asked = any(kwargs.get(TOKEN_LOSSES) for _, kwargs in calls)
    return [(args, {k: v for k, v in kwargs.items() if k != TOKEN_LOSSES}) for args, kwargs in calls], asked


def cut_of_own_loss(
    model: nn.Module, number: int, is_default: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """The number of microbatches of a call whose outputs are merged: 1 if the model itself computes a loss.

    Losses are merged to their mean, which is not the batch's loss if microbatches have different numbers of labels, or
    if the loss is a sum divided by `num_items_in_batch`.

    Args:
        model: what the pipeline stands for.
        number: of microbatches that were planned.
        is_default: whether that is the default instead of the user's choice.

    Raises:
        ValueError: the user asked for more than one.
    """
    if number == 1 or not _is_of_transformers(model):
        return number
    named = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
    if not asks_for_loss({**named, **kwargs}):
        return number
    if is_default:
        return 1
    raise ValueError(
        f"[forward] the batch of {type(model).__name__} cannot be cut into {number} microbatches: the model is not "
        "followed, so what its loss is the mean of is not known; set num_microbatch=1, leave labels out, or give "
        "merge_output, which then makes the loss"
    )


def _is_of_transformers(model: nn.Module) -> bool:
    """Without importing transformers, which takes seconds."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(without_adapters(model), transformers.PreTrainedModel)
