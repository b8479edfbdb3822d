"""Prints layer times while a model runs."""

from __future__ import annotations

import sys

from roundpipe import _core


class ModelTimer:
    """Controls whether each call of a model prints its layers' times.

    Attributes:
        VERBOSE: after each call, print to stderr the estimated time of one microbatch in each layer, in ms: "fwd" is
            the forward, "re" the recompute where it is measured separately, "bwd" the backward. The times are first
            estimated from sizes, then measured. They are the numbers of `RoundPipe.costs`.
    """

    VERBOSE = False


def print_times(pipeline: _core.Pipeline) -> None:
    """Prints the times of a pipeline's layers, if `ModelTimer.VERBOSE` is set."""
    if not ModelTimer.VERBOSE:
        return
    for index, cost in enumerate(pipeline.costs()):
        for action, time_ms in (("fwd", cost.forward_ms), ("re", cost.recompute_ms), ("bwd", cost.backward_ms)):
            if time_ms is not None:
                print(f"Layer {index} {action}  new estimate: {time_ms:.3f} ms", file=sys.stderr)
