"""Tensors without values that remember what was done to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Source = tuple[str, Any]
"""What a value goes back to: `("parameter", its name)`, or `("output", (call, leaf))` of a layer call, or the same
with "collected" for what transformers collected inside it."""

# Whoever asks for these wants values, not tensors.
_READS_VALUES = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
# What these make depends on shape and type alone.
_MAKES_NEW = {
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_ones,
    torch.Tensor.new_zeros,
    torch.empty_like,
    torch.full_like,
    torch.ones_like,
    torch.zeros_like,
}
device_of = torch.Tensor.device.__get__
"""What torch calls for `tensor.device`; compare with ==, as each look makes another object."""
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ipow__"}


class CannotFollow(ValueError):  # noqa: N818  a refusal, not a fault
    """A model's forward does something that would not be the same in a pipeline."""


@dataclass(eq=False)
class Op:
    """One call of a torch function with a placeholder among its arguments.

    Attributes:
        function: what was called.
        arguments: `(args, kwargs)`; tensors and placeholders as they were given.
        results: the placeholders it made, None where it made something else.
        glue: what layers returned is among its arguments.
        segment: number of layer calls before it.
        grad: whether gradients were enabled.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[Placeholder | None]
    glue: bool
    grad: bool
    segment: int = 0

    @property
    def in_place(self) -> bool:
        name = self.function.__name__
        return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class Recorder:
    """Collects the operations of one run of a forward, in order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.segment = 0


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Operations on placeholders in this thread go to `recorder`."""
    before = _active.recorder
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = before


class Placeholder(torch.Tensor):
    """Has the shape and dtype of a tensor, and shows its device, but no values.

    Attributes:
        sources: what it was made of.
        op: the operation that made it; None for an origin.
        label: name of the parameter that it stands for, if it is one.
        shown_device: where the tensor would be.
    """

    sources: frozenset[Source]
    op: Op | None
    label: str | None
    shown_device: torch.device

    @staticmethod
    def make(
        meta: torch.Tensor, device: torch.device, sources: frozenset[Source], name: str | None = None
    ) -> Placeholder:
        """A placeholder like `meta`, a tensor on the meta device."""
        made: Placeholder = torch.Tensor._make_subclass(Placeholder, meta.detach(), False)
        made.sources, made.op, made.label, made.shown_device = sources, None, name, device
        return made

    @staticmethod
    def of_parameter(name: str, tensor: torch.Tensor) -> Placeholder:
        """Stands for a parameter or buffer that is not here."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return Placeholder.make(meta, tensor.device, frozenset({("parameter", name)}), name)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({sorted(map(str, self.sources))})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == device_of:
            return args[0].shown_device
        if func in _READS_VALUES:
            raise CannotFollow(
                f"its forward reads the values of what layers returned ({func.__name__}), which are not known yet "
                "when the layers' arguments are made"
            )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        metas: list[Any] = []
        known: dict[int, Any] = {}
        device: torch.device | None = None
        asked: torch.device | None = None
        sources: frozenset[Source] = frozenset()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for leaf in leaves:
                value = leaf
                if isinstance(leaf, Placeholder):
                    value = known.setdefault(id(leaf), leaf.as_subclass(torch.Tensor))
                    device = leaf.shown_device if device is None else device
                    sources |= leaf.sources
                elif isinstance(leaf, torch.Tensor):
                    value = known.setdefault(id(leaf), leaf.detach().to("meta"))
                elif isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf)):
                    asked = torch.device(leaf)
                    value = torch.device("meta")
                metas.append(value)
            meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
            if func in _MAKES_NEW:
                like = func(*meta_args, **{**meta_kwargs, "device": "meta"})
                kwargs = {**kwargs, "device": asked or device}
                return func(torch.empty((), dtype=like.dtype).expand(like.shape), *args[1:], **kwargs)
            result = func(*meta_args, **meta_kwargs)
        result_leaves, result_spec = pytree.tree_flatten(result)
        shown = asked or device or torch.device("cpu")
        glue = any(kind != "parameter" for kind, _ in sources)
        op = Op(func, (args, kwargs), [], glue, torch.is_grad_enabled())
        by_meta = {id(meta): leaf for leaf in leaves if (meta := known.get(id(leaf))) is not None}
        if op.in_place and not (args and isinstance(args[0], Placeholder)):
            raise CannotFollow(f"its forward writes what layers returned into another tensor ({func.__name__})")
        values: list[Any] = []
        for leaf in result_leaves:
            if not isinstance(leaf, torch.Tensor):
                op.results.append(None)
                values.append(leaf)
                continue
            original = by_meta.get(id(leaf))
            if original is None:
                original = Placeholder.make(leaf, shown, sources)
                original.op = op
            op.results.append(original)
            values.append(original)
        if op.in_place and isinstance(args[0], Placeholder):
            args[0].sources |= sources
        recorder = _active.recorder
        if recorder is not None and (op.in_place or any(isinstance(r, Placeholder) for r in op.results)):
            op.segment = recorder.segment
            recorder.ops.append(op)
        return pytree.tree_unflatten(values, result_spec)


def _is_device(text: str) -> bool:
    return text in ("cpu", "meta") or text.split(":")[0] in ("cuda", "xpu", "npu", "mps", "hpu")
