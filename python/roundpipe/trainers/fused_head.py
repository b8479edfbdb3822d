"""Lets the pipeline follow a model to which TRL has added its fused language model head."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn


def make_followable(where: str, model: nn.Module) -> None:
    """Makes the forward that TRL assigned to a model one of any copy of it, such as those that run on devices.

    TRL's forward takes everything from the model that it is called on if `fused_lm_head=True`, but otherwise calls the
    forward of the one model that it was added to.

    Raises:
        ValueError: the model has another forward than its class and TRL gave it.
    """
    for module in model.modules():
        assigned = vars(module).get("forward")
        if assigned is None:
            continue
        fused: Any = getattr(assigned, "__func__", None)
        if not isinstance(assigned, MethodType) or "add_fused_lm_head" not in fused.__code__.co_qualname:
            raise ValueError(
                f"[{where}] the forward of a {type(module).__name__} was assigned, expected that of its class, which "
                "the pipeline can run on copies of the module; override it in a subclass instead"
            )
        before = _closed_over(fused, "original_forward")
        if getattr(before, "__func__", None) is not type(module).forward:
            raise ValueError(
                f"[{where}] the forward of the {type(module).__name__} was assigned before TRL added its own, expected "
                "that of its class; override it in a subclass instead"
            )
        vars(module)["forward"] = MethodType(_of_any(fused), module)


def _closed_over(function: Any, name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents if name in cells else None


def _of_any(fused: Any) -> Any:
    @functools.wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return fused(self, *args, fused_lm_head=True, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    return forward
