"""`model.forward` of a model in the pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from roundpipe.model.host_resident import HostResident

NAMES = frozenset({"forward", "_original_forward"})
"""Names of `model.forward` that may be assigned; accelerate keeps the forward that it wraps under the second."""


class ModelForward:
    """Calls the pipeline with the signature of the original model's forward, which data collators inspect."""

    __name__ = "forward"

    def __init__(self, model: HostResident, run: Callable[..., Any]) -> None:
        self.__self__ = model
        self._run = run
        self.__doc__ = run.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<forward of {type(self.__self__).__name__}({type(self.__self__._original_model).__name__})>"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__._original_model.forward)


def refuse_assigned(model: HostResident, where: str) -> None:
    """Raises ValueError if `model.forward` was assigned, because `where` does not call it."""
    if "forward" in model.__dict__:
        raise ValueError(
            f"[{where}] model.forward was assigned (accelerate does that for mixed precision), and {where} does not go "
            "through it; expected model(...) and loss.backward() here, or `del model.forward` first, with "
            f"torch.autocast around {where}"
        )
