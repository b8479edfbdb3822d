"""Models that peft has put adapters into."""

from __future__ import annotations

from typing import Any


def without_adapters(model: Any) -> Any:
    """The model that peft has put adapters into, or `model` itself."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model
