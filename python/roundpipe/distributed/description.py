"""What has to be alike on all nodes, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.compatibility import package_version


def of_model(kind: str, layers: int | None, named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """A model's structure.

    Args:
        kind: the name of its class.
        layers: how many layers it has; None if it has none of its own.
        named: every name of every parameter and buffer.
    """
    told = {
        "the version of roundpipe": package_version(),
        "the version of torch": torch.__version__,
        "fp16 accumulation": str(torch.backends.cuda.matmul.allow_fp16_accumulation),
        "the class": kind,
        "the number of layers": str(layers),
    }
    first: dict[int, str] = {}
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        told[name] = _shape(tensor) if known == name else f"the values of {known}"
    return told


def of_optimizer(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """An optimizer's kind and groups; `named` are its parameters."""
    names = {id(parameter): name for name, parameter in named}
    told = {"the optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        told |= of_options(f" of group {index}", group)
        members = [names.get(id(parameter), "?") for parameter in group["params"]]
        told[f"the parameters of group {index}"] = f"{len(members)} ({', '.join(members)})"
    return told


def of_late_frozen(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """What an optimizer trains and no longer requires grad; nothing if all of it does."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = [name for name, parameter in named if not parameter.requires_grad and id(parameter) in trained]
    return {"frozen since the optimizer was made": ", ".join(frozen)} if frozen else {}


def of_options(whose: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The hyperparameters of a group."""
    return {f"{name}{whose}": _value(value) for name, value in options.items() if name != "params"}


def _value(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def _shape(tensor: Tensor) -> str:
    size = "x".join(map(str, tensor.shape)) or "one"
    told = f"{size} {str(tensor.dtype).removeprefix('torch.')}"
    if not isinstance(tensor, nn.Parameter):
        return told
    if not tensor.is_contiguous():  # the nodes' shards are counted in the order of memory
        told += f", strides {'x'.join(map(str, tensor.stride()))}"
    return told if tensor.requires_grad else f"{told}, frozen"
