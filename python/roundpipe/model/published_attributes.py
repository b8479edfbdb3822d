"""Attributes of wrapped models that scripts for the published package read.

They exist only if the original model has no attribute of that name: if it has its own `layers`, or `model` as Hugging
Face's models do, that one is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundpipe.following.layers.shell import layers_of
from roundpipe.model.host_resident import HostResident


def _in_the_pipeline(facade: HostResident) -> Any:
    own = object.__getattribute__(facade, "__dict__")
    followed = own.get("_language_model")
    return own["_wrapped"] if followed is None else followed.chain


def _layers(facade: HostResident) -> list[Any]:
    return [module for _, module in layers_of(_in_the_pipeline(facade))]


def _original(facade: HostResident) -> Any:
    own = object.__getattribute__(facade, "__dict__")
    return None if own["_original_model"] is own["_wrapped"] else own["_original_model"]


def standing_for(facade: HostResident) -> list[Any]:
    """The modules that a wrapped model stands for: the original, and the module that runs if it is another one."""
    own = object.__getattribute__(facade, "__dict__")
    given = own["_original_model"] is not own["_wrapped"] and own.get("_language_model") is None
    return [own["_original_model"], own["_wrapped"]] if given else [own["_original_model"]]


def source_of_names(facade: HostResident) -> Any:
    """The module whose parameter names count: the original, unless the pipeline has parameters that it lacks."""
    original, *others = standing_for(facade)
    known = {id(parameter) for parameter in original.parameters()}
    return next((other for other in others if any(id(p) not in known for p in other.parameters())), original)


#: For every wrapped model: the module that the pipeline runs (the one that was wrapped), the model in front of it
#: (None if it is the same), the name, and the dtype of the optimizer's parameters.
COMMON: Mapping[str, Callable[[HostResident], Any]] = {
    "model": _in_the_pipeline,
    "original_model": _original,
    "name": lambda facade: object.__getattribute__(facade, "_name"),
    "optim_dtype": lambda facade: object.__getattribute__(facade, "_optim_dtype"),
}

#: For a `RoundPipe` also: the list of its layers, and the options that its calls inherit.
OF_A_PIPE: Mapping[str, Callable[[HostResident], Any]] = {
    **COMMON,
    "layers": _layers,
    "model_run_config": lambda facade: object.__getattribute__(facade, "_run_config"),
}
