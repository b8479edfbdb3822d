"""Steps of torch's optimizers, by a step function or by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe import _core
from roundpipe.distributed.joint_training import JointTraining
from roundpipe.step.binding import BoundOptimizer, Gradients, Moments
from roundpipe.step.fused_steps import FusedSteps, refuse_optimizer
from roundpipe.step.group import StepGroup, refuse_gradient_hooks
from roundpipe.step.models import PipedModel, SteppedModels
from roundpipe.step.optimizer_context import OptimizerCtx
from roundpipe.step.optimizer_parameter import OptimizerParameter, ParameterOwner
from roundpipe.step.plain_steps import beside, owners, split_parameters, waiting_groups
from roundpipe.step.scaler import StepScales, hand_over, synchronize_scales
from roundpipe.step.update import Update, uninterrupted

Seen = tuple[int, int]  # a tensor's version, and where it lies if only the user moves it


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


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

    Attributes:
        has_copies: whether the copies have been made.
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
        self._copies: dict[int, OptimizerParameter] = {}  # by id of the user's parameter; trainable ones only
        self._trained = self._copies
        self._sources: list[nn.Parameter] = []  # the user's parameters of _copies, in the same order
        self._seen: list[Seen] = []  # of _sources
        self._copy_versions: list[int] = []  # of _copies, as last seen
        self._unpublished = False
        self._has_updated = False
        self.has_copies = False
        owners.add(self)

    @property
    def is_untouched(self) -> bool:
        """Whether no optimizer has been given the parameters, other than over the models' own."""
        return not self.has_copies

    def bind(self, optimizer: BoundOptimizer, moments: Moments, gradients: Gradients) -> FusedSteps:
        """Returns what replaces this object when a fused optimizer is made for the models.

        Raises:
            ValueError: the copies are in use.
        """
        if self.has_copies:
            raise ValueError(
                "[optim] the model's optim_parameters() are in use, expected a model that is stepped in one way only; "
                "give optim_parameters() to a torch.optim optimizer, or wrap the model again"
            )
        fused = FusedSteps(self, optimizer, moments, gradients)
        owners.discard(self)
        return fused

    @property
    def unpublished(self) -> bool:
        """Whether the copies hold a step that calls do not read yet. REQUIRES: no step function is running."""
        return self._unpublished

    def copy_of(self, parameter: nn.Parameter) -> OptimizerParameter | None:
        """The copy of a model's parameter that the optimizer updates; None if there is none."""
        return self._copies.get(id(parameter))

    def accept_loaded(self, unpublished: bool) -> None:
        """Takes parameters and copies as they have been loaded.

        Args:
            unpublished: calls read the parameters until the next step, and then the copies.
        """
        self._seen = self._look()
        self._note_copies()
        self._unpublished = unpublished

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
            self._sources = sources
            self._seen = self._look()
            self._note_copies()
            self.models.expose_gradients_of_backwards(False)
            for pipeline in self.models.pipelines:
                blocks = pipeline.block_parameters()
                pipeline.set_optimizer_parameters([[self._copies.get(id(p), p) for p in block] for block in blocks])
            self.has_copies = True

    def _look(self) -> list[Seen]:
        """The state of the user's parameters: what differs from it later has been written or assigned."""
        on_host = {id(parameter) for parameter in self.models.host_parameters.values()}
        # The engine itself points parameters in a pipeline elsewhere.
        return [(source._version, source.data_ptr() if id(source) in on_host else 0) for source in self._sources]

    def take_writes(self) -> None:
        """Copies values that the user has written into the model's parameters, or assigned to them. REQUIRES: no step
        function of these models is running."""
        self.models.adopt_replaced()
        looked = self._look()
        if looked == self._seen:
            return
        Update.wait_all()
        with torch.no_grad():
            for index, (source, seen) in enumerate(zip(self._sources, looked, strict=True)):
                if seen != self._seen[index]:
                    copy = self._copies[id(source)]
                    written = copy._version != self._copy_versions[index]
                    copy.copy_(source)
                    self._seen[index] = seen
                    if not written:
                        self._copy_versions[index] = copy._version

    def _note_copies(self) -> None:
        self._copy_versions = _versions(list(self._copies.values()))

    def _copies_written(self) -> bool:
        """Whether code other than `step` has updated the optimizer's parameters."""
        if not self.has_copies or self._pending is not None:
            return False
        return _versions(list(self._copies.values())) != self._copy_versions

    def before_call(self) -> None:
        """See `StepGroup.before_call`. Also publishes values that other code has written into the copies."""
        super().before_call()
        refuse_gradient_hooks(self._copies.values())
        self._publish_written_copies()

    # -- steps by a function ----------------------------------------------------------------------------------------

    def step_fused(self, optimizer: torch.optim.Optimizer, is_async: bool, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises ValueError: no fused optimizer was made for the models."""
        _core.require_engine()
        refuse_optimizer(optimizer)

    def step(self, step_fn: Callable[..., Any], is_async: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `RoundPipe.step`."""
        _core.require_engine()
        if not callable(step_fn):
            raise ValueError(f"[step] step_fn is a {type(step_fn).__name__}, expected a function")
        if self.joint is not None:
            self.joint.refuse("a step function")
        self._make_copies()
        self.check_trainable()
        self.finish_update()
        self.models.begin_step(is_async)
        self.take_writes()
        scales = hand_over(self, self.models.pipelines)
        with uninterrupted():
            # May raise, so it comes first: a version that has begun must be finished.
            tickets = [pipeline.begin_step() for pipeline in self.models.pipelines]
            host_gradients = self._take_host_gradients()
            weights = self._begin_updates(in_place=False)
            waiting = waiting_groups(self)
            self._pending = Update(
                lambda: self._update(
                    weights, tickets, host_gradients, scales, waiting, lambda: step_fn(*args, **kwargs)
                )
            )
            if scales is not None:
                scales.queued()
        self.steps += 1
        if not is_async:
            self.finish_update()
            self.models.drain()
            self._publish_now()
            if scales is not None:
                synchronize_scales(self, self.models.pipelines, after_step=True)

    def _update(
        self,
        weights: list[_core.WeightUpdate],
        tickets: list[_core.StepTicket],
        host_gradients: list[torch.Tensor | None],
        scales: StepScales | None,
        waiting: list[ParameterOwner],
        step_fn: Callable[[], Any],
    ) -> bool:
        """Runs on the optimizer thread. Returns False, having done nothing, if the gradients' call has failed."""
        for update in weights:
            update.make()
        landed = [ticket.hand_over() for ticket in tickets]
        if not all(landed):
            self.clear_copies(set_to_none=True)
            return False
        self._add_host_gradients(host_gradients)
        try:
            began = time.perf_counter()
            with OptimizerCtx(), beside(waiting), nullcontext() if scales is None else scales.active():
                step_fn()
            self._note_update(1000 * (time.perf_counter() - began))
        except BaseException:
            # Undoes the step as far as possible: step_fn may have changed parameters already.
            self.clear_copies(set_to_none=True)
            raise
        return True

    def _note_update(self, ms: float) -> None:
        """Tells the planner how long the step function took; not the first time, when it sets up its state."""
        if self._has_updated:
            weight_bytes = sum(source.nbytes for source in self._sources)
            for pipeline in self.models.pipelines:
                pipeline.note_update(weight_bytes, ms)
        self._has_updated = True

    def _take_host_gradients(self) -> list[torch.Tensor | None]:
        gradients = []
        for parameter in self.models.host_parameters.values():
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def _add_host_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(self.models.host_parameters.values(), gradients, strict=True):
                if gradient is None:
                    continue
                copy = self._copies[id(parameter)]
                gradient = gradient.to(device="cpu", dtype=copy.dtype)
                copy.landed_grad = gradient if copy.landed_grad is None else copy.landed_grad + gradient

    def _take_result(self, finished: Update) -> None:
        unpublished = self._unpublished
        # Also when step_fn raised, because it may have changed some parameters.
        self._unpublished = True
        self._pending = None
        self._note_copies()
        self._unpublished = finished.result() or unpublished

    # -- publishing -------------------------------------------------------------------------------------------------

    def _begin_updates(self, in_place: bool) -> list[_core.WeightUpdate]:
        """Begins the updates that publish what the last step function has written; none if all is published."""
        if not self._unpublished:
            return []
        self._unpublished = False
        with torch.no_grad():
            for parameter in self.models.host_parameters.values():
                copy = self._copies.get(id(parameter))
                if copy is not None:
                    parameter.copy_(copy)
        self._seen = self._look()
        return [pipeline.begin_update(in_place) for pipeline in self.models.pipelines]

    def _publish_copies(self) -> None:
        """Publishes values that other code has written into the optimizer's parameters."""
        for pipeline in self.models.pipelines:
            pipeline.asynchronous = False
            pipeline.drain()
        self._unpublished = True
        self._publish_now()

    def _publish_now(self) -> None:
        """Publishes the latest update. Nothing may be running."""
        if not self._unpublished:
            return
        with uninterrupted():
            for update in self._begin_updates(in_place=True):
                update.make()
            self._note_copies()

    def _settle(self) -> None:
        self.take_writes()
        self._unpublished |= self._copies_written()
        self._publish_now()

    def _publish_written_copies(self) -> None:
        if self._pending is None:
            Update.wait_all()  # another model's step function may be writing
        if self._copies_written():
            self._publish_copies()

    def show_weights(self) -> None:
        """Publishes values that other code has written into the copies, and lets the models' parameters show what the
        next call reads."""
        self._publish_written_copies()
        for pipeline in self.models.all_pipelines():
            pipeline.show_weights()

    # -- steps of an optimizer by itself ----------------------------------------------------------------------------

    def owns_trained(self, ids: set[int]) -> bool:
        """Whether one of these ids belongs to a parameter of the models that has a copy."""
        return not ids.isdisjoint(self._copies)

    def note_reach(self) -> None:
        """Notes that the user may now hold the models' own parameters. Until there are copies, the `.grad` of these
        parameters is filled when a backward returns."""
        if not self.has_copies:
            self.models.expose_gradients_of_backwards(True)

    def hand_over(self) -> None:
        """Waits for gradients that no step has consumed, and adds them to those of the optimizer's parameters.

        Waits first for step functions that are still running, because they use the gradients handed over before.
        """
        self.finish_all_updates()
        models = self.models
        if not models.has_gradients() and all(p.grad is None for p in models.host_parameters.values()):
            return
        models.drain()
        with uninterrupted():
            tickets = [pipeline.begin_step() for pipeline in models.pipelines]
            host_gradients = self._take_host_gradients()
            for ticket in tickets:
                ticket.hand_over()
            self._add_host_gradients(host_gradients)

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
        return any(copy.landed_grad is not None for copy in self._copies.values())

    def changed_from_outside(self) -> None:
        """Publishes changes made to the optimizer's parameters after the step function that used them."""
        self.finish_all_updates()
        self._unpublished = True

    def finish_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the next call read the weights of that step."""
        # Asks the optimizer, not the copies' version counters: torch's fused kernels do not count their writes.
        self.steps += 1
        if self._has_copies_in(optimizer):
            self._publish_copies()

    def _has_copies_in(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(group is self for group in split_parameters(optimizer)[1])

    def zero_gradients(self, model: nn.Module, set_to_none: bool) -> None:
        """Clears all gradients of `model` that no step has consumed, once they have landed; settles delayed steps."""
        self.synchronize()
        self.clear_copies(set_to_none)
        model.zero_grad(set_to_none)

    def clear_copies(self, set_to_none: bool) -> None:
        """Clears the current gradients of the optimizer's parameters, without waiting."""
        for copy in self._copies.values():
            if set_to_none:
                copy.landed_grad = None
            elif copy.landed_grad is not None:
                copy.landed_grad.detach_().zero_()
