"""Assigns a model's parameters to groups of hyperparameters."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from roundpipe import _core
from roundpipe.model.memory.parameter_classes import classes_of_parameters

Named = tuple[str, nn.Parameter]
Selector = str | re.Pattern[str] | nn.Parameter | Callable[[str, nn.Parameter], bool]


def parameter_groups(
    named: Sequence[Named],
    groups: Iterable[dict[str, Any]] | None,
    decay_norms_and_biases: bool,
    modules: Iterable[nn.Module] = (),
) -> list[dict[str, Any]]:
    """Makes torch.optim's list of parameter groups from a model's parameters.

    Args:
        named: the model's trainable parameters with their names.
        groups: one dict for each group: "params" selects its parameters, every other entry is an option. Parameters in
            no group get the optimizer's own options.
        decay_norms_and_biases: False sets `weight_decay` to 0 for norms and biases (`_core.has_weight_decay`), except
            in a group that sets `weight_decay`.
        modules: those that have the parameters; their classes tell norms whose names do not.

    Raises:
        ValueError: a "params" matches no trainable parameter, or a parameter matches two groups.
    """
    owner: dict[int, int] = {}
    names = {id(parameter): name for name, parameter in named}
    made: list[dict[str, Any]] = []
    members: list[list[nn.Parameter]] = []
    for index, group in enumerate(groups or []):
        where = f"[optim] groups[{index}]"
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f"{where} is {group!r}, expected a dict with 'params' and the group's options")
        chosen = choose(where, group["params"], named)
        for parameter in chosen:
            if id(parameter) in owner:
                raise ValueError(
                    f"{where}: parameter '{names[id(parameter)]}' is in groups[{owner[id(parameter)]}] already; each "
                    "parameter belongs to one group, make the patterns narrower"
                )
        owner.update({id(parameter): index for parameter in chosen})
        made.append({key: value for key, value in group.items() if key != "params"})
        members.append(chosen)
    rest = [parameter for _, parameter in named if id(parameter) not in owner]
    if rest:
        made.append({})
        members.append(rest)
    classes = classes_of_parameters(modules)

    def decays(parameter: nn.Parameter) -> bool:
        return _core.has_weight_decay(names[id(parameter)], classes.get(id(parameter), []))

    result: list[dict[str, Any]] = []
    for options, parameters in zip(made, members, strict=True):
        if decay_norms_and_biases or "weight_decay" in options:
            result.append({**options, "params": parameters})
            continue
        decayed = [parameter for parameter in parameters if decays(parameter)]
        others = [parameter for parameter in parameters if not decays(parameter)]
        if decayed:
            result.append({**options, "params": decayed})
        if others:
            result.append({**options, "weight_decay": 0.0, "params": others})
    return result


def choose(where: str, selector: Any, named: Sequence[Named]) -> list[nn.Parameter]:
    """The parameters that one selector, or any of a list of selectors, matches; in the model's order."""
    selectors = list(selector) if isinstance(selector, (list, tuple, set)) else [selector]
    chosen: set[int] = set()
    for single in selectors:
        found = {id(parameter) for name, parameter in named if _fits(where, single, name, parameter)}
        if not found:
            raise ValueError(
                f"{where}: {_describe(single)} fits no trainable parameter of the model{_hint(single, named)}"
            )
        chosen |= found
    return [parameter for _, parameter in named if id(parameter) in chosen]


def _fits(where: str, selector: Any, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, re.Pattern):
        return selector.search(name) is not None
    if isinstance(selector, nn.Parameter):
        return selector is parameter
    if callable(selector):
        return bool(selector(name, parameter))
    raise ValueError(
        f"{where}: 'params' has a {type(selector).__name__}, expected a name or pattern like '*.bias', a compiled "
        "regular expression, a parameter of the model, a function (name, parameter) -> bool, or a list of these"
    )


def _describe(selector: Any) -> str:
    if isinstance(selector, str):
        return f"'{selector}'"
    if isinstance(selector, re.Pattern):
        return f"'{selector.pattern}'"
    if isinstance(selector, nn.Parameter):
        return f"a parameter of shape {tuple(selector.shape)}"
    return f"the function {getattr(selector, '__name__', '')}".strip()


def _hint(selector: Any, named: Sequence[Named]) -> str:
    if not isinstance(selector, str):
        return ""
    close = difflib.get_close_matches(selector, [name for name, _ in named], n=3, cutoff=0.4)
    shown = close or [name for name, _ in named[:3]]
    return "; it has, for example, " + ", ".join(f"'{name}'" for name in shown)
