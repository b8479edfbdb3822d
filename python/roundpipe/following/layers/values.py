"""Pytrees in the engine's form: a list of tensors, and a structure that says how to join them."""

from __future__ import annotations

import array
import copy
import enum
import types
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


class _Slot:
    """Marks the place of a tensor in a structure."""

    __slots__ = ()


_SLOT = _Slot()
_PLAIN = (_Slot, type(None), bool, int, float, complex, str, bytes)


class Structure:
    """A pytree without its tensors.

    Args:
        leaves: the leaves, with a marker for each tensor.
        spec: torch's tree spec.
        is_call: whether the tree is `(args, kwargs)` of a call instead of one value.
    """

    __slots__ = ("is_call", "leaves", "spec")

    def __init__(self, leaves: list[Any], spec: pytree.TreeSpec, is_call: bool) -> None:
        self.leaves = leaves
        self.spec = spec
        self.is_call = is_call

    def check_open(self, where: str) -> None:
        """Checks that no leaf is an object that contains tensors with gradients: these would not be transferred.

        Raises:
            ValueError: a leaf is such an object.
        """
        for leaf in self.leaves:
            if type(leaf) in _PLAIN or not hasattr(leaf, "__dict__"):
                continue
            for inner in pytree.tree_leaves(vars(leaf)):
                if isinstance(inner, torch.Tensor) and inner.grad_fn is not None:
                    name = type(leaf).__name__
                    raise ValueError(
                        f"[{where}] a {name} holds tensors that carry gradients, but torch does not know it as a "
                        "container, so they cannot be moved or differentiated; use a tuple, list or dict, or register "
                        f"the class: torch.utils._pytree.register_dataclass({name})"
                    )

    def join(self, tensors: list[torch.Tensor]) -> Any:
        """Returns the pytree with `tensors` in their places."""
        remaining = iter(tensors)
        return pytree.tree_unflatten([next(remaining) if leaf is _SLOT else leaf for leaf in self.leaves], self.spec)


def split(value: Any, is_call: bool = False) -> tuple[list[torch.Tensor], Structure]:
    """Splits a pytree into its tensors, in order, and its structure."""
    if type(value) is torch.Tensor:
        return [value], _SINGLE_CALL if is_call else _SINGLE
    if value is None and not is_call:
        return [], _NOTHING
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    marked = [_SLOT if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tensors, Structure(marked, spec, is_call)


_LEAF_SPEC = pytree.tree_flatten(0)[1]
_NOTHING = Structure([None], _LEAF_SPEC, is_call=False)
_SINGLE = Structure([_SLOT], _LEAF_SPEC, is_call=False)
_SINGLE_CALL = Structure([_SLOT], _LEAF_SPEC, is_call=True)


# Types that cannot be changed, or that are copied so that the caller cannot change them.
_CONSTANT = (
    *_PLAIN,
    *(range, slice, type, types.FunctionType, types.BuiltinFunctionType, enum.Enum, frozenset, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor),
)
_COPIED = (np.ndarray, bytearray, array.array, set)


def owned(value: Any) -> tuple[Any, bool]:
    """Takes ownership of a pytree's leaves other than tensors, which the engine copies.

    Returns:
        The pytree with arrays copied, and whether it holds other objects that its owner may change. A call that reads
        such objects must finish before its caller continues.
    """
    leaves, spec = pytree.tree_flatten(value)
    if all(isinstance(leaf, _CONSTANT) for leaf in leaves):
        return value, False
    leaves = [copy.copy(leaf) if isinstance(leaf, _COPIED) else leaf for leaf in leaves]
    changeable = any(not isinstance(leaf, (*_CONSTANT, *_COPIED)) for leaf in leaves)
    return pytree.tree_unflatten(leaves, spec), changeable


def to_host(value: Any, where: str) -> Any:
    """Moves every tensor of a pytree to the CPU and keeps the autograd history.

    Raises:
        ValueError: a tensor has no data (meta), or is of a kind that cannot be transferred (sparse, nested, quantised).
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            raise ValueError(f"[{where}] a tensor {tuple(tensor.shape)} is on the meta device, expected one with data")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise ValueError(
                f"[{where}] a tensor {tuple(tensor.shape)} is {tensor.layout}, expected a dense strided tensor; "
                "convert it inside a layer instead"
            )
        return tensor.cpu() if tensor.device.type != "cpu" else tensor

    return pytree.tree_map_only(torch.Tensor, move, value)
