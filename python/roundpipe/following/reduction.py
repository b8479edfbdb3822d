"""Finds what a model's loss averages over, and whether a row's outputs depend on the batch's other rows.

Both come from running the model's chain on a small batch, whole and cut by rows into two parts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.data.collate import count_label_tokens
from roundpipe.data.samples import IGNORED


class Reduction(enum.Enum):
    """The items that count equally in the loss of a batch."""

    LABELS_BUT_FIRST = "labels that are not ignored, but the first of a row, which nothing predicts"
    LABELS = "labels that are not ignored"
    ATTENDED_LABELS = "labels that are not ignored, of tokens that are attended to"
    ATTENDED = "tokens that are attended to"
    ROWS = "rows"
    SUM = "the losses of its parts: they add up"


LABEL_NAMES = ("labels", "shift_labels", "start_positions", "end_positions")

_TRIED = (
    Reduction.LABELS,
    Reduction.LABELS_BUT_FIRST,
    Reduction.ATTENDED_LABELS,
    Reduction.ATTENDED,
    Reduction.ROWS,
    Reduction.SUM,
)
_OF_LABELS = (Reduction.LABELS, Reduction.LABELS_BUT_FIRST, Reduction.ATTENDED_LABELS)


def asks_for_loss(arguments: dict[str, Any]) -> bool:
    """Whether a call's arguments include something that a loss is computed from."""
    return bool(arguments.get("return_loss")) or any(
        arguments.get(name) is not None for name in arguments if name in LABEL_NAMES or name.endswith("labels")
    )


def rows_of(arguments: dict[str, Any]) -> int:
    """The number of rows of a call; 1 if it is unknown."""
    shapes = [value.shape for value in arguments.values() if isinstance(value, torch.Tensor) and value.dim()]
    return max((shape[0] for shape in shapes), default=1)


def count(reduction: Reduction, arguments: dict[str, Any]) -> int:
    """The number of counted items in one microbatch."""
    labels = arguments.get("labels")
    mask = arguments.get("attention_mask")
    if reduction in _OF_LABELS and isinstance(labels, torch.Tensor):
        if labels.is_floating_point():
            return labels.shape[0]
        if reduction is Reduction.ATTENDED_LABELS and isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
            return int(((labels != IGNORED) & (mask != 0)).sum())
        if reduction is Reduction.LABELS_BUT_FIRST and labels.dim() > 1:
            return count_label_tokens(labels)
        return int((labels != IGNORED).sum())
    if reduction is Reduction.ATTENDED:
        if isinstance(mask, torch.Tensor):
            return int(mask.sum())
        return labels.numel() if isinstance(labels, torch.Tensor) else rows_of(arguments)
    return 1 if reduction is Reduction.SUM else rows_of(arguments)


def positions_are_inside(arguments: dict[str, Any]) -> bool:
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


def find_reduction(
    losses: Callable[[dict[str, Any]], tuple[Any, list[Any]]], parts: list[dict[str, Any]], exactness: float
) -> Reduction | None:
    """Returns the reduction that makes the loss of the whole from the losses of its parts; None if none does.

    Args:
        losses: losses of the whole batch and of its parts, and the same with other arguments in the parts' rows.
        parts: the arguments of each part.
        exactness: largest relative difference that rounding makes.
    """
    whole, each = losses({})
    if not isinstance(whole, torch.Tensor) or whole.numel() != 1 or not all(map(_is_number, (whole, *each))):
        return None
    fitting = [
        reduction
        for reduction in _TRIED
        if _close(_combined(each, weights(reduction, [count(reduction, part) for part in parts])), whole, exactness)
    ]
    if Reduction.ROWS in fitting and Reduction.LABELS in fitting:
        return _ignoring(losses, parts, exactness)
    return fitting[0] if fitting else None


def _ignoring(
    losses: Callable[[dict[str, Any]], tuple[Any, list[Any]]], parts: list[dict[str, Any]], exactness: float
) -> Reduction:
    """Whether a row with an ignored label counts, if labels are classes."""
    labels = parts[0].get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.shape[0] < 2:
        return Reduction.ROWS
    changed = labels.clone()
    changed[0] = IGNORED
    try:
        whole, each = losses({"labels": [changed, *(part["labels"] for part in parts[1:])]})
    except (IndexError, RuntimeError, ValueError):
        return Reduction.ROWS
    arguments = [{**parts[0], "labels": changed}, *parts[1:]]
    by_labels = weights(Reduction.LABELS, [count(Reduction.LABELS, each) for each in arguments])
    return Reduction.LABELS if _close(_combined(each, by_labels), whole, exactness) else Reduction.ROWS


def _is_number(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor) and bool(loss.isfinite().all())


def _combined(losses: list[Any], by: list[float]) -> float:
    return sum(float(loss) * weight for loss, weight in zip(losses, by, strict=True) if weight)


def _close(value: float, expected: Any, exactness: float) -> bool:
    return abs(value - float(expected)) <= exactness * max(1.0, abs(float(expected)))


def mixing(whole: Any, part: Any, rows: int, part_rows: int, exactness: float) -> str | None:
    """Returns a sign that a row's outputs depend on other rows; None if there is none.

    Args:
        whole: outputs of a batch.
        part: outputs of its first rows alone.
        rows: number of rows of the batch.
        part_rows: number of rows of the part.
        exactness: largest difference that rounding makes, relative to the largest value.
    """
    named = pytree.tree_flatten_with_path(whole)[0]
    others = pytree.tree_leaves(part)
    if len(named) != len(others):
        return "its outputs have another structure"
    for (path, mine), theirs in zip(named, others, strict=True):
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor) or mine.dim() == 0:
            continue
        place = pytree.keystr(path)
        if mine.shape[0] % rows:
            if mine.shape == theirs.shape and torch.equal(mine, theirs):
                continue  # it belongs to the model, not to the batch
            return f"output{place} {tuple(mine.shape)} has no dimension of rows"
        expected = mine[: mine.shape[0] // rows * part_rows]
        if expected.shape != theirs.shape:
            return f"output{place} of {part_rows} rows alone is {tuple(theirs.shape)}, not {tuple(expected.shape)}"
        scale = float(mine.float().nan_to_num(posinf=0, neginf=0).abs().max()) if mine.numel() else 0.0
        if mine.is_floating_point() and not torch.allclose(
            expected.float(), theirs.float(), rtol=0, atol=exactness * max(scale, 1e-6), equal_nan=True
        ):
            return f"output{place} of a row changes with the batch's other rows"
    return None
