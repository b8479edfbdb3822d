"""The published package's path to its contexts; see `layers.recompute` and `step.optimizer_context`."""

from roundpipe.following.layers.recompute import doing_recompute as doing_recompute
from roundpipe.following.layers.recompute import get_recompute_data as get_recompute_data
from roundpipe.following.layers.recompute import save_for_recompute as save_for_recompute
from roundpipe.model.step.optimizer_context import OptimizerCtx as OptimizerCtx
from roundpipe.model.step.optimizer_context import in_optimizer_context as doing_optimizer

__all__ = ["OptimizerCtx", "doing_optimizer", "doing_recompute", "get_recompute_data", "save_for_recompute"]
