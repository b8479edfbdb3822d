"""A batch in flight in the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundpipe import _core

RecordFields = tuple[str, int, int, int, int, float, float, float, float]


def record_fields(record: _core.Record) -> RecordFields:
    """A record in its public form."""
    return (
        record.phase,
        record.layers.first,
        record.layers.last,
        record.microbatch,
        record.device,
        record.start_ms,
        record.end_ms,
        record.recomputed_ms,
        record.waited_ms,
    )


class Pending:
    """A batch that `RoundPipe.submit` has started.

    Args:
        submitted: the engine's handle of the batch.
        finish: waits for the batch and returns the result of `forward_backward`.
    """

    def __init__(self, submitted: _core.Submitted, finish: Callable[[], Any]) -> None:
        self._submitted = submitted
        self._finish = finish

    def loss(self) -> Any:
        """Waits for the result of `forward_backward` and returns it. May be called once.

        Raises:
            ValueError: the loss has been read already.
            Exception: whatever `forward_backward` raises.
        """
        return self._finish()

    def records(self) -> list[RecordFields]:
        """Records of the batch so far, see `RoundPipe.last_records`; for a backward they also say when it had
        recomputed and how long it then waited, in ms."""
        return [record_fields(record) for record in self._submitted.records()]
