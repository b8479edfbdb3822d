"""What a layer may carry from its forward to its recomputation.

A layer whose forward cannot be repeated from its inputs alone (it read a file, drew from a generator of its own)
saves what it needs with `save_for_recompute` and takes it back when `doing_recompute()` says so. Outside of a
RoundPipe model nothing is saved and `doing_recompute()` is False, so such a layer also runs on its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe import _core

# Which execution of a layer: call, layer, microbatch, recompute.
LayerContext = tuple[int, int, int, bool]
_Key = tuple[int, int]


class _Running(threading.local):
    """The execution that this thread is in, and how many saved items it has taken."""

    context: LayerContext | None = None
    taken: int = 0


_running = _Running()
# By call. Without a lock, since the interpreter makes each operation whole and a layer's items belong to one thread.
# The engine drops a call's entry when nothing of it runs any more; were that a Python function, a Ctrl+C that arrives
# inside would be lost.
_saved: dict[int, dict[_Key, list[tuple[Any, ...]]]] = {}
_core.set_saved_by_call(_saved)


@contextmanager
def layer_context(context: LayerContext) -> Iterator[None]:
    """Marks this thread as running one execution of a layer."""
    previous, previous_taken = _running.context, _running.taken
    _running.context, _running.taken = context, 0
    if not context[3]:
        _saved.get(context[0], {}).pop((context[1], context[2]), None)
    try:
        yield
    finally:
        _running.context, _running.taken = previous, previous_taken


def save_for_recompute(*data: Any) -> None:
    """Keeps `data` (any objects; tensors are copied to the host) for this layer's recomputation."""
    context = _running.context
    if context is None or context[3]:
        return
    with torch.no_grad():
        kept = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), data)
    _saved.setdefault(context[0], {}).setdefault((context[1], context[2]), []).append(kept)


def forget_saved(call: int) -> None:
    """Drops what layers have saved in a call that is not the engine's."""
    _saved.pop(call, None)


def doing_recompute() -> bool:
    """Whether the layer that runs in this thread is being recomputed."""
    return _running.context is not None and _running.context[3]


def get_recompute_data() -> tuple[Any, ...]:
    """What the forward saved: the first call returns what its first `save_for_recompute` got, and so on.

    Tensors are on the CPU.

    Raises:
        ValueError: not recomputing, or asked more often than something was saved.
    """
    context = _running.context
    if context is None or not context[3]:
        raise ValueError("[get_recompute_data] no layer is being recomputed; call it only if doing_recompute()")
    items = _saved.get(context[0], {}).get((context[1], context[2]), [])
    if _running.taken >= len(items):
        raise ValueError(
            f"[get_recompute_data] asked {_running.taken + 1} times, but the forward saved {len(items)} times; "
            "call save_for_recompute in the forward once for each"
        )
    data = items[_running.taken]
    _running.taken += 1
    return data
