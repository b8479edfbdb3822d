"""A run's configuration as TOML: read over defaults, and written with every value and what it means."""

from __future__ import annotations

import dataclasses
import difflib
import json
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from roundpipe.files import read_toml
from roundpipe.train.config import TrainConfig
from roundpipe.train.interface.option_names import instead_of, option_of

_WIDTH = 110
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def read_config(path: str | Path) -> dict[str, Any]:
    """The values that a file sets, by field.

    Raises:
        ValueError: the file cannot be read, has a key that is unknown, a value twice under two names, or a value of
            another type.
    """
    document = read_toml(path, "train", "a configuration file, as --print-config writes it")
    hints = typing.get_type_hints(TrainConfig)
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = option_of(key)
        if name in values:
            raise ValueError(f"[train] {path} gives {name} twice, also as another name of it, expected it once")
        if name not in hints:
            if (instead := instead_of(key)) is not None:
                raise ValueError(f"[train] {path} has the key '{key}', expected {instead[0]}: {instead[1]}")
            near = difflib.get_close_matches(key.replace("-", "_"), hints, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]}?" if near else "; --print-config lists all keys"
            raise ValueError(f"[train] {path} has the key '{key}', expected one of a run's configuration{meant}")
        if not _fits(value, hints[name]):
            raise ValueError(
                f"[train] {key} in {path} is {json.dumps(value, default=str)}, expected {_name(hints[name])}"
            )
        values[name] = float(value) if _is_float(hints[name]) else value
    return values


def written_config(config: TrainConfig) -> str:
    """The configuration as a file for --config. What is not set is a comment."""
    lines = ["# A run of `roundpipe train`. Use it with --config; options on the command line come before it."]
    hints = typing.get_type_hints(TrainConfig, include_extras=True)
    panel = ""
    for field in dataclasses.fields(config):
        option = hints[field.name].__metadata__[0]
        if option.rich_help_panel != panel:
            panel = option.rich_help_panel
            lines += ["", f"# --- {panel} ---"]
        lines += ["", *textwrap.wrap(option.help, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        value = getattr(config, field.name)
        unset = value is None or value == ""
        lines.append(f"# {field.name} =" if unset else f"{field.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    # A JSON text, list, number or truth value is TOML as well.
    return json.dumps(value, ensure_ascii=False)


def _fits(value: Any, hint: Any) -> bool:
    kind = get_origin(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint) if one is not type(None))
    if kind is Literal:
        return value in get_args(hint) and isinstance(value, str)
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _is_float(hint: Any) -> bool:
    return hint is float or float in get_args(hint)


def _name(hint: Any) -> str:
    kind = get_origin(hint)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_name(one) for one in get_args(hint) if one is not type(None))
    if kind is Literal:
        return ", ".join(get_args(hint))
    return "a list of texts" if kind is list else _KINDS[hint]
