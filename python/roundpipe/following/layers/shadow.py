"""A second tree of modules over other tensors."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from roundpipe import _core

_STATE = ("_parameters", "_buffers", "_modules")
_DEEPEST_ATTRIBUTE = 6

# By id of a module: its `__dict__` at one moment. Never changed, so threads may share it.
Attributes = Mapping[int, dict[str, Any]]


def attributes_of(modules: Iterable[nn.Module], before: Attributes) -> Attributes:
    """The modules' current attributes; unchanged entries, or the whole mapping, are the same objects as in `before`."""
    now: dict[int, dict[str, Any]] = {}
    changed = False
    for module in modules:
        kept = before.get(id(module))
        if kept is None or not _core.same_items(module.__dict__, kept):
            kept, changed = dict(module.__dict__), True
        now[id(module)] = kept
    return now if changed else before


class _Seen(threading.local):
    """The attributes that shadows use in this thread; modules without an entry are read directly."""

    attributes: Attributes = types.MappingProxyType({})


_seen = _Seen()


@contextmanager
def seeing(attributes: Attributes) -> Iterator[None]:
    """Makes trees that this thread makes or refreshes see modules as they were when `attributes` were taken."""
    previous = _seen.attributes
    _seen.attributes = attributes
    try:
        yield
    finally:
        _seen.attributes = previous


def _attributes_seen(module: nn.Module) -> dict[str, Any]:
    seen = _seen.attributes.get(id(module))
    # A copy, because another thread may be adding attributes.
    return dict(module.__dict__) if seen is None else seen


def _compiled_again(compiled: types.FunctionType, code: Any) -> Any:
    """Compiles `code` with the options that `nn.Module.compile` used for the original."""
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    if "self" not in cells:  # torch's compiling context, which holds the options
        raise ValueError(
            "[RoundPipe] a layer was compiled in a way that this version does not know, so that its options would be "
            "lost; use torch.compile(layer, ...) in the layer's place instead of layer.compile(...)"
        )
    return cells["self"].cell_contents(code)


class ShadowTree:
    """Shares code and plain attributes with a tree of modules, but has its own parameters and buffers.

    Args:
        root: the root of the original tree.
        tensors: maps the id of an original parameter or buffer to its replacement; all others are shared.
    """

    def __init__(self, root: nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors
        self._originals = {id(module): module for module in root.modules()}
        self._modules: dict[int, nn.Module] = {}
        self._taken_over: dict[int, dict[str, Any]] = {}
        self.root = self._module(root)
        self._owned_buffers = [
            (module, name, buffer)
            for module in self._modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def of(self, original: nn.Module) -> nn.Module:
        """The shadow of a module of the tree."""
        return self._modules[id(original)]

    def _module(self, original: nn.Module) -> nn.Module:
        """The shadow of a module of the tree, made on first use."""
        existing = self._modules.get(id(original))
        if existing is not None:
            return existing
        shadow: nn.Module = type(original).__new__(type(original))
        self._modules[id(original)] = shadow
        state = shadow.__dict__
        state["_parameters"] = self._mapped(original._parameters)
        state["_buffers"] = self._mapped(original._buffers)
        state["_modules"] = {}
        for name, child in original._modules.items():
            state["_modules"][name] = None if child is None else self._module(child)
        self._copy_attributes(original, shadow, _attributes_seen(original))
        return shadow

    def _mapped(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: None if tensor is None else self._tensors.get(id(tensor), tensor) for name, tensor in tensors.items()
        }

    def _copy_attributes(self, original: nn.Module, shadow: nn.Module, seen: dict[str, Any]) -> None:
        attributes = {name: value for name, value in seen.items() if name not in _STATE}
        previous = {name for name in shadow.__dict__ if name not in _STATE}
        for name, value in attributes.items():
            if name == "_compiled_call_impl" and isinstance(value, types.FunctionType):
                value = _compiled_again(value, shadow._call_impl)
            shadow.__dict__[name] = self._remapped(value, 0)
        for name in previous - attributes.keys():
            if id(original) in self._taken_over:
                shadow.__dict__.pop(name)
        self._taken_over[id(original)] = seen
        compiled = sys.modules.get("torch._dynamo.eval_frame")  # slow to import; without it, nothing is compiled
        if compiled is not None and isinstance(original, compiled.OptimizedModule):
            shadow._initialize()  # type: ignore[operator]

    def _remapped(self, value: Any, depth: int) -> Any:
        """Returns `value` with modules and tensors of the tree replaced by their shadows; the same object if none."""
        if isinstance(value, nn.Module):
            return self._module(value) if id(value) in self._originals else value
        if isinstance(value, torch.Tensor):
            return self._tensors.get(id(value), value)
        if depth >= _DEEPEST_ATTRIBUTE:
            return value
        if isinstance(value, types.MethodType):
            target = self._remapped(value.__self__, depth + 1)
            return value if target is value.__self__ else types.MethodType(value.__func__, target)
        if type(value) is functools.partial:
            parts = [value.func, list(value.args), dict(value.keywords)]
            mapped = self._remapped(parts, depth + 1)
            return value if mapped is parts else functools.partial(mapped[0], *mapped[1], **mapped[2])
        if type(value) in (list, tuple, set):
            items = list(value)
            new_items = [self._remapped(item, depth + 1) for item in items]
            return value if all(map(operator.is_, items, new_items)) else type(value)(new_items)
        if type(value) is dict:
            new_values = {key: self._remapped(item, depth + 1) for key, item in value.items()}
            return value if all(map(operator.is_, value.values(), new_values.values())) else new_values
        return value

    def refresh(self) -> bool:
        """Takes over changed attributes of the original modules; returns whether there were any."""
        changed = False
        for key, original in self._originals.items():
            taken_over = self._taken_over[key]
            # Compared without a copy, which takes longer: no other thread runs meanwhile.
            if not _core.same_items(_seen.attributes.get(key, original.__dict__), taken_over):
                self._copy_attributes(original, self._modules[key], _attributes_seen(original))
                changed = True
        return changed

    def bring_back_buffers(self) -> None:
        """Copies buffers that a forward replaced with new tensors into the tree's original buffers."""
        for module, name, buffer in self._owned_buffers:
            current = module._buffers.get(name)
            if current is buffer:
                continue
            if current is None or current.shape != buffer.shape or current.dtype != buffer.dtype:
                raise ValueError(
                    f"[forward] buffer '{name}' of {type(module).__name__} became "
                    f"{None if current is None else (tuple(current.shape), current.dtype)}, expected "
                    f"{(tuple(buffer.shape), buffer.dtype)} as when the model was wrapped; keep its shape and dtype"
                )
            with torch.no_grad():
                buffer.copy_(current)
            module._buffers[name] = buffer
