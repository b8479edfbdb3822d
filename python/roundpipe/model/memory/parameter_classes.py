"""The classes of the modules that have a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def classes_of_parameters(modules: Iterable[nn.Module]) -> dict[int, list[str]]:
    """By the id of a parameter, the names of the class of its module and of that class's bases."""
    classes: dict[int, list[str]] = {}
    for module in modules:
        for own in module._parameters.values():
            classes.setdefault(id(own), [each.__name__ for each in type(module).__mro__])
    return classes
