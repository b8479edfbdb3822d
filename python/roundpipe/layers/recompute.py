"""What a layer may carry from its forward to its recomputation.

A layer whose forward cannot be repeated from its inputs alone (it read a file, drew from a generator of its own)
saves what it needs with `save_for_recompute` and takes it back when `doing_recompute()` says so. Outside of a
RoundPipe model nothing is saved and `doing_recompute()` is False, so such a layer also runs on its own.
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

# Which execution of a layer: call, layer, microbatch, recompute.
LayerContext = tuple[int, int, int, bool]
_Key = tuple[int, int]


class _Running(threading.local):
    """The execution that this thread is in, how many saved items it has taken, and these on its device."""

    context: LayerContext | None = None
    device: torch.device | None = None
    taken: int = 0
    moved: dict[int, tuple[Any, ...]] | None = None


_running = _Running()
# By call. Without a lock, since the interpreter makes each operation whole and a layer's items belong to one thread.
# The engine drops a call's entry when nothing of it runs any more; were that a Python function, a Ctrl+C that arrives
# inside would be lost.
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
            # An empty list: the forward is over, and has saved nothing.
            _saved.setdefault(context[0], {}).setdefault((context[1], context[2]), [])
    finally:
        _running.context, _running.device, _running.taken, _running.moved = previous


def save_for_recompute(*data: Any) -> None:
    """Keeps `data` (any objects; tensors are copied to the host) for this layer's recomputation."""
    context = _running.context
    if context is None or context[3]:
        return
    with torch.no_grad():
        kept = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), data)
    _saved.setdefault(context[0], {}).setdefault((context[1], context[2]), []).append(kept)


def may_save(module: nn.Module) -> bool:
    """Whether a module, or one inside it, may save something for its recomputation.

    As far as that can be seen: the code of its class names these functions, or the file of the class has imported them.
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


def forget_saved(call: int) -> None:
    """Drops what layers have saved in a call that is not the engine's."""
    _saved.pop(call, None)


def doing_recompute() -> bool:
    """Whether the layer that runs in this thread is being recomputed."""
    return _running.context is not None and _running.context[3]


def get_recompute_data() -> tuple[Any, ...] | None:
    """What the forward has saved, tensors on the device that the layer runs on; None if it has saved nothing.

    Returns the same tuple whenever it is asked. Where the forward has saved several times, the first call returns what
    its first `save_for_recompute` got, the second call the second, and so on.

    Raises:
        AssertionError: not recomputing.
        ValueError: asked more often than the forward has saved, and it has saved more than once; or the layer's code
            does not show that it asks, and it was recomputed before its forward.
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
