"""A batch on its way through the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundpipe import _core


class Pending:
    """A batch that `RoundPipe.submit` has started.

    Args:
        submitted: the batch, as the engine has it.
        finish: waits for it, and gives what `forward_backward` returns.
    """

    def __init__(self, submitted: _core.Submitted, finish: Callable[[], Any]) -> None:
        self._submitted = submitted
        self._finish = finish

    def loss(self) -> Any:
        """What `forward_backward` returns; waits for it. Once.

        Raises:
            ValueError: it has been read already.
            Exception: what `forward_backward` raises.
        """
        return self._finish()

    def records(self) -> list[_core.Record]:
        """What has been executed of it so far, see `RoundPipe.last_records`, and when a backward had recomputed and
        how long it then waited, in ms."""
        return self._submitted.records()
