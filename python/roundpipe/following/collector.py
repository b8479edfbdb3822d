"""What transformers collects inside layers (router logits, attentions); its hooks write to the thread's collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

_active: Any = output_capturing._active_collector
_SELECTION = "_hidden_states_layers"


def install(model: nn.Module) -> None:
    """Lets transformers put its hooks into a model now. Put in later, into a tree that shares hooks with the model's,
    they would be there twice."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # Those inside are marked, too: once is enough.
    if not any(getattr(module, "_output_capturing_hooks_installed", False) for module in inner):
        output_capturing.maybe_install_capturing_hooks(inner[0])


def keys() -> tuple[str, ...]:
    """Under what something is being collected in this thread."""
    collecting = _active.get()
    return () if collecting is None else tuple(collecting)


def place() -> object:
    """Where this thread collects: the same object as long as it is for the same call of a model."""
    return _active.get()


def counts() -> dict[str, int]:
    """How much this thread has collected so far, by key."""
    collecting = _active.get() or {}
    return {key: len(values) for key, values in collecting.items() if key != _SELECTION}


def since(before: dict[str, int]) -> dict[str, tuple[Any, ...]]:
    """What this thread has collected since `counts` returned `before`."""
    collecting = _active.get() or {}
    return {key: tuple(collecting[key][count:]) for key, count in before.items()}


def add(found: dict[str, tuple[Any, ...]]) -> None:
    """Adds what a layer call has collected to this thread's collector."""
    collecting = _active.get()
    if collecting is None:
        return
    for key, values in found.items():
        collecting[key].extend(values)


@contextmanager
def collecting(wanted: tuple[str, ...], first: bool) -> Iterator[Callable[[], dict[str, tuple[Any, ...]]]]:
    """Collects under the keys `wanted` within the block.

    Args:
        wanted: keys.
        first: of the calls that collect into one place: the first one also collects what goes into it.
    """
    if not wanted:
        yield dict
        return
    # A list that is not empty keeps the hooks from taking the input of this layer for that of the first.
    before = [] if first else [None]
    active: dict[str, list[Any]] = {key: list(before) for key in wanted if key != _SELECTION}
    token = _active.set(active)
    try:
        yield lambda: {key: tuple(values[len(before) :]) for key, values in active.items()}
    finally:
        _active.reset(token)
