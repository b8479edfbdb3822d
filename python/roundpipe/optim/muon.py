"""Muon, for the matrices of hidden layers, with AdamW for a model's other parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from roundpipe import _core
from roundpipe.model.facade import facade_in
from roundpipe.model.memory.parameter_classes import classes_of_parameters
from roundpipe.model.published_attributes import source_of_names
from roundpipe.optim.host_step import HostStep
from roundpipe.optim.parameter_groups import Named, choose

# Options of groups that AdamW steps; torch.optim.Muon has no such groups.
_OF_ADAMW = {"use_muon": True, "betas": (0.9, 0.999)}
_ADAMW_EPS = 1e-8
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 99  # of Newton-Schulz, as in torch


class _Grouped(torch.optim.Muon):
    """torch's Muon, whose groups may be stacks of matrices, or be stepped by AdamW, if a model steps them."""

    _of_model: bool

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if not self._of_model:
            super().__init__(params, *args, **kwargs)
            return
        # Torch's constructor checks the options; what does not fit a model's groups is refused by name, when it binds.
        super().__init__([torch.zeros(1, 1)], *args, **kwargs)
        self.param_groups.clear()
        self.defaults.update(_OF_ADAMW)
        for group in params:
            self.add_param_group(dict(group) if group.get("use_muon", True) else {"eps": _ADAMW_EPS, **group})


_Grouped.__signature__ = inspect.signature(torch.optim.Muon)  # type: ignore[attr-defined]


class Muon(HostStep, _Grouped):
    """`torch.optim.Muon`: momentum whose matrices are made orthogonal, with torch's own products in bfloat16.

    Given a model, all its trainable parameters have to be matrices, or stacks of matrices (three dimensions) of which
    each is stepped by itself; others are refused by name. Groups with `"use_muon": False` are stepped by AdamW, with
    the options `lr`, `betas`, `eps` and `weight_decay`, and may have any shape.

    Args:
        adamw: with a model: options of the AdamW that steps what Muon is not for and no group has: embeddings, the
            head, norms and biases, see `docs/optimizers.md`. `{}`: `lr` and `weight_decay` are those of Muon. None:
            there is none.
    """

    algorithm = _core.Algorithm.MUON
    dtypes = (torch.float32,)
    counters: ClassVar[dict[str, float | None]] = {}

    def __init__(
        self,
        params: Any,
        *args: Any,
        groups: Iterable[dict[str, Any]] | None = None,
        adamw: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        model = facade_in(params)
        self._of_model = model is not None
        if model is None:
            if adamw is not None:
                raise ValueError(
                    f"[optim] adamw is for a RoundPipe model, and the first argument is a {type(params).__name__}; "
                    "give the other parameters to an optimizer of their own"
                )
            super().__init__(params, *args, groups=groups, **kwargs)
            return
        given = list(groups or [])
        if adamw is not None:
            named = model._step_group.models.trainable_parameters()
            classes = classes_of_parameters(source_of_names(model).modules())
            others = _others(named, given, classes)
            if others:
                given.append({"use_muon": False, **adamw, "params": lambda _, parameter: id(parameter) in others})
        super().__init__(params, *args, groups=given, **kwargs)

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        hyper = super().hyperparameters(group)
        hyper.eps = group["eps"]
        hyper.use_muon = group.get("use_muon", True)
        if not hyper.use_muon and not self._of_model:
            raise ValueError(
                "[optim] a group has use_muon off, expected it on: parameters outside of a RoundPipe model need an "
                "AdamW of their own"
            )
        hyper.beta1, hyper.beta2 = (float(beta) for beta in group.get("betas", _OF_ADAMW["betas"]))
        hyper.momentum = group["momentum"]
        hyper.nesterov = group["nesterov"]
        hyper.ns_a, hyper.ns_b, hyper.ns_c = group["ns_coefficients"]
        hyper.ns_steps = group["ns_steps"]
        hyper.match_rms_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        if not 0 <= group["ns_steps"] <= _MOST_STEPS:
            raise ValueError(f"[optim] ns_steps is {group['ns_steps']}, expected a number from 0 to {_MOST_STEPS}")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(
                f"[optim] adjust_lr_fn is {group['adjust_lr_fn']!r}, expected None, 'original' or 'match_rms_adamw'"
            )
        return hyper

    def counters_of(self, hyper: _core.Hyperparameters) -> dict[str, float | None]:
        return self.counters if hyper.use_muon else HostStep.counters


_ADAMW = inspect.Parameter("adamw", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="dict[str, Any] | None")
Muon.__signature__ = inspect.Signature([*inspect.signature(Muon).parameters.values(), _ADAMW])  # type: ignore[attr-defined]


def _others(named: Sequence[Named], groups: Sequence[dict[str, Any]], classes: dict[int, list[str]]) -> set[int]:
    """The ids of the parameters in no group that Muon is not for."""
    taken: set[int] = set()
    for index, group in enumerate(groups):
        taken.update(id(parameter) for parameter in choose(f"[optim] groups[{index}]", group.get("params"), named))
    return {
        id(parameter)
        for name, parameter in named
        if id(parameter) not in taken
        and not _core.is_for_muon(name, tuple(parameter.shape), classes.get(id(parameter), []))
    }
