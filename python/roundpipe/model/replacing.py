"""Methods that replace a model's parameters: they are refused once an optimizer holds the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

REPLACING = frozenset(
    {"resize_token_embeddings", "set_input_embeddings", "set_output_embeddings", "resize_position_embeddings"}
)
"""Names of such methods in transformers models."""


def guarded(name: str, method: Callable[..., Any], may_replace: Callable[[], bool]) -> Callable[..., Any]:
    """Wraps a method so that it is refused, before it changes anything, if the pipeline could not follow.

    Args:
        name: the method's name.
        method: the original model's method.
        may_replace: whether the pipeline can take over replaced parameters.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not may_replace():
            raise ValueError(
                f"[{name}] it would replace parameters that an optimizer or the pipeline holds; call "
                "it before an optimizer is made, or better before the model is wrapped"
            )
        return method(*args, **kwargs)

    return call


def refuse_compiling(*_: Any, **__: Any) -> None:
    """Replaces a wrapped model's `compile`, which would compile a forward that never runs as a whole."""
    raise ValueError(
        "[compile] the model is in the pipeline, where its layers run one by one, expected a plain model; compile each "
        "layer before wrapping: for layer in layers: layer.compile()"
    )
