"""Prints how long layers take, while a model runs."""

from __future__ import annotations

import sys

from roundpipe.model.run_records import RunRecords


class ModelTimer:
    """Whether each call of a model prints its layers' times.

    Attributes:
        VERBOSE: print, to stderr after each call, what a microbatch is thought to take in each layer, in ms: "fwd" its
            forward, "re" the forward again for the backward where that is measured by itself, "bwd" its backward.
            Estimates from sizes at first, then from what was measured. The same numbers as `RoundPipe.costs`.
    """

    VERBOSE = False


def print_times(model: RunRecords) -> None:
    """Prints the times of a model's layers, if that is asked for."""
    if not ModelTimer.VERBOSE:
        return
    for index, cost in enumerate(model.costs()):
        for action, time_ms in (("fwd", cost.forward_ms), ("re", cost.recompute_ms), ("bwd", cost.backward_ms)):
            if time_ms is not None:
                print(f"Layer {index} {action}  new estimate: {time_ms:.3f} ms", file=sys.stderr)
