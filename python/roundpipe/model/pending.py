"""A batch in flight in the pipeline, and its results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.data.microbatch import merge_outputs
from roundpipe.distributed.loss_counts import noting_failure
from roundpipe.model.call.loss_function import MicrobatchLoss
from roundpipe.model.call.request import CallRequest
from roundpipe.model.call.run_config import ResolvedRunConfig
from roundpipe.model.timer import print_times
from roundpipe.plan.performance.timeline import Timeline, timeline_of


def merged(parts: list[Any], config: ResolvedRunConfig) -> Any:
    """Merges the outputs of all microbatches, as the call's options ask."""
    outputs = [structure.join(tensors) for tensors, structure in parts]
    if config.output_device.type != "cpu":
        outputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(config.output_device), outputs)
    return merge_outputs(outputs, config.merge_output)


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
        pipeline: runs the batch.
        submitted: the engine's handle of the batch.
        request: what was asked for; its values are not kept.
        loss: computes the losses.
        count: has told the other nodes of the batch; None if there are none.
    """

    def __init__(
        self,
        pipeline: _core.Pipeline,
        submitted: _core.PendingCall,
        request: CallRequest,
        loss: MicrobatchLoss,
        count: _core.CallCount | None,
    ) -> None:
        self._pipeline = pipeline
        self._submitted = submitted
        self._config, self._returns_outputs = request.config, request.return_outputs
        self._loss = loss
        self._count = count

    def loss(self) -> Any:
        """Waits for the result of `forward_backward` and returns it. May be called once.

        Raises:
            ValueError: the loss has been read already.
            Exception: whatever `forward_backward` raises.
        """
        with noting_failure(self._count):
            return self._finish()

    def _finish(self) -> Any:
        result = self._submitted.finish()
        print_times(self._pipeline)
        losses = result.losses
        if self._count is not None and self._count.loss_factor != 1.0:
            losses = [loss * self._count.loss_factor for loss in losses]
        value = losses[0] if self._loss.is_single else losses
        return (value, merged(result.outputs, self._config)) if self._returns_outputs else value

    def timeline(self) -> Timeline:
        """What the devices have done for this batch, and when; see `RoundPipe.timeline`.

        Raises:
            ValueError: no device has finished any work of it yet.
        """
        return timeline_of([self._submitted.records()], self._pipeline.last_plan(), "the batch")

    def records(self) -> list[RecordFields]:
        """Records of the batch so far, see `RoundPipe.last_records`; for a backward they also say when it had
        recomputed and how long it then waited, in ms."""
        return [record_fields(record) for record in self._submitted.records()]
