"""The command line of `roundpipe train`: a help that begins with what matters, and names that people know."""

from __future__ import annotations

import copy
from typing import Any

import typer

from roundpipe.command_options import OnceEach
from roundpipe.train.interface.option_names import ALIASES, FIRST, NEEDED, instead_of

_ALL = "roundpipe.train.help_all"
_PANELS = {"Needed": NEEDED, "What matters next": FIRST, "More": ("config", "help_all", "help")}


def show_all(context: typer.Context, requested: bool) -> None:
    """What --help-all does."""
    if requested:
        context.meta[_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


class TrainCommand(OnceEach):
    """The options of a run, also under their other names. Its help shows few of them, and with --help-all all."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            parameter.opts += [_written(alias) for alias in ALIASES.get(parameter.name or "", ())]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # which of typer's versions has its own class of this
            given = str(getattr(error, "option_name", ""))
            instead = instead_of(given.lstrip("-").replace("-", "_"))
            if instead is None:
                raise
        option, what = instead
        raise ValueError(f"[train] {given} is no option here, expected {_written(option)}: {what}")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels = {} if ctx.meta.get(_ALL) else _PANELS
        super(TrainCommand, self._shown(ctx, panels)).format_help(ctx, formatter)

    def _shown(self, ctx: Any, panels: dict[str, tuple[str, ...]]) -> TrainCommand:
        """This command with these options, or with all of them, each with its first name."""
        named: dict[str, Any] = {parameter.name: copy.copy(parameter) for parameter in self.get_params(ctx)}
        for name, others in ALIASES.items():
            named[name].opts = [given for given in named[name].opts if given not in map(_written, others)]
        for panel, names in panels.items():
            for name in names:
                named[name].rich_help_panel = panel
        shown = copy.copy(self)
        shown.add_help_option = False
        shown.params = [named[name] for names in panels.values() for name in names] or list(named.values())
        if panels:
            shown.epilog = (
                f"{len(named) - len(shown.params)} more options have defaults: --help-all shows them. Names that other "
                "trainers give to these work as well, such as --lr or --max-length."
            )
        return shown


def _written(name: str) -> str:
    return "--" + name.replace("_", "-")
