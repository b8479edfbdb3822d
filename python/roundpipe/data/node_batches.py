"""Batches that several nodes share, each its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roundpipe.data.balance import rows_of_part
from roundpipe.data.batches import Batches
from roundpipe.distributed import nodes_of

if TYPE_CHECKING:
    from roundpipe.distributed.nodes import Nodes


class NodeBatches:
    """This node's rows of batches that are alike on all nodes of a model; a model that is trained alone gets all rows.

        for rows in NodeBatches(model, batches):
            if rows is not None:
                model.forward_backward(input_kwargs=rows, run_config=balanced_config(rows))
            model.step(optimizer)

    Each row of a batch is on one node, and the nodes have about as many tokens each. A node has None of a batch with
    fewer rows than nodes. Positions are those of the batches, so a checkpoint with these batches in `state=` loads on
    any number of nodes.

    Args:
        model: in the pipeline; which nodes there are.
        batches: the same on every node, each with all rows.
    """

    def __init__(self, model: Any, batches: Batches) -> None:
        self._nodes: Nodes | None = nodes_of(model)
        self._batches = batches

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any] | None]:
        """Collective when it begins.

        Raises:
            ValueError: the nodes have other samples, sizes, seeds or positions; the message names what differs.
            RoundPipeError: a node does not answer.
        """
        if self._nodes is None:
            yield from self._batches
            return
        state = self._batches.state_dict()
        told = {name: repr(value) for name, value in state["batches"].items()} | {"the position": str(state["given"])}
        self._nodes.agree("iterates over batches for", told, "the same batches on every rank")
        for batch in self._batches:
            yield rows_of_part(batch, self._nodes.rank, self._nodes.size)

    def state_dict(self) -> dict[str, Any]:
        """See `Batches.state_dict`."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Batches.load_state_dict`."""
        self._batches.load_state_dict(state)
