"""Values that a layer may carry from its forward to its recompute.

A layer may be unable to repeat its forward from its inputs alone, because it read a file or drew from its own
generator. It saves what it needs with `save_for_recompute` and retrieves it when `doing_recompute()` is True. Outside a
RoundPipe model, nothing is saved and `doing_recompute()` is False, so such a layer also runs on its own.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core

# One execution of a layer: call, layer, microbatch, recompute.
LayerContext = tuple[int, int, int, bool]
_Key = tuple[int, int]


class _Running(threading.local):
    """This thread's current execution, how many saved items it has taken, and these items on its device."""

    context: LayerContext | None = None
    device: torch.device | None = None
    taken: int = 0
    moved: dict[int, tuple[Any, ...]] | None = None


_running = _Running()
# By call. Needs no lock: single operations are atomic in the interpreter, and a layer's items belong to one thread.
# The engine drops a call's entry once nothing of it runs; in a Python function, a Ctrl+C would then be lost.
_saved: dict[int, dict[_Key, list[tuple[Any, ...]]]] = {}
_core.set_saved_by_call(_saved)


@contextmanager
def layer_context(context: LayerContext, device: torch.device | None = None) -> Iterator[None]:
    """Marks this thread as running one execution of a layer, on `device`."""
    previous = _running.context, _running.device, _running.taken, _running.moved
    _running.context, _running.device, _running.taken, _running.moved = context, device, 0, {}
    if not context[3]:
        _saved.get(context[0], {}).pop((context[1], context[2]), None)
    try:
        yield
        if not context[3]:
            # An empty list: the forward has finished and saved nothing.
            _saved.setdefault(context[0], {}).setdefault((context[1], context[2]), [])
    finally:
        _running.context, _running.device, _running.taken, _running.moved = previous


def save_for_recompute(*data: Any) -> None:
    """Keeps `data` (any objects; tensors are copied to the host) for this layer's recompute."""
    context = _running.context
    if context is None or context[3]:
        return
    with torch.no_grad():
        kept = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), data)
    _saved.setdefault(context[0], {}).setdefault((context[1], context[2]), []).append(kept)


def may_save(module: nn.Module) -> bool:
    """Whether a module, or one inside it, may save something for its recompute.

    This is a guess from the source: the code of its class names these functions, or the class's file imports them.
    """
    names = {"save_for_recompute", "get_recompute_data", "doing_recompute"}
    functions = (save_for_recompute, get_recompute_data, doing_recompute)

    def mentions(code: types.CodeType) -> bool:
        return not names.isdisjoint(code.co_names) or any(
            mentions(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
        )

    for kind in {kind for inner in module.modules() for kind in type(inner).__mro__}:
        if kind.__module__.startswith("torch."):
            continue
        codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
        scope = vars(sys.modules.get(kind.__module__, torch))
        if any(map(mentions, codes)) or any(scope.get(function.__name__) is function for function in functions):
            return True
    return False


def doing_recompute() -> bool:
    """Whether the layer that runs in this thread is being recomputed."""
    return _running.context is not None and _running.context[3]


def get_recompute_data() -> tuple[Any, ...] | None:
    """Returns what the forward saved, with tensors on the layer's device; None if it saved nothing.

    If the forward saved once, every call returns the same tuple. If it saved several times, the first call returns the
    arguments of the first `save_for_recompute`, the second call those of the second, and so on.

    Raises:
        AssertionError: not recomputing.
        ValueError: called more often than the forward saved, which was more than once; or the layer's code does not
            show that it calls this function, and it was recomputed before its forward.
    """
    context = _running.context
    if context is None or not context[3]:
        raise AssertionError("[get_recompute_data] no layer is being recomputed; call it only if doing_recompute()")
    items = _saved.get(context[0], {}).get((context[1], context[2]))
    if items is None:
        raise ValueError(
            "[get_recompute_data] the layer was recomputed ahead of its forward, as nothing in the code of its "
            "classes names get_recompute_data; call it in a method of the layer, or import it in the layer's file"
        )
    if not items:
        return None
    if len(items) > 1 and _running.taken >= len(items):
        raise ValueError(
            f"[get_recompute_data] asked {_running.taken + 1} times, but the forward saved {len(items)} times; "
            "call save_for_recompute in the forward once for each"
        )
    index = min(_running.taken, len(items) - 1)
    _running.taken += 1
    device, moved = _running.device, _running.moved
    if device is None or device.type == "cpu" or moved is None:
        return items[index]
    if index not in moved:
        moved[index] = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), items[index])
    return moved[index]
