"""Tensors without values that remember the operations on them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Origin = tuple[str, Any]
"""The origin of a value: `("parameter", its name)`, or "late" for one that is used after the first layer call, or
`("output", (call, leaf))` of a layer call, or the same with "collected" for a value that transformers collected inside
the call."""
Made = tuple[Any, ...]
"""Names a value that exists before the last layer is called: `("output", call, leaf)`, `("tower", call, leaf)` of a
module that is called before the layers, `("input", path)` of the model's arguments, or `("op", segment, number,
result)` of a glue operation, by its number in its segment. The same in every run that is called alike."""

# Callers of these need values, not tensors.
_READS_VALUES = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
# The results of these depend only on shape and type.
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
# These take only the shape or the type of their second argument.
_LIKE_ANOTHER = {torch.Tensor.expand_as, torch.Tensor.reshape_as, torch.Tensor.type_as, torch.Tensor.view_as}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
device_of = torch.Tensor.device.__get__
"""The function that torch calls for `tensor.device`; compare with ==, because each access makes another object."""
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ipow__"}


WITHOUT_VALUES = (ArithmeticError, LookupError, RuntimeError, TypeError)
"""What code raises that runs without the values that it needs: in torch or in Python, over a size, a key or a type. Who
expects AttributeError, too, or ValueError, among which `CannotFollow` is, adds it."""


class CannotFollow(ValueError):  # noqa: N818  a refusal, not a fault
    """A model's forward does something that a pipeline could not reproduce."""


@dataclass(eq=False)
class Op:
    """One call of a torch function with a placeholder among its arguments.

    Attributes:
        function: the called function.
        arguments: `(args, kwargs)`; tensors and placeholders as given.
        results: the placeholders it made, None for other results.
        glue: whether it must be repeated after a layer: its arguments include a layer's output, or a parameter that is
            used then.
        segment: number of layer calls before it.
        number: its number among the glue of its segment.
        grad: whether gradients were enabled.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    results: list[Placeholder | None]
    glue: bool
    grad: bool
    segment: int = 0
    number: int = 0

    @property
    def in_place(self) -> bool:
        name = self.function.__name__
        return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class Recorder:
    """Collects the operations of one run of a forward, in order.

    Args:
        known: values that placeholders of this run have received in the meantime.

    Attributes:
        segment: number of layer calls so far.
        ended: whether the last call has finished, so that known values are used.
    """

    def __init__(self, known: Mapping[Made, torch.Tensor] | None = None) -> None:
        self.ops: list[Op] = []
        self.segment = 0
        self.ended = False
        self._known = known or {}
        self._glue = 0

    def called(self) -> None:
        """Notes that a layer call has finished."""
        self.segment += 1
        self._glue = 0

    def add(self, op: Op) -> None:
        """Records an operation."""
        op.segment, op.number = self.segment, self._glue
        self.ops.append(op)
        if not op.glue:
            return
        self._glue += 1
        for index, result in enumerate(op.results):
            if result is not None and self._known:
                self.tell(result, ("op", op.segment, op.number, index))

    def tell(self, placeholder: Placeholder, made: Made) -> None:
        """Gives a placeholder its value, if the value is known."""
        value = self._known.get(made)
        if value is not None:
            placeholder.value = value


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Sends operations on placeholders in this thread to `recorder`."""
    before = _active.recorder
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = before


class Placeholder(torch.Tensor):
    """Has a tensor's shape and dtype and shows its device, but has no values.

    Attributes:
        origins: the origins of its value.
        op: the operation that made it; None for an origin.
        label: name of the parameter that it stands for, if any.
        shown_device: the device that the tensor would be on.
        made: the place where a layer call made it.
        writers: the operations that have changed it in place.
        value: the tensor, if it is already known.
    """

    origins: frozenset[Origin]
    op: Op | None
    label: str | None
    shown_device: torch.device
    made: Made | None
    writers: list[Op]
    value: torch.Tensor | None

    @staticmethod
    def make(
        meta: torch.Tensor,
        device: torch.device,
        origins: frozenset[Origin],
        name: str | None = None,
        made: Made | None = None,
    ) -> Placeholder:
        """Makes a placeholder like `meta`, a tensor on the meta device."""
        new: Placeholder = torch.Tensor._make_subclass(Placeholder, meta.detach(), False)
        new.origins, new.op, new.label, new.shown_device, new.value = origins, None, name, device, None
        new.made, new.writers = made, []
        return new

    @staticmethod
    def of_parameter(name: str, tensor: torch.Tensor, kind: str = "parameter") -> Placeholder:
        """Makes a placeholder for an absent parameter or buffer, as an origin of this kind."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return Placeholder.make(meta, tensor.device, frozenset({(kind, name)}), name)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placeholder({sorted(map(str, self.origins))})"

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
        recorder = _active.recorder
        if recorder is not None and recorder.ended:
            args, kwargs = with_values((args, kwargs))
            if not any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves((args, kwargs))):
                return func(*args, **kwargs)
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
        origins: frozenset[Origin] = frozenset()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for leaf in leaves:
                value = leaf
                if isinstance(leaf, Placeholder):
                    value = known.setdefault(id(leaf), leaf.as_subclass(torch.Tensor))
                    device = leaf.shown_device if device is None else device
                    origins |= leaf.origins
                elif isinstance(leaf, torch.Tensor):
                    value = known.setdefault(id(leaf), leaf.detach().to("meta"))
                elif isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf)):
                    asked = torch.device(leaf)
                    value = torch.device("meta")
                metas.append(value)
            meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
            if func in _INDEXED and len(args) > 1:
                meta_args = (meta_args[0], _without_masks(args[1]), *meta_args[2:])
            if func in _MAKES_NEW:
                like = func(*meta_args, **{**meta_kwargs, "device": "meta"})
                kwargs = {**kwargs, "device": asked or device}
                return func(torch.empty((), dtype=like.dtype).expand(like.shape), *args[1:], **kwargs)
            if func in _LIKE_ANOTHER and not isinstance(args[0], Placeholder):
                like = kwargs["other"] if len(args) == 1 else args[1]
                return func(args[0], torch.empty((), dtype=like.dtype).expand(like.shape))
            result = func(*meta_args, **meta_kwargs)
        result_leaves, result_spec = pytree.tree_flatten(result)
        shown = asked or device or torch.device("cpu")
        glue = any(kind != "parameter" for kind, _ in origins)
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
                original = Placeholder.make(leaf, shown, origins)
                original.op = op
            op.results.append(original)
            values.append(original)
        if op.in_place and isinstance(args[0], Placeholder):
            args[0].origins |= origins
            args[0].writers.append(op)
        if recorder is not None and (op.in_place or any(isinstance(r, Placeholder) for r in op.results)):
            recorder.add(op)
        return pytree.tree_unflatten(values, result_spec)


def _without_masks(index: Any) -> Any:
    """An index for a tensor on the meta device: the number of elements that a mask selects depends on its values."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Placeholder):
            parts.append(part.as_subclass(torch.Tensor))
        elif isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim():
            parts.extend(where.to("meta") for where in part.nonzero(as_tuple=True))
        elif isinstance(part, torch.Tensor):
            parts.append(part.to("meta"))
        else:
            parts.append(part)
    return tuple(parts) if isinstance(index, tuple) or len(parts) != 1 else parts[0]


def with_values(tree: Any) -> Any:
    """The pytree with placeholders replaced by their values, where known."""

    def value_of(placeholder: Placeholder) -> torch.Tensor:
        return placeholder if placeholder.value is None else placeholder.value

    return pytree.tree_map_only(Placeholder, value_of, tree)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
