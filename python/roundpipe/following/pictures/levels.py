"""How many pictures each row of a batch has, found from the row's placeholder tokens and from the arguments' lengths.

A placeholder token stands for a part of a picture. A row's placeholder tokens come in runs, and the pictures of a batch
come in the order of the rows. So pictures belong to rows if the tokens that each of them takes add up to each row's. A
picture's tokens are told, in this order:

- by a table of sizes (`image_grid_thw`, `spatial_shapes`, `image_sizes`): the product of a picture's sizes, each
  divided by one number, the same for all;
- by a mask: the number of its places, divided by one number;
- by the runs: each run is a picture, or each picture has the same number of runs, or a picture has as many runs as a
  list of numbers says (the frames of a video);
- or all pictures take equally many.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_TOKEN = re.compile(r"^([a-z]+)_token_(?:id|index)$")
_SPECIAL = ("pad", "bos", "eos", "sep", "cls", "unk", "mask", "boi", "eoi", "boa", "eoa", "bov", "eov", "boseq")
_WORDS = {
    "video": ("video", "second_per_grid"),
    "audio": ("audio", "sound", "speech", "feature"),
    "image": ("image", "pixel", "spatial_shapes"),
}
"""Words in the names of arguments that are about a kind of picture; the first kind with one of its words counts."""
_LARGEST_DIVISOR = 256


@dataclass(frozen=True)
class Kind:
    """One kind of picture in a batch.

    Attributes:
        stem: the name of its token in the config, such as "image".
        tokens: the number of its tokens in each row.
        runs: the number of runs of these tokens in each row.
    """

    stem: str
    tokens: tuple[int, ...]
    runs: tuple[int, ...]

    def is_in(self, name: str) -> bool:
        """Whether an argument's name says that it is about this kind."""
        return self.stem in name or self.stem == kind_told(name)


@dataclass(frozen=True)
class Level:
    """Something that a batch has a number of, such as pictures, their frames or patches.

    Attributes:
        what: in words.
        counts: how many of them each row has.
        per_row: of entries that are rows, the number of pictures that each holds; None: of other entries.
    """

    what: str
    counts: tuple[int, ...]
    per_row: tuple[int, ...] | None = None


def kind_told(name: str) -> str | None:
    """The kind of picture that an argument is about by its name; None if the name does not tell."""
    return next((kind for kind, words in _WORDS.items() if any(word in name for word in words)), None)


def kinds_told(kinds: Sequence[Kind], name: str) -> list[Kind]:
    """The kinds of a batch that an argument is about by its name. In a batch without tokens of videos, those of
    pictures stand for their frames, as in GLM-4.1V."""
    told = [kind for kind in kinds if kind.is_in(name)]
    return told or [kind for kind in kinds if kind.stem == "image" and kind_told(name) == "video"]


def kinds_in(config: Any, ids: torch.Tensor) -> list[Kind]:
    """The kinds of pictures that a batch has tokens of."""
    found: dict[str, int] = {}
    # Some models keep the token of their pictures in the config of the tower.
    for each in (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None)):
        for name in dict.fromkeys([*vars(each), *getattr(each, "attribute_map", {})]) if each is not None else ():
            match = _TOKEN.match(name)
            token = getattr(each, name, None)
            if match is not None and match[1] not in _SPECIAL and isinstance(token, int):
                found.setdefault(match[1], token)
    kinds = []
    for stem, token in found.items():
        marks = ids == token
        if not bool(marks.any()):
            continue
        starts = marks.clone()
        starts[:, 1:] &= ~marks[:, :-1]
        kinds.append(Kind(stem, tuple(marks.sum(1).tolist()), tuple(starts.sum(1).tolist())))
    return sorted(kinds, key=lambda kind: kind.stem != "video")


def levels_of(kind: Kind, arguments: Mapping[str, Any]) -> list[Level]:
    """What there is of one kind of picture in each row.

    Args:
        kind: of the pictures.
        arguments: those that may be about them, by name.
    """
    lengths = dict.fromkeys(len(value) for value in arguments.values())
    levels: dict[int, Level] = {}  # by how many there are

    def add(what: str, counts: tuple[int, ...] | None) -> None:
        if counts is not None:
            levels.setdefault(sum(counts), Level(what, counts))

    tables = [table for value in arguments.values() if (table := _table(value)) is not None]
    for table in tables:
        counts = _by_tokens(kind, _tokens_of_sizes(table))
        if counts is None:
            continue
        add("pictures", counts)
        add("patches", _summed(counts, table.prod(1).tolist()))
        if table.shape[1] == _WITH_FRAMES:
            add("frames", _summed(counts, table[:, 0].tolist()))
    for value in arguments.values():
        places = _places(value)
        if places is not None and len(places) not in levels:
            add("pictures", _by_tokens(kind, _tokens_of_places(places)))
    for length in lengths:
        if length not in levels:
            add("pictures", _by_runs(kind, length) or _equal(kind, length))
    # Numbers of parts, such as the frames of each video.
    for value in arguments.values():
        numbers = _numbers(value)
        if not numbers:
            continue
        whole, parts = levels.get(len(numbers)), levels.get(sum(numbers))
        if parts is None and whole is None and sum(numbers) == sum(kind.runs):
            parts = Level("frames", kind.runs)
            levels[sum(numbers)] = parts
        if parts is not None:
            levels.pop(len(numbers), None)
            grouped = _grouped(parts.counts, numbers)
            if grouped is None and whole is not None:
                levels[len(numbers)] = whole
            add("pictures", grouped)
        elif whole is not None:
            add("frames", _summed(whole.counts, numbers))
    return list(levels.values())


