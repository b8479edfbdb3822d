"""Tells whether the running code belongs to an optimizer step."""

from __future__ import annotations

import threading
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class OptimizerCtx:
    """Makes `model.parameters()` return the optimizer's parameters inside the context.

    It covers the current thread only, may be nested, and one instance may be entered more than once.
    `model.step` enters it around the step function; enter it by hand to build an optimizer.
    """

    def __enter__(self) -> OptimizerCtx:
        _depth.value += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _depth.value -= 1


def in_optimizer_context() -> bool:
    """Whether the current thread is inside an `OptimizerCtx`."""
    return _depth.value > 0
