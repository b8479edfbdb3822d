"""A policy and its reference in one model with adapters, told apart by which adapters are active.

PEFT's methods also change which parameters require gradients. Here those stay as they are, because they say what the
pipeline trains: a reference runs without gradients anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def keep_trained(model: Any) -> None:
    """Makes `disable_adapter` and `set_adapter` of a PEFT model leave alone what is trained."""
    model.disable_adapter = functools.partial(_without_adapters, model)
    model.set_adapter = functools.partial(_activate, model)


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    switched = [module for module in model.modules() if vars(module).get("_disable_adapters") is False]
    for module in switched:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switched:
            module._disable_adapters = False


def _activate(model: Any, name: str) -> None:
    for module in model.modules():
        active = vars(module).get("_active_adapter")
        if active is not None:
            module._active_adapter = [name] if isinstance(active, list) else name
    model.active_adapter = model.base_model.active_adapter = name
