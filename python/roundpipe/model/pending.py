"""A batch on its way through the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe import _core
from roundpipe.call.run_config import ResolvedRunConfig

if TYPE_CHECKING:
    from roundpipe.model.pipe import RoundPipe


class Pending:
    """A batch that `RoundPipe.submit` has started."""

    def __init__(
        self,
        model: RoundPipe,
        submitted: _core.Submitted,
        single: list[bool],
        return_outputs: bool,
        config: ResolvedRunConfig,
    ) -> None:
        self._model = model
        self._submitted = submitted
        self._single = single
        self._return_outputs = return_outputs
        self._config = config

    def loss(self) -> Any:
        """What `forward_backward` returns; waits for it. Once.

        Raises:
            ValueError: it has been read already.
            Exception: what `forward_backward` raises.
        """
        return self._model._finish(self._submitted, self._single, self._return_outputs, self._config)

    def records(self) -> list[_core.Record]:
        """What has been executed of it so far, see `RoundPipe.last_records`, and when a backward had recomputed and
        how long it then waited, in ms."""
        return self._submitted.records()
