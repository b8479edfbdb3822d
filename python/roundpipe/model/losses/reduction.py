"""The items that count equally in a model's loss, and how many of them a microbatch has."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.data.collate import count_label_tokens
from roundpipe.data.labels import names_label
from roundpipe.data.samples import IGNORED


class Reduction(enum.Enum):
    """The items that count equally in the loss of a batch."""

    LABELS = "labels that are not ignored"
    LABELS_BUT_FIRST = "labels that are not ignored, but the first of a row, which nothing predicts"
    ATTENDED_LABELS = "labels that are not ignored, of tokens that are attended to"
    ATTENDED_LABELS_BUT_FIRST = "the same, but the first of a row, which nothing predicts"
    ATTENDED = "tokens that are attended to"
    ROWS = "rows"
    SUM = "the losses of its parts: they add up"


_ATTENDED = (Reduction.ATTENDED_LABELS, Reduction.ATTENDED_LABELS_BUT_FIRST)
_BUT_FIRST = (Reduction.LABELS_BUT_FIRST, Reduction.ATTENDED_LABELS_BUT_FIRST)
_OF_LABELS = (Reduction.LABELS, *_BUT_FIRST, *_ATTENDED)
OF_MASK = (*_ATTENDED, Reduction.ATTENDED)
"""Those that an attention mask changes."""
# Further arguments that change which labels count.
_OPTIONS = ("ignore_index",)


@dataclass(frozen=True)
class LossForm:
    """Which arguments of a call its loss may depend on, apart from `num_items_in_batch`.

    Attributes:
        labels: the names of the labels, and whether they are numbers (instead of classes or tokens).
        is_masked: whether the call has an attention mask.
    """

    labels: frozenset[tuple[str, bool]]
    is_masked: bool

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> LossForm:
        """The form of a call with these arguments."""
        given = {name: value for name, value in arguments.items() if value is not None}
        names = [name for name in given if names_label(name) or name in _OPTIONS]
        labels = ((name, torch.is_tensor(given[name]) and given[name].is_floating_point()) for name in names)
        return LossForm(frozenset(labels), "attention_mask" in given)


@dataclass(frozen=True)
class FoundLoss:
    """What was found out about the losses of calls of one form.

    Attributes:
        reduction: what the loss averages over.
        honours_items: whether the loss is a sum divided by `num_items_in_batch`, if that is given; False if it is not
            read; None if that is not known.
    """

    reduction: Reduction
    honours_items: bool | None = None


def asks_for_loss(arguments: Mapping[str, Any]) -> bool:
    """Whether a call's arguments include something that a loss is computed from."""
    return bool(arguments.get("return_loss")) or any(
        value is not None and names_label(name) for name, value in arguments.items()
    )


def rows_of(arguments: Mapping[str, Any]) -> int:
    """The number of rows of a call; 1 if it is unknown."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.dim()}
    labels = [value.shape[0] for name, value in tensors.items() if names_label(name)]
    return max(labels or (value.shape[0] for value in tensors.values()), default=1)


def count(reduction: Reduction, arguments: Mapping[str, Any]) -> int | None:
    """The number of counted items in one microbatch; None if they cannot be counted in such arguments."""
    labels = arguments.get("labels")
    mask = arguments.get("attention_mask")
    if isinstance(arguments.get("shift_labels"), torch.Tensor):
        labels = arguments["shift_labels"]
    if reduction is Reduction.SUM:
        return 1
    if reduction in _OF_LABELS and isinstance(labels, torch.Tensor):
        if labels.is_floating_point():
            return labels.shape[0]
        if reduction in _ATTENDED and mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.shape != labels.shape:
                return None
            labels = labels.masked_fill(mask == 0, IGNORED)
        if reduction in _BUT_FIRST and labels.dim() > 1:
            return count_label_tokens(labels)
        return int((labels != IGNORED).sum())
    if reduction is Reduction.ATTENDED:
        if mask is not None:
            return int((mask != 0).sum()) if isinstance(mask, torch.Tensor) and mask.dim() <= 2 else None
        return labels.numel() if isinstance(labels, torch.Tensor) else rows_of(arguments)
    return rows_of(arguments)


def positions_are_inside(arguments: Mapping[str, Any]) -> bool:
    """Whether every start and end position lies inside its row; a position outside would not count."""
    length = next((t.shape[1] for n in ("input_ids", "inputs_embeds") if (t := arguments.get(n)) is not None), None)
    positions = [arguments.get(name) for name in ("start_positions", "end_positions")]
    return length is None or all(p is None or bool((p < length).all()) for p in positions)


def weights(reduction: Reduction, counts: list[int]) -> list[float]:
    """The weight of each part's loss in the loss of the whole."""
    if reduction is Reduction.SUM:
        return [1.0] * len(counts)
    total = sum(counts)
    return [each / total if total else 0.0 for each in counts]
