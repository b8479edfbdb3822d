"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


@dataclasses.dataclass(frozen=True)
class After:
    """Annotates a field that the help shows behind another one; the others stand in the dataclass's order."""

    option: str


def of_fields(command: Callable[[Any], None]) -> Callable[..., None]:
    """Makes the function that typer reads: each field of the command's `options` becomes a parameter."""
    options = get_type_hints(command)["options"]
    hints = get_type_hints(options, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(options).parameters.items():
        behind = [mark.option for mark in hints[name].__metadata__ if isinstance(mark, After)]
        index = [shown.name for shown in parameters].index(behind[0]) + 1 if behind else len(parameters)
        parameters.insert(index, parameter.replace(annotation=hints[name]))

    def fill_and_run(**fields: Any) -> None:
        command(options(**fields))

    fill_and_run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    fill_and_run.__doc__ = command.__doc__
    return fill_and_run
