"""Commands whose options are the fields of a dataclass, and are given once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

EncodedFormat = Literal["nf4", "nf4-double", "mxfp4", "int8"]
"""What `_core.format_names` lists, for commands that answer before anything heavy is imported."""


class OnceEach(TyperCommand):
    """A command that refuses an option that is given twice and has one value: the last one would win silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in given:
            single = parameter.param_type_name == "option" and not getattr(parameter, "multiple", False)
            if single and given.count(parameter) > 1 and not ctx.resilient_parsing:
                ctx.fail(f"{parameter.opts[0]} is given twice, expected once")
        return super().parse_args(ctx, args)


def of_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Makes the function that typer reads: each field of the command's `options` becomes a parameter.

    A command with a second parameter, `given`, gets the names of the fields that stand on the command line.
    """
    options = get_type_hints(command)["options"]
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(options).parameters.items()
    ]

    def fill_and_run(context: typer.Context, **fields: Any) -> None:
        if "given" not in inspect.signature(command).parameters:
            command(options(**fields))
            return
        sources = {name: context.get_parameter_source(name) for name in fields}
        given = frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")
        command(options(**fields), given)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    fill_and_run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    fill_and_run.__doc__ = command.__doc__
    return fill_and_run
