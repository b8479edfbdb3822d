"""Steps of torch's optimizers, by a step function or by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe import _core
from roundpipe.distributed.joint_training import JointTraining
from roundpipe.model.step.fused_optimizer import BoundOptimizer, Formats
from roundpipe.model.step.fused_steps import FusedSteps, refuse_optimizer
from roundpipe.model.step.group import StateReader, StepGroup, refuse_gradient_hooks
from roundpipe.model.step.models import PipedModel, SteppedModels
from roundpipe.model.step.optimizer_context import OptimizerCtx
from roundpipe.model.step.optimizer_parameter import OptimizerParameter
from roundpipe.model.step.plain_steps import beside, owners, split_parameters, waiting_groups
from roundpipe.model.step.scaler import hand_over, synchronize_scales
from roundpipe.model.step.uninterrupted import uninterrupted


class TorchSteps(StepGroup):
    """Models that torch's optimizers step, over copies of the parameters or over the models' own.

    The copies are made at the first use of `optim_named_parameters` or `step`. An optimizer may step by itself over
    them or over the models' own parameters, as in a plain loop; its step is synchronous. Until there are copies, a
    fused optimizer may be bound to the models; `FusedSteps` then replaces this object.

    Before a call, values that other code has written into the copies are published. Values that the user has written
    into the models' parameters go into the copies with the next step or `synchronize`.

    Args:
        pipes: see `SteppedModels`.
        host_parameters: see `SteppedModels`.
        optim_dtype: dtype of the copies; None keeps each parameter's dtype.
        joint: see `StepGroup`; every step is then refused, until there is a fused optimizer.
    """

    def __init__(
        self,
        pipes: Mapping[str, PipedModel],
        host_parameters: dict[str, nn.Parameter],
        optim_dtype: torch.dtype | None,
        joint: JointTraining | None,
    ) -> None:
        super().__init__(SteppedModels(pipes, host_parameters), joint)
        self._optim_dtype = optim_dtype
        self._names: list[tuple[str, nn.Parameter]] = []  # every name of every parameter, once there are copies
        self._copies: dict[int, OptimizerParameter] = {}  # by id of the user's parameter; trainable ones only
        self._core = _core.CopySteps(self.models.pipelines, list(host_parameters.values()))
        owners.add(self)

    @property
    def has_copies(self) -> bool:
        """Whether the copies have been made."""
        return self._core.has_copies

    @property
    def is_untouched(self) -> bool:
        """Whether no optimizer has been given the parameters, other than over the models' own."""
        return not self.has_copies

    def bind(self, optimizer: BoundOptimizer, formats: Formats) -> FusedSteps:
        """Returns what replaces this object when a fused optimizer is made for the models.

        Raises:
            ValueError: the copies are in use.
        """
        if self.has_copies:
            raise ValueError(
                "[optim] the model's optim_parameters() are in use, expected a model that is stepped in one way only; "
                "give optim_parameters() to a torch.optim optimizer, or wrap the model again"
            )
        fused = FusedSteps(self, optimizer, formats)
        owners.discard(self)
        return fused

    @property
    def core(self) -> _core.CopySteps:
        """The engine's part, for checkpoints."""
        return self._core

    def _late_parameter(self) -> str | None:
        return self._core.late_parameter()

    # -- the copies -------------------------------------------------------------------------------------------------

    def optim_named_parameters(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters with their names; frozen parameters have none."""
        if self.joint is not None:
            self.joint.refuse("an optimizer over optim_parameters()")
        self._make_copies()
        return self._iterate(prefix, remove_duplicate)

    def _iterate(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._names:
            copy = self._copies.get(id(parameter))
            if copy is None or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, copy

    def _make_copies(self) -> None:
        if self.has_copies:
            return
        with uninterrupted():
            self._names = self.models.named_parameters()
            sources = [parameter for _, parameter in self.models.trainable_parameters()]
            for parameter in sources:
                dtype = self._optim_dtype if self._optim_dtype and parameter.is_floating_point() else parameter.dtype
                copy = OptimizerParameter(parameter.detach().to(device="cpu", dtype=dtype, copy=True))
                copy.__dict__.update(parameter.__dict__)
                copy.attach(self)
                self._copies[id(parameter)] = copy
            self._core.set_copies(self._names, sources, list(self._copies.values()))

    def take_writes(self) -> None:
        """Copies values that the user has written into the model's parameters, or assigned to them. REQUIRES: no step
        function of these models is running."""
        self._core.take_writes()

    def before_call(self) -> None:
        """See `StepGroup.before_call`. Also publishes values that other code has written into the copies."""
        super().before_call()
        refuse_gradient_hooks(self._copies.values())
        self._core.publish_written_copies()

    # -- steps by a function ----------------------------------------------------------------------------------------

    def step_fused(self, optimizer: torch.optim.Optimizer, is_async: bool, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ValueError: no fused optimizer was made for the models."""
        _core.require_engine()
        refuse_optimizer(optimizer)

    def measure_gradients(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        """Raises ValueError: no fused optimizer was made for the models."""
        _core.require_engine()
        refuse_optimizer(optimizer, "measure_gradients")

    def step(self, step_fn: Callable[..., Any], is_async: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `RoundPipe.step`."""
        _core.require_engine()
        if not callable(step_fn):
            raise ValueError(f"[step] step_fn is a {type(step_fn).__name__}, expected a function")
        if self.joint is not None:
            self.joint.refuse("a step function")
        self._make_copies()
        self.check_trainable()
        self._core.prepare_step(is_async)
        scales = hand_over(self, self.models.pipelines)
        waiting = waiting_groups(self)

        def update() -> None:
            threading.current_thread().name = "roundpipe-optimizer"  # as debuggers and logs show it
            with OptimizerCtx(), beside(waiting), nullcontext() if scales is None else scales.active():
                step_fn(*args, **kwargs)

        with uninterrupted():
            self._core.queue_step(update)
            if scales is not None:
                scales.queued()
        self.steps += 1
        if not is_async:
            self._core.settle_step()
            if scales is not None:
                synchronize_scales(self, self.models.pipelines, after_step=True)

    def finish_update(self) -> None:
        """See `StepGroup.finish_update`."""
        self._core.finish_update()

    def keep_for(self, reader: StateReader) -> None:
        """Lets nothing change the copies until `reader` has read them."""
        self._core.keep_for(reader.wait_read)

    def synchronize(self) -> None:
        """See `StepGroup.synchronize`."""
        self._core.synchronize()
        synchronize_scales(self, self.models.all_pipelines())

    def show_weights(self) -> None:
        """Publishes values that other code has written into the copies, and lets the models' parameters show what the
        next call reads."""
        self._core.show_weights()

    # -- steps of an optimizer by itself ----------------------------------------------------------------------------

    def owns_trained(self, ids: set[int]) -> bool:
        """Whether one of these ids belongs to a parameter of the models that has a copy."""
        return not ids.isdisjoint(self._copies)

    def note_reach(self) -> None:
        """Notes that the user may now hold the models' own parameters. Until there are copies, the `.grad` of these
        parameters is filled when a backward returns."""
        if not self.has_copies:
            self.models.expose_gradients_of_backwards()

    def hand_over(self) -> None:
        """Waits for gradients that no step has consumed, and adds them to those of the optimizer's parameters.

        Waits first for step functions that are still running, because they use the gradients handed over before.
        """
        self._core.hand_over()

    def begin_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepares for a step of a torch optimizer over parameters of these models, outside `step`."""
        _core.require_engine()
        if self.joint is not None:
            self.joint.refuse(f"{type(optimizer).__name__}.step()")
        self.finish_all_updates()
        self.check_trainable()
        if self._has_copies_in(optimizer):
            self.take_writes()
            self.hand_over()
        else:
            self.synchronize()
            self.note_reach()

    @property
    def has_landed_gradients(self) -> bool:
        """Whether a parameter of the optimizer has a gradient, without waiting for those that no step has consumed."""
        return self._core.has_landed_gradients

    def changed_from_outside(self) -> None:
        """Publishes changes made to the optimizer's parameters after the step function that used them."""
        self._core.changed_from_outside()

    def finish_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the next call read the weights of that step."""
        # Asks the optimizer, not the copies' version counters: torch's fused kernels do not count their writes.
        self.steps += 1
        if self._has_copies_in(optimizer):
            self._core.publish_copies()

    def _has_copies_in(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(group is self for group in split_parameters(optimizer)[1])

    def zero_gradients(self, model: nn.Module, set_to_none: bool) -> None:
        """Clears all gradients of `model` that no step has consumed, once they have landed; settles delayed steps."""
        self.synchronize()
        self.clear_copies(set_to_none)
        model.zero_grad(set_to_none)

    def clear_copies(self, set_to_none: bool) -> None:
        """Clears the current gradients of the optimizer's parameters, without waiting."""
        self._core.clear_gradients(set_to_none)
