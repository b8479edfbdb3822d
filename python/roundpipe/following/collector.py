"""Collects the values that transformers' hooks find inside layers (router logits, attentions), thread by thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

_active: Any = output_capturing._active_collector
_SELECTION = "_hidden_states_layers"


def install(model: nn.Module) -> None:
    """Lets transformers install its hooks in a model now. If they were installed later, in a tree that shares hooks
    with the model's, they would exist twice."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # The modules inside are marked too: one installation is enough.
    if not any(getattr(module, "_output_capturing_hooks_installed", False) for module in inner):
        output_capturing.maybe_install_capturing_hooks(inner[0])


def keys() -> tuple[str, ...]:
    """The keys under which this thread is collecting."""
    collecting = _active.get()
    return () if collecting is None else tuple(collecting)


def place() -> object:
    """The place where this thread collects: the same object during one call of a model."""
    return _active.get()


def counts() -> dict[str, int]:
    """The number of values that this thread has collected so far, by key."""
    collecting = _active.get() or {}
    return {key: len(values) for key, values in collecting.items() if key != _SELECTION}


def since(before: dict[str, int]) -> dict[str, tuple[Any, ...]]:
    """The values that this thread has collected since `counts` returned `before`."""
    collecting = _active.get() or {}
    return {key: tuple(collecting[key][count:]) for key, count in before.items()}


def hidden_states_in(collected: Iterable[dict[str, tuple[Any, ...]]]) -> int:
    """The number of hidden states among the values that calls have collected."""
    return sum(len(values.get("hidden_states", ())) for values in collected)


def add(found: dict[str, tuple[Any, ...]]) -> None:
    """Adds the values that a layer call has collected to this thread's collector."""
    collecting = _active.get()
    if collecting is None:
        return
    for key, values in found.items():
        collecting[key].extend(values)


def selected() -> frozenset[int] | None:
    """The hidden states that this thread collects, by their numbers; None: all."""
    selection = (_active.get() or {}).get(_SELECTION)
    return None if selection is None else frozenset(selection)


@contextmanager
def collecting(
    wanted: tuple[str, ...], selection: frozenset[int] | None, before: int
) -> Iterator[Callable[[], dict[str, tuple[Any, ...]]]]:
    """Collects under the keys `wanted` within the block.

    Args:
        wanted: keys.
        selection: see `selected`.
        before: the number of hidden states that earlier calls have collected into the same place. The first of these
            calls also collects its own input: only it has 0.
    """
    if not wanted:
        yield dict
        return
    active: dict[str, Any] = {key: [None] * before for key in wanted if key != _SELECTION}
    token = _active.set(active if selection is None else {**active, _SELECTION: selection})
    try:
        yield lambda: {key: tuple(values[before:]) for key, values in active.items()}
    finally:
        _active.reset(token)
