"""Models wrapped by peft."""

from __future__ import annotations

from typing import Any


def without_adapters(model: Any) -> Any:
    """Returns the model inside a peft model, or `model` itself."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model
