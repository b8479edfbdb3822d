"""Shapes of a layer call's output, in terms of its arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.placeholder import CannotFollow, Placeholder

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""`(args, kwargs)` of a layer call."""


@dataclass(frozen=True)
class Like:
    """A size equal to dimension `dim` of the hidden states; -1 stands for rows times tokens."""

    dim: int


@dataclass(frozen=True)
class OfArgument:
    """A size equal to dimension `dim` of another tensor argument, given by its place among the arguments."""

    path: str
    dim: int


@dataclass(frozen=True)
class RowsTimes:
    """A size that is a multiple of the rows of the hidden states."""

    factor: int


@dataclass(frozen=True)
class Computed:
    """A size that only running the layer on shapes can tell, such as that of a picture behind a convolution."""


Size = int | Like | OfArgument | RowsTimes | Computed


@dataclass(frozen=True)
class LeafShape:
    """A tensor that a layer call returns.

    Attributes:
        sizes: of each dimension.
        dtype: None for the dtype of the hidden states.
    """

    sizes: tuple[Size, ...]
    dtype: torch.dtype | None


def _is_hidden(leaf: Any, dims: int) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() >= dims


def hidden_states(arguments: Arguments) -> torch.Tensor:
    """The tensor [rows, tokens, ...] that a layer is called with; [rows, ...] if no tensor has three dimensions.

    Raises:
        CannotFollow: there is no tensor of floating-point numbers.
    """
    args, kwargs = arguments
    for leaf in itertools.chain(args, kwargs.values()):
        if _is_hidden(leaf, 3):
            return leaf
    leaves = pytree.tree_leaves(arguments)
    for dims in (3, 2):
        for leaf in leaves:
            if _is_hidden(leaf, dims):
                return leaf
    raise CannotFollow("a layer is called without hidden states of [batch, tokens, ...]")


def _tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    named = pytree.tree_flatten_with_path(arguments)[0]
    return {pytree.keystr(path): leaf for path, leaf in named if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True)
class OutputShape:
    """The output of a layer call: a pytree whose leaves are tensors of known shapes, or plain values."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(value: Any, arguments: Arguments) -> OutputShape:
        """Describes the output of a call with `arguments`: its sizes are matched with sizes of the arguments."""
        leaves, spec = pytree.tree_flatten(value)
        like = hidden_states(arguments)
        others = _tensors(arguments)
        return OutputShape(spec, tuple(_leaf_shape(leaf, like, others) for leaf in leaves))

    def placeholders(self, call: int, layer: nn.Module, arguments: Arguments, kind: str = "output") -> list[Any]:
        """The leaves of a call's output, with tensors as placeholders.

        Args:
            call: the call's number.
            layer: the called layer.
            arguments: the call's arguments.
            kind: the kind of origin, see `Origin`.
        """
        like = hidden_states(arguments)
        computed: list[Any] | None = None
        device = like.shown_device if isinstance(like, Placeholder) else like.device
        made: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, LeafShape):
                made.append(leaf)
                continue
            if any(isinstance(size, Computed) for size in leaf.sizes):
                computed = _run_on_shapes(layer, arguments) if computed is None else computed
                sizes = list(computed[index].shape)
            else:
                sizes = _sizes(leaf.sizes, like, arguments)
            meta = torch.empty(sizes, dtype=leaf.dtype or like.dtype, device="meta")
            placeholder = Placeholder.make(meta, device, frozenset({(kind, (call, index))}))
            placeholder.made = (kind, call, index) if kind == "output" else None
            made.append(placeholder)
        return made


def _leaf_shape(leaf: Any, like: torch.Tensor, others: dict[str, torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.shape == like.shape:
        sizes: list[Size] = [Like(dim) for dim in range(leaf.dim())]
    elif leaf.is_floating_point() and (like.dim() > 3 and leaf.dim() == like.dim()):
        sizes = [Computed()] * leaf.dim()
    else:
        sizes = [_size(size, dim, like, others) for dim, size in enumerate(leaf.shape)]
    return LeafShape(tuple(sizes), None if leaf.dtype == like.dtype else leaf.dtype)


def _size(size: int, dim: int, like: torch.Tensor, others: dict[str, torch.Tensor]) -> Size:
    if size == 1:
        return 1
    # Features come last, and their number is the same in every call.
    varying = range(like.dim() - 1)
    for place in sorted(varying, key=lambda place: place != dim):
        if like.shape[place] == size:
            return Like(place)
    if like.dim() > 2 and like.shape[:2].numel() == size:
        return Like(-1)
    for path, other in others.items():
        for place, there in enumerate(other.shape[:-1] if other.is_floating_point() else other.shape):
            if there == size:
                return OfArgument(path, place)
    if dim == 0 and like.shape[0] > 1 and size % like.shape[0] == 0:
        return RowsTimes(size // like.shape[0])
    return size


def _run_on_shapes(layer: nn.Module, arguments: Arguments) -> list[Any]:
    """Runs a layer on shapes, without values, and returns its output's leaves."""
    tensors = [*layer.parameters(), *layer.buffers()]
    without = {id(t): torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors}
    shadow = ShadowTree(layer, without).root
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(torch.Tensor).to("meta"), arguments)
    with torch.no_grad():
        return pytree.tree_leaves(shadow(*args, **kwargs))


def _sizes(sizes: Iterable[Size], like: torch.Tensor, arguments: Arguments) -> list[int]:
    others: dict[str, torch.Tensor] | None = None
    found: list[int] = []
    for size in sizes:
        if isinstance(size, int):
            found.append(size)
        elif isinstance(size, RowsTimes):
            found.append(like.shape[0] * size.factor)
        elif isinstance(size, Like):
            found.append(like.shape[:2].numel() if size.dim < 0 else like.shape[size.dim])
        elif isinstance(size, OfArgument):
            others = _tensors(arguments) if others is None else others
            if size.path not in others or others[size.path].dim() <= size.dim:
                raise CannotFollow(f"a layer is called without the argument {size.path} it had when it was wrapped")
            found.append(others[size.path].shape[size.dim])
    return found
