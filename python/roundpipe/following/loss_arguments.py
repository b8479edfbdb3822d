"""Arguments of a followed model's call that decide its loss's weight and its other outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from roundpipe.call.run_config import ResolvedRunConfig
from roundpipe.data.microbatch import merge_outputs
from roundpipe.following.token_loss import loss_in

_Call = tuple[tuple[Any, ...], dict[str, Any]]


def is_part_of_a_sum(arguments: Mapping[str, Any]) -> bool:
    """Whether each microbatch's loss is a part of a sum, as in transformers: `num_items_in_batch` is given."""
    return arguments.get("num_items_in_batch") is not None


def leaves_loss_to_caller(arguments: Mapping[str, Any]) -> bool:
    """Whether the call asks for the log-probability of each label, as of TRL's fused head, and not for their mean."""
    return bool(arguments.get("fused_lm_head"))


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
