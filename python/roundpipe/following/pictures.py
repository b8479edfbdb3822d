"""Cuts a batch of text and pictures by rows: a row's pictures are those that its placeholder tokens stand for.

Videos and sounds are pictures, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.data.labels import names_label

Split = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[tuple[Any, ...]], list[dict[str, Any]]]]
Name = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class _Kind:
    """Names of the arguments that come with a kind of picture.

    Attributes:
        tokens: the config's name of the token that stands for a part of a picture.
        values: of the pictures, or of their patches.
        grid: the number of patches of each picture, in three directions.
        others: further arguments with an entry for each picture.
    """

    tokens: tuple[str, ...]
    values: str
    grid: str
    others: tuple[str, ...]


_IMAGE = _Kind(("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw", ("image_sizes",))
_VIDEO = _Kind(
    ("video_token_id", "video_token_index"),
    "pixel_values_videos",
    "video_grid_thw",
    ("second_per_grid_ts", "video_second_per_grid", "image_sizes_videos"),
)
_SOUND = _Kind(
    ("audio_token_id", "audio_token_index"),
    "input_features",
    "",
    ("feature_attention_mask", "input_features_mask", "audio_feature_lengths"),
)
_OF_ROWS = ("attention_mask", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")
_OF_ROWS_DIMS = 5  # rows, pictures of a row, channels, height, width


def picture_splitting(config: Any, arguments: dict[str, Any], name: Name) -> Split | None:
    """Returns the cut of a call with pictures, or with positions that have a dimension before the rows. None without
    these, or if every row has equally many pictures, in their own dimension.

    Args:
        config: of the model.
        arguments: of the call, by name.
        name: gives the arguments of a call their names.
    """
    ids = arguments.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    positions = arguments.get("position_ids")
    present = [kind for kind in (_IMAGE, _VIDEO, _SOUND) if _is_present(kind, arguments, len(ids))]
    present = [kind for kind in present if _token(config, kind) is not None]
    if not present and not (isinstance(positions, torch.Tensor) and positions.dim() > 2):
        return None

    def split(
        args: tuple[Any, ...], kwargs: dict[str, Any], number: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        if number == 1:
            return [args], [kwargs]
        named = name(args, kwargs)
        cut = _Cut(config, ids, present, named, number)
        parts: list[dict[str, Any]] = [{} for _ in range(number)]
        for key, value in named.items():
            for part, piece in zip(parts, cut.pieces(key, value), strict=True):
                if piece is not _NOTHING:
                    part[key] = piece
        return [()] * number, parts

    return split


_NOTHING = object()
"""In place of an argument that a microbatch is called without, as its rows have no pictures."""


def _is_present(kind: _Kind, arguments: Mapping[str, Any], rows: int) -> bool:
    values, grid = arguments.get(kind.values), arguments.get(kind.grid)
    if grid is not None or not isinstance(values, torch.Tensor):
        return isinstance(grid, torch.Tensor) or isinstance(values, (list, tuple))
    in_rows = kind is _IMAGE and values.dim() >= _OF_ROWS_DIMS and len(values) == rows
    return not in_rows or arguments.get("image_sizes") is not None


def _token(config: Any, kind: _Kind) -> int | None:
    return next((token for name in kind.tokens if isinstance(token := getattr(config, name, None), int)), None)


class _Cut:
    """The cut of one call.

    Args:
        config: of the model.
        ids: tokens [rows, tokens].
        present: the kinds of pictures in the call.
        arguments: of the call, by name.
        number: of microbatches.

    Raises:
        ValueError: the pictures of a row cannot be found.
    """

    def __init__(
        self, config: Any, ids: torch.Tensor, present: list[_Kind], arguments: Mapping[str, Any], number: int
    ) -> None:
        self._config, self._shape, self._number = config, ids.shape, number
        rows = torch.arange(len(ids)).tensor_split(number)
        self._rows = [len(part) for part in rows]
        self._sizes: dict[str, list[int]] = {}  # of the arguments whose names tell, in each microbatch
        self._lengths = [(len(ids), self._rows)]  # how an argument of this length may be cut
        for kind in present:
            counts = _pictures_of_rows(config, kind, ids, arguments)
            sizes = [int(counts[part].sum()) for part in rows]
            grid, values = arguments.get(kind.grid), arguments.get(kind.values)
            patches = sizes
            if grid is not None and values is not None and len(values) != len(grid):
                patches = [int(part.prod(1).sum()) for part in grid.split(sizes)]
            self._sizes |= dict.fromkeys((kind.grid, *kind.others), sizes) | {kind.values: patches}
            self._lengths += [(sum(sizes), sizes), (sum(patches), patches)]

    def pieces(self, name: str, value: Any) -> list[Any]:
        """An argument's part for each microbatch.

        Raises:
            ValueError: the argument does not belong to rows, nor to pictures, or to either of them.
        """
        is_tensor = isinstance(value, torch.Tensor)
        if not (is_tensor and value.dim()) and not isinstance(value, (list, tuple)):
            return [value] * self._number
        if name in self._sizes and value is not None and len(value) == sum(self._sizes[name]):
            return _split(value, self._sizes[name], leaves_out=True)
        if is_tensor:
            # Rotary positions have a dimension before the rows.
            dim = next((dim for dim in (0, 1) if value.shape[dim : dim + 2] == self._shape), None)
            if dim is not None:
                return list(value.split(self._rows, dim))
        elif not value or hasattr(self._config, name):  # an option of the model
            return [value] * self._number
        fitting = [sizes for length, sizes in self._lengths if length == len(value)]
        if names_label(name) or name in _OF_ROWS:
            fitting = [sizes for sizes in fitting if sizes == self._rows]
        if is_tensor and not fitting and value.shape[0] == 1 and not names_label(name):
            return [value] * self._number
        if not fitting or any(sizes != fitting[0] for sizes in fitting):
            raise ValueError(
                f"[forward] '{name}' has {len(value)} entries, which {'may belong to' if fitting else 'are neither'} "
                f"the {self._shape[0]} rows of the batch {'or to' if fitting else 'nor'} their pictures, expected one "
                "for each row or for each picture; set num_microbatch=1, or give split_input a function"
            )
        return _split(value, fitting[0], leaves_out=fitting[0] != self._rows)


def _split(value: Any, sizes: list[int], leaves_out: bool) -> list[Any]:
    """Consecutive parts of a tensor or a list. `leaves_out`: instead of an empty part, there is none."""
    starts = itertools.accumulate(sizes, initial=0)
    parts = [value[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return [part if size or not leaves_out else _NOTHING for part, size in zip(parts, sizes, strict=True)]


def _pictures_of_rows(config: Any, kind: _Kind, ids: torch.Tensor, named: Mapping[str, Any]) -> torch.Tensor:
    """The number of pictures in each row."""
    marks = torch.eq(ids, _token(config, kind) or 0)
    tokens = marks.sum(1)
    grid = named.get(kind.grid)
    if grid is not None:
        merged = getattr(getattr(config, "vision_config", config), "spatial_merge_size", 1) ** 2
        ends = (grid.prod(1) // merged).cumsum(0).tolist()
        return _counted(tokens, [0, *ends], kind)
    pictures = len(named[kind.values])
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
