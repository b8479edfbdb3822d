"""Writes docs/reference/commands.md: every command and option, from the code that reads them.

python tools/command_reference.py

The options of `roundpipe` come from the signatures of its commands, without the text that a version of typer lays out
around them. `roundpipe-train` is asked for its help, so `make build-tests` has to have built it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from roundpipe.cli import app
from roundpipe.train.interface.option_names import ALIASES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "commands.md"
PROGRAM = ROOT / "build" / "release" / "programs" / "train" / "roundpipe-train"
HEAD = """# Reference of the commands

Every command says the same with `--help`. This page is made from the commands by `tools/command_reference.py`. The
guides show how they are used.
"""
TRAIN_HEAD = """## The program `roundpipe-train`

The program of C++ alone, see [train.md](../train.md#without-python).

"""
PAGES = re.compile(r"`?docs/(\w+/)?([\w-]+\.md)`?")
ON_ITS_OWN = re.compile(r"^(?:torchrun |roundpipe )")


@dataclasses.dataclass(frozen=True)
class Option:
    """One option or argument, as a row of a table."""

    names: str
    takes: str
    otherwise: str
    help: str
    panel: str
    is_argument: bool


def written(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")


def kind(hint: Any, info: Any) -> str:
    """What a value looks like."""
    if info.metavar:
        return str(info.metavar)
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    parts = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) in (list, tuple) or (parts and get_origin(hint) is not None):
        return kind(parts[0], info)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f"`{value.value}`" for value in hint)
    return {bool: "", int: "a number", float: "a number", str: "a text", Path: "a path"}.get(hint, str(hint))


def several(hint: Any) -> bool:
    return get_origin(hint) in (list, tuple) or any(get_origin(part) in (list, tuple) for part in get_args(hint))


def default_of(info: Any, value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if not info.show_default or value in (None, "", (), []) or isinstance(value, bool):
        return ""
    value = value.value if isinstance(value, Enum) else value
    return f"{value:g}" if isinstance(value, float) else f"{value}"


def options_of(command: Callable[..., Any]) -> Iterator[Option]:
    """The parameters that typer reads."""
    hints = {name: parameter.annotation for name, parameter in inspect.signature(command).parameters.items()}
    if any(isinstance(hint, str) for hint in hints.values()):
        hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        infos = [each for each in getattr(hint, "__metadata__", ()) if hasattr(each, "param_decls")]
        if not infos or infos[0].hidden:
            continue
        info, plain = infos[0], get_args(hint)[0]
        is_argument = type(info).__name__ == "ArgumentInfo"
        # In an annotation, typer takes the first name for the default.
        named = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        shown = named or [written(name)]
        if plain is bool and parameter.default is True and not named:
            shown = [f"{written(name)}/{written('no_' + name)}"]
        value = parameter.default
        if value is not inspect.Parameter.empty and type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            value = None
        text = f"`{info.metavar or name.upper()}`" if is_argument else ", ".join(f"`{each}`" for each in shown)
        takes = "" if is_argument and info.metavar else kind(plain, info)
        takes += ", any number of them" if several(plain) else ""
        panel = str(info.rich_help_panel or "")
        yield Option(text, takes, default_of(info, value), str(info.help or ""), panel, is_argument)


def table(options: list[Option]) -> str:
    lines = ["| option | takes | default | meaning |", "|---|---|---|---|"]
    for option in options:
        cells = (option.names, option.takes, option.otherwise, option.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(lines)


def prose(docstring: str) -> str:
    """The docstring's paragraphs; those that are commands as blocks."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = [line.strip("\b ") for line in paragraph.splitlines() if line.strip("\b ")]
        if all(ON_ITS_OWN.match(line) for line in lines):
            parts.append("```\n" + "\n".join(lines) + "\n```")
        else:
            parts.append(PAGES.sub(r"[\2](../\1\2)", " ".join(lines)))
    return "\n\n".join(parts)


def section(title: str, command: Callable[..., Any]) -> str:
    options = list(options_of(command))
    parts = [f"## `{title}`", prose(command.__doc__ or "")]
    for panel in dict.fromkeys(option.panel for option in options):
        parts += [f"### {panel}"] if panel else []
        parts.append(table([option for option in options if option.panel == panel]))
    if title == "roundpipe train":
        rows = [
            f"| `{written(name)}` | {', '.join(f'`{written(other)}`' for other in others)} |"
            for name, others in ALIASES.items()
        ]
        parts.append("### Other names\n\n| option | names of other trainers |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def commands(within: typer.Typer, prefix: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for registered in within.registered_commands:
        if registered.callback is not None:
            yield f"{prefix} {registered.name}", registered.callback
    for group in within.registered_groups:
        if group.typer_instance is not None:
            yield from commands(group.typer_instance, f"{prefix} {group.name}")


def of_roundpipe() -> str:
    """The page without what another program says."""
    return "\n".join([HEAD, *(section(title, command) for title, command in commands(app, "roundpipe"))])


def of_roundpipe_train() -> str:
    said = subprocess.run([str(PROGRAM), "--help"], capture_output=True, text=True, check=True).stdout
    lines = [line.rstrip() for line in said.strip().splitlines()]
    return TRAIN_HEAD + "```\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n```\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(of_roundpipe() + "\n" + of_roundpipe_train(), encoding="utf-8")
