"""Cuts a batch of text and pictures by rows: a row's pictures are those that its placeholder tokens stand for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Split = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[tuple[Any, ...]], list[dict[str, Any]]]]


@dataclass(frozen=True)
class _Kind:
    """Names of the arguments that come with a kind of picture."""

    tokens: tuple[str, ...]
    values: str
    grid: str
    others: tuple[str, ...] = ()


_KINDS = (
    _Kind(("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw", ("image_sizes",)),
    _Kind(("video_token_id", "video_token_index"), "pixel_values_videos", "video_grid_thw"),
)


def picture_splitting(config: Any, kwargs: dict[str, Any]) -> Split | None:
    """Returns the cut of a call with pictures. None without pictures, or if every row has equally many, in their own
    dimension.

    Args:
        config: of the model.
        kwargs: of the call.
    """
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return None
    present = [kind for kind in _KINDS if isinstance(kwargs.get(kind.values), torch.Tensor)]
    present = [kind for kind in present if kwargs[kind.values].dim() < 5 or len(kwargs[kind.values]) != len(ids)]
    if not present or all(_token(config, kind) is None for kind in present):
        return None

    def split(
        args: tuple[Any, ...], named: dict[str, Any], number: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        rows = torch.arange(len(ids)).tensor_split(number)
        parts: list[dict[str, Any]] = [{} for _ in rows]
        taken: set[str] = set()
        for kind in present:
            counts = _pictures_of_rows(config, kind, ids, named)
            sizes = [int(counts[part].sum()) for part in rows]
            for name, pieces in _cut(kind, named, sizes).items():
                taken.add(name)
                for part, piece, size in zip(parts, pieces, sizes, strict=True):
                    if size:
                        part[name] = piece
        for name, value in named.items():
            if name not in taken:
                for part, piece in zip(parts, _of_rows(value, len(ids), rows), strict=True):
                    part[name] = piece
        return [args] * number, parts

    return split


def _token(config: Any, kind: _Kind) -> int | None:
    return next((token for name in kind.tokens if isinstance(token := getattr(config, name, None), int)), None)


def _of_rows(value: Any, rows: int, parts: tuple[torch.Tensor, ...]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        # Rotary positions of pictures have a dimension before the rows.
        dim = next((dim for dim in range(min(2, value.dim())) if value.shape[dim] == rows), None)
        if dim is not None:
            return [value.narrow(dim, int(part[0]), len(part)) for part in parts]
    return [value] * len(parts)


def _pictures_of_rows(config: Any, kind: _Kind, ids: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
    """The number of pictures in each row."""
    marks = torch.eq(ids, _token(config, kind) or 0)
    tokens = marks.sum(1)
    grid, values = named.get(kind.grid), named[kind.values]
    pictures = len(values) if grid is None else len(grid)
    if grid is not None:
        merged = getattr(getattr(config, "vision_config", config), "spatial_merge_size", 1) ** 2
        ends = (grid.prod(1) // merged).cumsum(0).tolist()
        return _counted(tokens, [0, *ends], kind)
    starts = marks.clone()
    starts[:, 1:] &= ~marks[:, :-1]
    if int(starts.sum()) == pictures:
        return starts.sum(1)
    each = int(tokens.sum()) // max(pictures, 1)
    return _counted(tokens, [each * number for number in range(pictures + 1)], kind)


def _counted(tokens: torch.Tensor, ends: list[int], kind: _Kind) -> torch.Tensor:
    """The number of pictures in each row; `ends` are the positions where rows end among all rows' tokens."""
    places = [0, *tokens.cumsum(0).tolist()]
    if any(place not in ends for place in places):
        raise ValueError(
            f"[forward] the pictures of '{kind.values}' cannot be told apart by rows: rows have {tokens.tolist()} "
            f"tokens for them, and they take {[b - a for a, b in itertools.pairwise(ends)]}; set "
            "num_microbatch=1, or give split_input a function"
        )
    return torch.tensor([ends.index(b) - ends.index(a) for a, b in itertools.pairwise(places)])


def _cut(kind: _Kind, named: dict[str, Any], sizes: list[int]) -> dict[str, list[Any]]:
    """The values that belong to pictures, by name, cut into the given numbers of pictures for each microbatch."""
    values, grid = named[kind.values], named.get(kind.grid)
    found: dict[str, list[Any]] = {}
    for name in (kind.grid, *kind.others):
        if isinstance(named.get(name), torch.Tensor):
            found[name] = list(named[name].split(sizes))
    patches = sizes
    if grid is not None and len(values) != len(grid):
        patches = [int(part.prod(1).sum()) for part in grid.split(sizes)]
    found[kind.values] = list(values.split(patches))
    return found
