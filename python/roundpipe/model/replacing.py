"""Methods of a model that replace its parameters, which is too late once an optimizer holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

REPLACING = frozenset(
    {"resize_token_embeddings", "set_input_embeddings", "set_output_embeddings", "resize_position_embeddings"}
)
"""Names of such methods, as models of transformers have them."""


def guarded(name: str, method: Callable[..., Any], may_replace: Callable[[], bool]) -> Callable[..., Any]:
    """The method, refused before it changes anything where the pipeline could not follow.

    Args:
        name: of the method.
        method: the original model's.
        may_replace: whether the pipeline takes over what is replaced.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not may_replace():
            raise ValueError(
                f"[{name}] it would replace parameters that an optimizer or the pipeline holds, expected none to; call "
                "it before an optimizer is made, or better before the model is wrapped"
            )
        return method(*args, **kwargs)

    return call


def refuse_compiling(*_: Any, **__: Any) -> None:
    """In the place of a wrapped model's `compile`, which would compile what never runs as a whole."""
    raise ValueError(
        "[compile] the model is in the pipeline, where its layers run one by one, expected a plain model; compile each "
        "layer before wrapping: for layer in layers: layer.compile()"
    )
