"""One call of a model, ready for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundpipe import _core
from roundpipe.following.layers.values import Structure
from roundpipe.model.call.joint_plan import RunType
from roundpipe.model.call.loss_function import MicrobatchLoss
from roundpipe.model.call.run_config import GRAINS, ResolvedRunConfig

Microbatch = tuple[list[torch.Tensor], Structure]
Route = _core.Stages | _core.Plan | None

ACCUMULATIONS = {"layer": _core.TiedGradAccumulation.LAYER, "microbatch": _core.TiedGradAccumulation.MICROBATCH}


@dataclass(frozen=True)
class CallRequest:
    """One call of a model, ready for the engine.

    Attributes:
        config: the call's options.
        requires_grad: whether there is a backward.
        batch: the microbatches, on the host.
        route: the stages or the plan; None leaves the choice to the planner.
        changeable: whether the arguments hold objects that the caller may change.
        savers: options that would reduce the memory of a row, worded for the user.
        labels: the microbatches' labels; empty if the pipeline computes no loss.
        loss_fn: maps the outputs and the label of a microbatch to the losses; None: the pipeline computes no loss.
        return_outputs: whether the outputs are wanted beside the losses.
    """

    config: ResolvedRunConfig
    requires_grad: bool
    batch: list[Microbatch]
    route: Route
    changeable: bool
    savers: tuple[str, ...]
    labels: list[Microbatch] = field(default_factory=list)
    loss_fn: Callable[[Any, Any], Any] | None = None
    return_outputs: bool = False

    def arguments(
        self, loss: MicrobatchLoss | None = None, passages: Sequence[_core.Passage | None] | None = None
    ) -> _core.CallArguments:
        """The call's values, as the engine takes them.

        Args:
            loss: of `loss_fn`; None makes one.
            passages: of each microbatch, the one that it enters; None: none enters one.
        """
        if loss is None and self.loss_fn is not None:
            loss = MicrobatchLoss(self.loss_fn)
        entered = [None] * len(self.batch) if passages is None else passages
        return _core.CallArguments(self.batch, self.labels, loss, self.changeable, self.savers, entered)

    def options(self) -> _core.RunOptions:
        """The engine's options."""
        options = _core.RunOptions()
        options.requires_grad = self.requires_grad
        options.preserve_rng_state = self.config.preserve_rng_state
        options.recompute_grain = GRAINS[self.config.recompute_grain]
        options.tied_grad_accumulation = ACCUMULATIONS[self.config.tied_grad_accumulation]
        options.gradient_groups = self.config.gradient_groups
        options.fault_tolerant = self.config.fault_tolerant
        options.verify_every = self.config.verify_every
        options.route = self.route
        return options


def route_of(config: ResolvedRunConfig, run_type: RunType, layers: int) -> Route:
    """Returns the stages or the plan of a call over so many layers; None leaves the choice to the planner.

    Raises:
        ValueError: the stages do not fit the model or the run type.
    """
    plan = config.execute_plan
    if plan is None or isinstance(plan, _core.Plan):
        return plan
    plan.check_valid(layers, run_type)
    stages = _core.Stages()
    stages.forward = [_core.Range(stage.start, stage.stop) for stage in plan.fwd_plan]
    if run_type != "infer":
        stages.backward = [_core.Range(stage.start, stage.stop) for stage in plan.bwd_plan]
    return stages
