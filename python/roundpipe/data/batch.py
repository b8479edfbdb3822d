"""The microbatches of one call as an object, in the published package's form.

The pipeline itself calls `roundpipe.data.microbatch`; this class is for scripts that cut and merge by themselves.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from roundpipe.data.microbatch import (
    effective_microbatches,
    merge_outputs,
    microbatch_rows,
    split_call,
    split_label,
)
from roundpipe.data.packed import RoundPipePackedData
from roundpipe.model.call.run_config import ResolvedRunConfig


class Batch:
    """A call's arguments and labels, cut as a model cuts them.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        run_config: resolved options, see `roundpipe.model.call.run_config.FullRoundPipeRunConfig`.
        label: cut like the arguments.

    Attributes:
        num_microbatch: number of microbatches.
        flatten_states: for each microbatch, the leaves of its `(args, kwargs)`; may be set to its outputs' leaves.
        flatten_specs: for each microbatch, the structure of these leaves.
        label_list: for each microbatch, its label.
        forward_events: for each microbatch, the events of packed arguments' arrivals; `dump` waits for them.
        backward_events: for each microbatch, the events of its gradients' arrivals.

    Raises:
        ValueError: a model would refuse these arguments too.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], run_config: ResolvedRunConfig, label: Any = None
    ) -> None:
        if run_config.num_microbatch_is_open:
            raise ValueError(
                "[Batch] num_microbatch is 'auto', expected a number: a model chooses it at its first training call"
            )
        count = effective_microbatches(
            args, kwargs, run_config.num_microbatch, run_config.num_microbatch_is_default, run_config.split_input
        )
        calls = split_call(args, kwargs, count, run_config.split_input)
        self.num_microbatch = len(calls)
        rows = microbatch_rows(args, kwargs, calls, run_config.split_input)
        self.label_list = split_label(label, len(calls), run_config.split_label, rows)
        self.flatten_states: list[list[Any]] = []
        self.flatten_specs: list[pytree.TreeSpec] = []
        for call in calls:
            leaves, spec = pytree.tree_flatten(call)
            self.flatten_states.append(leaves)
            self.flatten_specs.append(spec)
        packed = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RoundPipePackedData)]
        events = [[leaf.transfer_event[i] for leaf in packed if leaf.transfer_event] for i in range(len(calls))]
        self.forward_events = [list(dict.fromkeys(arrived for arrived, _ in pairs)) for pairs in events]
        self.backward_events = [list(dict.fromkeys(gradient for _, gradient in pairs)) for pairs in events]

    def dump(self, run_config: ResolvedRunConfig) -> Any:
        """Merges the microbatches as `run_config.merge_output` asks; unmerged microbatches carry the events."""
        outputs = [pytree.tree_unflatten(*each) for each in zip(self.flatten_states, self.flatten_specs, strict=True)]
        if run_config.merge_output is not False:
            for event in (event for events in self.forward_events for event in events):
                event.synchronize()
        merged = merge_outputs(outputs, run_config.merge_output)
        if run_config.merge_output is not False:
            return merged
        pairs = list(zip(self.forward_events, self.backward_events, strict=True))
        carried = [(ahead[0], behind[0]) for ahead, behind in pairs if ahead and behind]
        for leaf in pytree.tree_leaves(merged):
            if isinstance(leaf, RoundPipePackedData) and len(carried) == len(leaf):
                leaf.transfer_event = carried
        return merged
