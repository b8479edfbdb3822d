"""Several nodes that train one model together: their process groups, and their models as the engine compares them.

A node is a rank of a process group of `torch.distributed`, with devices of its own. `nodes_of(model)` tells a program
which one it is.
"""

from __future__ import annotations

from typing import Any

from roundpipe.distributed.nodes import Nodes

__all__ = ["Nodes", "nodes_of"]


def nodes_of(model: Any) -> Nodes | None:
    """The nodes that train a model in the pipeline; None if it is trained by this process alone."""
    group = getattr(model, "_step_group", None)
    if group is None:
        raise ValueError(
            f"[distributed] the model is a {type(model).__name__}, expected one in the pipeline: wrap it first"
        )
    found: Nodes | None = group.nodes
    return found
