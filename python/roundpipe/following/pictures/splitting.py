"""Cuts a batch of text and pictures by rows: a row's pictures are those that its placeholder tokens stand for.

Videos and sounds are pictures, too. Which argument belongs to what is found from the batch, see `levels.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roundpipe.data.labels import names_label
from roundpipe.following.pictures.levels import (
    Kind,
    Level,
    kind_told,
    kinds_in,
    kinds_told,
    levels_of,
    pictures_in_rows,
)

Confirm = Callable[[str, list[tuple[int, dict[str, Any]]], dict[str, Any]], None]
"""Is given what was cut, in words, some rows' arguments alone, each with the row's place, and those of these rows
together."""
Split = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[tuple[Any, ...]], list[dict[str, Any]]]]
Name = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]

_OF_ROWS = ("attention_mask", "inputs_embeds", "position_ids", "token_type_ids", "mm_token_type_ids")


def picture_splitting(
    config: Any, arguments: dict[str, Any], name: Name, confirm: Confirm | None = None
) -> Split | None:
    """Returns the cut of a call with pictures, or with positions that have a dimension before the rows. None without
    these.

    Args:
        config: of the model.
        arguments: of the call, by name.
        name: gives the arguments of a call their names.
        confirm: raises ValueError if rows alone are not what they are together.
    """
    ids = arguments.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return _without_tokens(arguments)
    positions = arguments.get("position_ids")
    kinds = kinds_in(config, ids)
    if not _about_pictures(config, arguments, ids, kinds) and not (
        isinstance(positions, torch.Tensor) and positions.dim() > 2
    ):
        return None

    def split(
        args: tuple[Any, ...], kwargs: dict[str, Any], number: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        if number == 1:
            return [args], [kwargs]
        cut = _Cut(config, ids, kinds, name(args, kwargs))
        if confirm is not None and kinds:
            few = cut.few_rows()
            if few:
                rest = [(few[-1] + 1, len(ids))] if few[-1] + 1 < len(ids) else []
                together = cut.parts([(0, few[-1] + 1), *rest])[0]
                alone = cut.parts([(row, row + 1) for row in range(len(ids))])
                confirm(cut.form(), [(row, alone[row]) for row in few], together)
        ends = torch.arange(len(ids)).tensor_split(number)
        return [()] * number, cut.parts([(int(part[0]), int(part[-1]) + 1) for part in ends])

    return split


def _without_tokens(arguments: Mapping[str, Any]) -> Split | None:
    """Refuses to cut a call whose text is embedded already, if it has pictures: their tokens are not seen."""
    embedded = arguments.get("inputs_embeds")
    if not isinstance(embedded, torch.Tensor):
        return None
    rows = len(embedded)
    others = [name for name, value in arguments.items() if kind_told(name) is not None and _is_counted(value)]
    of_rows = [name for name in others if isinstance(arguments[name], torch.Tensor) and len(arguments[name]) == rows]
    if others == of_rows:
        return None

    def split(
        args: tuple[Any, ...], kwargs: dict[str, Any], number: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        if number == 1:
            return [args], [kwargs]
        raise ValueError(
            f"[forward] {' and '.join(repr(name) for name in others)} cannot be told apart by rows without input_ids, "
            "whose tokens say which row has which pictures; set num_microbatch=1, or give split_input a function"
        )

    return split


_NOTHING = object()
"""In place of an argument that a microbatch is called without, as its rows have no pictures."""


def _is_counted(value: Any) -> bool:
    """Whether a value has entries that may belong to something."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, np.ndarray) or (isinstance(value, Sequence) and not isinstance(value, (str, bytes)))


def _dim_of_rows(value: Any, ids: torch.Tensor) -> int | None:
    """The dimension of the rows, if the tokens' one follows it; rotary positions have a dimension before the rows."""
    if not isinstance(value, torch.Tensor):
        return None
    return next((dim for dim in (0, 1) if value.shape[dim : dim + 2] == ids.shape), None)


def _about_pictures(config: Any, arguments: Mapping[str, Any], ids: torch.Tensor, kinds: list[Kind]) -> dict[str, Any]:
    """The arguments that may be about pictures of these kinds."""
    return {
        name: value
        for name, value in arguments.items()
        if kinds and _is_counted(value) and not names_label(name) and name not in _OF_ROWS and not hasattr(config, name)
        if _dim_of_rows(value, ids) is None or kinds_told(kinds, name)
    }


