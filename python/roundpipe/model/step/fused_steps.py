"""Steps of a fused optimizer: the engine updates each layer in place as soon as its gradient has landed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe import _core
from roundpipe.distributed.loss_counts import telling_failure
from roundpipe.model.step.fused_optimizer import (
    CLIP_BY,
    BoundOptimizer,
    Formats,
    Step,
    as_schedulers,
    core_rule,
)
from roundpipe.model.step.group import StepGroup
from roundpipe.model.step.plain_steps import owners
from roundpipe.model.step.scaler import GradScaler, synchronize_scales
from roundpipe.model.step.uninterrupted import uninterrupted


def refuse_optimizer(optimizer: torch.optim.Optimizer, where: str = "step") -> NoReturn:
    """Raises ValueError: `optimizer` does not update the model in place."""
    raise ValueError(
        f"[{where}] the {type(optimizer).__name__} was not made for this model (or another one was made since); "
        "make it with roundpipe.optim.AdamW(model, ...), or give step a function that calls optimizer.step()"
    )


def _refuse_other_ways(what: str) -> NoReturn:
    raise ValueError(
        f"[RoundPipe] {what}: a roundpipe.optim optimizer was made for this model and updates it in place; "
        "use model.step(optimizer), or wrap the model again for another way of stepping"
    )


class FusedSteps(StepGroup):
    """Models that a `roundpipe.optim` optimizer updates in place; every other way of stepping them is refused.

    There are no copies of parameters. A step starts the update of each block in the engine, which waits for the block's
    gradients by itself. From a step until `show_weights` or `synchronize`, the models' parameters may show neither the
    old nor the new weights.

    Another optimizer may be made for the same models: it replaces the binding, and the earlier optimizer's steps are
    refused.

    Args:
        earlier: the models' steps until now.
        optimizer: has the models' parameters in its groups.
        formats: see `roundpipe.optim.AdamW`.

    Attributes:
        binding: the engine's optimizer, with its state for these models.
    """

    has_copies = False
    is_untouched = False

    def __init__(self, earlier: StepGroup, optimizer: BoundOptimizer, formats: Formats) -> None:
        super().__init__(earlier.models, earlier.joint)
        self._core = self.models.fused
        self.steps, self.save = earlier.steps, earlier.save
        self._bind(earlier, optimizer, formats)
        owners.add(self)

    def bind(self, optimizer: BoundOptimizer, formats: Formats) -> FusedSteps:
        """Makes another optimizer update these models from now on. The earlier one's moments are dropped; the fp32
        masters stay."""
        self._bind(self, optimizer, formats)
        return self

    def _bind(self, earlier: StepGroup, optimizer: BoundOptimizer, formats: Formats) -> None:
        # Refuses invalid requests before anything is changed.
        self._core.prepare_bind()
        earlier.synchronize()
        if earlier.save is not None:
            earlier.save.wait_over()
        names = self.models.named_parameters()
        nodes = None
        if self.joint is not None:
            nodes = self.joint.make_optimizer(optimizer, formats._asdict(), names)
        groups = [options["params"] for options in optimizer.param_groups]
        self.binding = self._core.bind(core_rule(optimizer, formats), names, groups, nodes)
        self.models.host_pipeline = self._core.host_pipeline

    def _late_parameter(self) -> str | None:
        return self._core.late_parameter()

    def step(self, step_fn: Any, is_async: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Raises ValueError: a fused optimizer updates the models."""
        _core.require_engine()
        _refuse_other_ways("step with a function")

    def step_fused(
        self,
        optimizer: torch.optim.Optimizer,
        is_async: bool,
        scaler: GradScaler | None = None,
        max_grad_norm: float | None = None,
        lr_scheduler: Any = None,
        clip_by: str = "norm",
    ) -> Step:
        """See `RoundPipe.step`."""
        _core.require_engine()
        own = self._require_own(optimizer, "step")
        if clip_by not in CLIP_BY:
            raise ValueError(f"[step] clip_by is {clip_by!r}, expected {' or '.join(map(repr, CLIP_BY))}")
        step_options = _core.StepOptions(is_async, max_grad_norm, CLIP_BY[clip_by])
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"[step] scaler is a {type(scaler).__name__}, expected a roundpipe.GradScaler")
        schedulers = as_schedulers(lr_scheduler)
        groups = own.core_groups()
        pipelines = self.models.all_pipelines()
        scale: torch.Tensor | None = None
        with nullcontext() if self.joint is None else telling_failure(self.joint.counts):
            self.check_trainable()
            self.finish_update()
            self._core.prepare_step(is_async)  # here, so that Ctrl+C ends the wait
            if scaler is not None and scaler.is_enabled():
                scale = scaler._begin_step(self, pipelines, several_nodes=self.joint is not None)
        loss_scale = 0.0 if scale is None else float(scale)  # 0: losses are not scaled
        if self.joint is not None:
            options = {
                "is_async": is_async,
                "max_grad_norm": max_grad_norm,
                "clip_by": clip_by,
                "the loss scale": loss_scale,
            }
            step_options.gradient_factor = self.joint.step(options, own, shows_weights=not self._core.hides_weights)
        with uninterrupted():
            run = self._core.start_step(groups, step_options, loss_scale)
            if scaler is not None and scale is not None:
                scaler._stepped(pipelines, run, scale)
        if scale is not None and not is_async:
            synchronize_scales(self, pipelines)  # the scale of the next losses depends on these gradients
        self.steps += 1
        self.schedulers = schedulers
        own.count_step()
        for scheduler in schedulers:
            scheduler.step()
        return Step(run)

    def measure_gradients(self, optimizer: torch.optim.Optimizer) -> float:
        """See `RoundPipe.measure_gradients`."""
        _core.require_engine()
        self._require_own(optimizer, "measure_gradients")
        self.check_trainable()
        self.finish_update()
        return self._core.measure_gradients()

    def _require_own(self, optimizer: torch.optim.Optimizer, where: str) -> BoundOptimizer:
        if not isinstance(optimizer, BoundOptimizer) or optimizer.binding is not self.binding:
            refuse_optimizer(optimizer, where)
        return optimizer

    def finish_update(self) -> None:
        """See `StepGroup.finish_update`."""
        _core.require_callers_thread()
        _core.require_no_step_function()

    def synchronize(self) -> None:
        """See `StepGroup.synchronize`."""
        self.finish_all_updates()
        self._core.synchronize()
        synchronize_scales(self, self.models.all_pipelines())

    def show_weights(self) -> None:
        """Makes the models' parameters show the newest weights. Calls read what they would have read."""
        self._core.show_weights()

    def before_call(self) -> None:
        """See `StepGroup.before_call`. Also lets what is computed on the host read the weights that calls read."""
        super().before_call()
        self._core.show_host_weights()

    def zero_gradients(self, model: nn.Module, set_to_none: bool) -> None:
        """Clears the gradients of `model` that no step has consumed; without waiting if `set_to_none`."""
        if set_to_none:
            self.drop_gradients()
        else:
            self.synchronize()
            model.zero_grad(set_to_none)

    def drop_gradients(self) -> None:
        """Drops the gradients that no step has consumed, without waiting."""
        self._core.drop_gradients()
        if self.joint is not None:
            self.joint.counts.forget()

    def begin_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for a step of any optimizer but the one that updates these models."""
        if not isinstance(optimizer, BoundOptimizer) or optimizer.binding is not self.binding:
            _refuse_other_ways(f"{type(optimizer).__name__}.step()")

    def finish_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: the optimizer's step was made by `step_fused`."""

    def note_reach(self) -> None:
        """Does nothing: gradients go to the optimizer, so `.grad` is filled only when it is asked for."""

    # -- there are no copies ----------------------------------------------------------------------------------------

    def optim_named_parameters(self, prefix: str, remove_duplicate: bool) -> NoReturn:
        """Raises ValueError: a fused optimizer updates the models."""
        _refuse_other_ways("optim_parameters")

    def clear_copies(self, set_to_none: bool) -> None:
        """Does nothing."""

    def owns_trained(self, ids: set[int]) -> bool:
        """Returns False."""
        return False
