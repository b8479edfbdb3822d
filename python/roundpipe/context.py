"""Where the published package has its contexts; see `roundpipe.recompute` and `roundpipe.optimizer_context`."""

from roundpipe.optimizer_context import OptimizerCtx as OptimizerCtx
from roundpipe.optimizer_context import in_optimizer_context as doing_optimizer
from roundpipe.recompute import doing_recompute as doing_recompute
from roundpipe.recompute import get_recompute_data as get_recompute_data
from roundpipe.recompute import save_for_recompute as save_for_recompute

__all__ = ["OptimizerCtx", "doing_optimizer", "doing_recompute", "get_recompute_data", "save_for_recompute"]