class _Cut:
    """The cut of one call.

    Args:
        config: of the model.
        ids: tokens [rows, tokens].
        kinds: of pictures in the batch.
        arguments: of the call, by name.
    """

    def __init__(self, config: Any, ids: torch.Tensor, kinds: list[Kind], arguments: Mapping[str, Any]) -> None:
        self._config, self._ids, self._kinds, self._arguments = config, ids, kinds, arguments
        shown = _about_pictures(config, arguments, ids, kinds)
        of = {kind.stem: {n: v for n, v in shown.items() if kind in self._possible(n)} for kind in kinds}
        self._levels = {kind.stem: levels_of(kind, of[kind.stem]) for kind in kinds}
        self._shown = list(shown)

    def form(self) -> str:
        """The same for calls that are cut alike."""
        found = [(stem, [level.what for level in levels]) for stem, levels in self._levels.items()]
        return repr((sorted(self._shown), found))

    def few_rows(self) -> list[int]:
        """The first two rows with pictures; nothing if there are no two."""
        held = [row for row in range(len(self._ids)) if any(kind.tokens[row] for kind in self._kinds)]
        return held[:2] if len(held) > 1 else []

    def parts(self, bounds: list[tuple[int, int]]) -> list[dict[str, Any]]:
        """The arguments of consecutive ranges of rows, which are all rows.

        Raises:
            ValueError: an argument does not belong to rows, nor to pictures, or to either of them.
        """
        parts: list[dict[str, Any]] = [{} for _ in bounds]
        for key, value in self._arguments.items():
            for part, piece in zip(parts, self._pieces(key, value, bounds), strict=True):
                if piece is not _NOTHING:
                    part[key] = piece
        return parts

    def _possible(self, name: str) -> list[Kind]:
        """The kinds of pictures that an argument may be about: by its name, if that tells."""
        return kinds_told(self._kinds, name)[:1] or self._kinds

    def _is_told(self, name: str, value: Any) -> bool:
        """Whether the name of an argument says that its entries are pictures of which the batch has so many."""
        told = kinds_told(self._kinds, name) if name not in _OF_ROWS else []
        return any(sum(level.counts) == len(value) for kind in told for level in self._levels[kind.stem])

    def _pieces(self, name: str, value: Any, bounds: list[tuple[int, int]]) -> list[Any]:
        """An argument's part for each range of rows."""
        everywhere = [value] * len(bounds)
        if not _is_counted(value):
            return everywhere
        rows = len(self._ids)
        if isinstance(value, torch.Tensor):
            dim = None if self._is_told(name, value) else _dim_of_rows(value, self._ids)
            if dim is not None:
                return [value.narrow(dim, start, end - start) for start, end in bounds]
        elif not len(value) or hasattr(self._config, name):  # an option of the model
            return everywhere
        if names_label(name) or name in _OF_ROWS:
            levels = [Level("rows", (1,) * rows)] if len(value) == rows else []
        else:
            levels = self._fitting(name, value)
        is_one = isinstance(value, torch.Tensor) and value.shape[0] == 1 and not names_label(name)
        if is_one and not levels and not kinds_told(self._kinds, name):
            return everywhere
        cuts = {tuple(sum(level.counts[start:end]) for start, end in bounds): level for level in levels}
        if len(cuts) != 1:
            self._refuse(name, value, bool(cuts))
        sizes, level = next(iter(cuts.items()))
        held = sizes if level.per_row is None else [sum(level.per_row[start:end]) for start, end in bounds]
        return [part if number else _NOTHING for part, number in zip(_split(value, sizes), held, strict=True)]

    def _fitting(self, name: str, value: Any) -> list[Level]:
        """What an argument's entries may be."""
        rows = len(self._ids)
        kinds = self._possible(name)
        for kind in kinds:
            held = pictures_in_rows(kind, value)
            if held is not None:
                return [Level("rows", (1,) * rows, per_row=held)]
        found = [level for kind in kinds for level in self._levels[kind.stem] if sum(level.counts) == len(value)]
        told = kinds_told(kinds, name)
        if len(value) == rows and not (told and found):
            found.append(Level("rows", (1,) * rows, per_row=None if not told else (1,) * rows))
        return found

    def _refuse(self, name: str, value: Any, several: bool) -> None:
        rows = len(self._ids)
        kind = next(iter(kinds_told(self._kinds, name)), None)
        if kind is not None and not several and not self._levels[kind.stem]:
            raise ValueError(
                f"[forward] the pictures of '{name}' cannot be told apart by rows: it has {len(value)} entries, and "
                f"the rows have {list(kind.tokens)} tokens for them, in {list(kind.runs)} runs; set num_microbatch=1, "
                "or give split_input a function"
            )
        raise ValueError(
            f"[forward] '{name}' has {len(value)} entries, which {'may belong to' if several else 'are neither'} the "
            f"{rows} rows of the batch {'or to' if several else 'nor'} their pictures, expected one for each row or "
            "for each picture; set num_microbatch=1, or give split_input a function"
        )


def _split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of a tensor or a list."""
    starts = itertools.accumulate(sizes, initial=0)
    return [value[start : start + size] for start, size in zip(starts, sizes, strict=False)]