def pictures_in_rows(kind: Kind, value: Any) -> tuple[int, ...] | None:
    """Of an argument with an entry for each row, padded to the row with the most pictures, or a list for each row: the
    number of pictures in each row. None if it is of another form."""
    if len(value) != len(kind.tokens):
        return None
    if isinstance(value, (list, tuple)):
        if not all(isinstance(entry, (list, tuple)) for entry in value) or _table(value) is not None:
            return None
        held = tuple(map(len, value))
    elif isinstance(value, torch.Tensor) and value.dim() > 2:
        used = value.flatten(2).ne(0).any(2)
        held = tuple(used.sum(1).tolist())
        if any(bool(row[count:].any()) for row, count in zip(used, held, strict=True)) or max(held) < value.shape[1]:
            return None
    else:
        return None
    return held if held == kind.runs or _is_in_proportion(held, kind.tokens) else None


def _is_in_proportion(held: Sequence[int], tokens: Sequence[int]) -> bool:
    return all(h * sum(tokens) == t * sum(held) for h, t in zip(held, tokens, strict=True))


_SIZES = (2, 3)  # height and width, perhaps after a number of frames
_WITH_FRAMES = 3
_PADDED = 2  # the fewest dimensions of an argument with places for a picture's parts


def _table(value: Any) -> np.ndarray[Any, Any] | None:
    """The sizes of pictures [pictures, 2 or 3]; None if an argument is no such table."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.dtype == torch.bool:
            return None
        value = value.cpu().numpy()
    elif not isinstance(value, np.ndarray):
        rows = [entry.tolist() if isinstance(entry, torch.Tensor) and entry.dim() == 1 else entry for entry in value]
        if not all(isinstance(row, (list, tuple)) and len(row) in _SIZES and _are_whole(row) for row in rows):
            return None
        if len({len(row) for row in rows}) != 1:
            return None
        value = np.array(rows)
    if value.ndim != _PADDED or value.shape[1] not in _SIZES or value.dtype.kind != "i" or (value < 1).any():
        return None
    found: np.ndarray[Any, Any] = value
    return found


def _are_whole(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int for number in numbers)


def _places(value: Any) -> np.ndarray[Any, Any] | None:
    """The number of places that each picture uses in a mask, or in a tensor of positions, which are -1 elsewhere."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dim() < _PADDED or not value.numel():
        return None
    if value.dtype == torch.bool or (int(value.min()) >= 0 and int(value.max()) <= 1):
        used = value.flatten(1).ne(0)
    elif value.dim() > _PADDED and int(value.min()) < 0:
        used = value.ge(0).all(-1).flatten(1)
    else:
        return None
    counted: np.ndarray[Any, Any] = used.sum(1).cpu().numpy()
    return counted


def _numbers(value: Any) -> list[int] | None:
    """Whole numbers above 0, one for each entry."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim != 1 or (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return None
        value = value.tolist()
    if not _are_whole(value) or any(number < 1 for number in value):
        return None
    return list(value)


def _tokens_of_sizes(table: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """The numbers of tokens that pictures of these sizes may take."""
    frames = table[:, 0] if table.shape[1] == _WITH_FRAMES else 1
    for divisor in range(1, _LARGEST_DIVISOR + 1):
        yield (table[:, -2:] // divisor).prod(1) * frames
        yield -(-table[:, -2:] // divisor).prod(1) * frames


def _tokens_of_places(places: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    for divisor in range(1, _LARGEST_DIVISOR + 1):
        yield places // divisor
        yield -(-places // divisor)


def _by_tokens(kind: Kind, choices: Iterator[np.ndarray[Any, Any]]) -> tuple[int, ...] | None:
    """The pictures of each row, whose tokens are the first of the choices that add up to each row's."""
    for tokens in choices:
        if int(tokens.sum()) == sum(kind.tokens) and (tokens > 0).all():
            counts = _grouped(kind.tokens, tokens.tolist())
            if counts is not None:
                return counts
    return None


def _grouped(parts: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...] | None:
    """How many of consecutive `numbers` add up to each of `parts`; None if they do not."""
    ends = dict(zip(itertools.accumulate(numbers, initial=0), range(len(numbers) + 1), strict=True))
    places = list(itertools.accumulate(parts, initial=0))
    if any(place not in ends for place in places) or places[-1] != sum(numbers):
        return None
    return tuple(ends[after] - ends[before] for before, after in itertools.pairwise(places))


def _summed(counts: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """The sums of consecutive `numbers`, of which each row has `counts`."""
    left = iter(numbers)
    return tuple(sum(itertools.islice(left, count)) for count in counts)


def _by_runs(kind: Kind, pictures: int) -> tuple[int, ...] | None:
    """The pictures of each row if each of them has the same number of runs."""
    each, rest = divmod(sum(kind.runs), max(pictures, 1))
    if rest or not each or any(runs % each for runs in kind.runs):
        return None
    return tuple(runs // each for runs in kind.runs)


def _equal(kind: Kind, pictures: int) -> tuple[int, ...] | None:
    """The pictures of each row if each of them takes the same number of tokens."""
    each, rest = divmod(sum(kind.tokens), max(pictures, 1))
    if rest or not each or any(tokens % each for tokens in kind.tokens):
        return None
    return tuple(tokens // each for tokens in kind.tokens)
