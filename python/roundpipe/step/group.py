"""The optimizer's side of a model: its parameters, its thread, and the weights that a call reads.

Asynchronous steps: call s + 1 reads the weights of update s - 1, so update s runs while call s + 1 computes, and
staleness is exactly one. An update is published when the next step is made, never in between, so the weights that a
call reads do not depend on timing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe import _core
from roundpipe.step.binding import Binding, BoundOptimizer, Gradients, Moments, Step, as_schedulers
from roundpipe.step.optimizer_context import OptimizerCtx
from roundpipe.step.optimizer_parameter import OptimizerParameter
from roundpipe.step.plain_steps import owners, split_parameters, watch_optimizers
from roundpipe.step.scaler import GradScaler, StepScales, _all_live
from roundpipe.step.update import Update, is_updating, uninterrupted

watch_optimizers()


class PipedModel(Protocol):
    """A model in the pipeline, as the optimizer's side sees it."""

    _pipeline: _core.Pipeline

    def _all_named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Every parameter under every name that counts."""


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


class StepGroup:
    """The models and host parameters that one optimizer steps together.

    Args:
        pipes: the models in the pipeline, by the names of their modules in the whole model ("" for the root).
        host_parameters: parameters that stay and are used on the host, by name.
        optim_dtype: dtype of the optimizer's copies; None keeps each parameter's dtype.
    """

    def __init__(
        self,
        pipes: Mapping[str, PipedModel],
        host_parameters: dict[str, nn.Parameter],
        optim_dtype: torch.dtype | None,
    ) -> None:
        # Weak references: a model holds this group, and a cycle would keep its memory until a garbage collection.
        self._pipes = {path: weakref.ref(pipe) for path, pipe in pipes.items()}
        self._pipelines = [pipe._pipeline for pipe in pipes.values()]
        self._host_parameters = host_parameters
        blocks = [block for pipeline in self._pipelines for block in pipeline.block_parameters()]
        self._piped_parameters = [parameter for block in blocks for parameter in block]
        self._ids = {id(parameter) for parameter in (*self._piped_parameters, *host_parameters.values())}
        self._optim_dtype = optim_dtype
        self._copies: dict[int, OptimizerParameter] = {}  # by id of the user's parameter; trainable ones only
        self._sources: list[nn.Parameter] = []  # the user's parameters of _copies, in the same order
        self._versions: list[int] = []  # of _sources, as last seen
        self._copy_versions: list[int] = []  # of _copies, as last seen
        self._names: list[tuple[str, nn.Parameter]] = []  # every name of every parameter
        self._trained: set[int] = set()  # ids of the parameters that a fused optimizer trains
        self._built = False
        self._pending: Update | None = None
        self._unpublished = False
        self._binding: Binding | None = None
        self.host_pipeline: _core.Pipeline | None = None  # of the host parameters, for a fused optimizer
        owners.add(self)

    # -- the optimizer's parameters ---------------------------------------------------------------------------------

    def optim_named_parameters(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters with their names; frozen parameters have none."""
        self._check_unbound("optim_parameters")
        self._build()
        return self._iterate(prefix, remove_duplicate)

    def _iterate(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._names:
            copy = self._copies.get(id(parameter))
            if copy is None or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, copy

    def _build(self) -> None:
        if self._built:
            return
        with uninterrupted():
            self._build_copies()

    def _all_names(self) -> list[tuple[str, nn.Parameter]]:
        names: list[tuple[str, nn.Parameter]] = []
        for path, reference in self._pipes.items():
            pipe = reference()
            if pipe is None:
                raise ReferenceError("[RoundPipe] the model is gone, expected it to live as long as its optimizer")
            for name, parameter in pipe._all_named_parameters():
                names.append((f"{path}.{name}" if path else name, parameter))
        names.extend(self._host_parameters.items())
        return names

    def _build_copies(self) -> None:
        self._names = self._all_names()
        for _, parameter in self._names:
            if not parameter.requires_grad or id(parameter) in self._copies:
                continue
            dtype = self._optim_dtype if self._optim_dtype and parameter.is_floating_point() else parameter.dtype
            copy = OptimizerParameter(parameter.detach().to(device="cpu", dtype=dtype, copy=True))
            copy.__dict__.update(parameter.__dict__)
            copy.attach(self)
            self._copies[id(parameter)] = copy
            self._sources.append(parameter)
        self._versions = _versions(self._sources)
        self._note_copies()
        for pipeline in self._pipelines:
            pipeline.exposes_gradients = False
            blocks = pipeline.block_parameters()
            pipeline.set_optimizer_parameters([[self._copies.get(id(p), p) for p in block] for block in blocks])
        self._built = True

    def check_trainable(self) -> None:
        """Raises ValueError if a parameter became trainable after the optimizer's copies were made."""
        known = self._copies if self._binding is None else self._trained
        for name, parameter in self._names:
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"[RoundPipe] parameter '{name}' was frozen when the optimizer's parameters were made and requires "
                    "grad now, so no optimizer would update it; set requires_grad before optim_parameters() or the "
                    "first step, and wrap the model again to change it (freezing later is fine)"
                )

    def _refresh_copies(self) -> None:
        """Copies values that the user has written into the model's parameters."""
        with torch.no_grad():
            for index, source in enumerate(self._sources):
                if source._version != self._versions[index]:
                    copy = self._copies[id(source)]
                    written = copy._version != self._copy_versions[index]
                    copy.copy_(source)
                    self._versions[index] = source._version
                    if not written:
                        self._copy_versions[index] = copy._version

    def _note_copies(self) -> None:
        self._copy_versions = _versions(list(self._copies.values()))

    def _copies_written(self) -> bool:
        """Whether code other than `step` has updated the optimizer's parameters."""
        return self._built and self._pending is None and _versions(list(self._copies.values())) != self._copy_versions

    def before_call(self) -> None:
        """Prepares the weights for a call that will read them.

        Raises:
            ValueError: see `check_trainable`; or the call is being traced or captured.
            RoundPipeError: a layer makes the call.
        """
        _core.require_callers_thread()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise ValueError(
                "[RoundPipe] a CUDA graph is being captured, expected a call outside of it: the graph would hold "
                "nothing of what the engine's own streams do; capture what is around it, after model.synchronize()"
            )
        if torch._C._get_tracing_state() is not None:
            raise ValueError("[RoundPipe] tracing does not see what runs on the devices; trace the plain model instead")
        self.check_trainable()
        self._refuse_hooks()
        if self._copies_written():
            self._publish_copies()

    def _refuse_hooks(self) -> None:
        for parameter in itertools.chain(self._piped_parameters, self._copies.values()):
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise ValueError(
                    f"[RoundPipe] a parameter of shape {tuple(parameter.shape)} has hooks on its gradient, which "
                    "nothing would call, as the engine sums gradients; expected none; change .grad after the backward "
                    "instead, before the optimizer's step"
                )

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, step_fn: Callable[..., Any], is_async: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `RoundPipe.step`."""
        _core.require_engine()
        self._check_unbound("step with a function")
        if not callable(step_fn):
            raise ValueError(f"[step] step_fn is a {type(step_fn).__name__}, expected a function")
        self._build()
        self.check_trainable()
        self.finish_update()
        for pipeline in self._pipelines:
            pipeline.asynchronous = is_async
        for pipeline in self._pipelines:
            pipeline.raise_pending()
        self._refresh_copies()
        scales = self._hand_over_scales()
        with uninterrupted():
            # May raise, so it comes first: a version that has begun must be finished.
            tickets = [pipeline.begin_step() for pipeline in self._pipelines]
            host_gradients = self._take_host_gradients()
            publish = self._unpublished
            self._unpublished = False
            if publish:
                self._publish_host_parameters()
                for pipeline in self._pipelines:
                    pipeline.begin_publish(False)
            self._pending = Update(
                lambda: self._update(publish, tickets, host_gradients, scales, lambda: step_fn(*args, **kwargs))
            )
            if scales is not None:
                GradScaler._queue_all(scales)
        if not is_async:
            self.finish_update()
            for pipeline in self._pipelines:
                pipeline.drain()
            self._publish_now()
            if scales is not None:
                GradScaler._synchronize_all(after_step=True)

    def _update(
        self,
        publish: bool,
        tickets: list[_core.StepTicket],
        host_gradients: list[torch.Tensor | None],
        scales: StepScales | None,
        step_fn: Callable[[], Any],
    ) -> bool:
        """Runs on the optimizer thread. Returns False, having done nothing, if the gradients' call has failed."""
        if publish:
            for pipeline in self._pipelines:
                pipeline.finish_publish()
        landed = [ticket.hand_over() for ticket in tickets]
        if not all(landed):
            self.clear_copies(set_to_none=True)
            return False
        self._add_host_gradients(host_gradients)
        try:
            with OptimizerCtx():
                if scales is None:
                    step_fn()
                else:
                    with scales.active():
                        step_fn()
        except BaseException:
            # Undoes the step as far as possible: step_fn may have changed parameters already.
            self.clear_copies(set_to_none=True)
            raise
        return True

    def _add_host_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(self._host_parameters.values(), gradients, strict=True):
                if gradient is None:
                    continue
                copy = self._copies[id(parameter)]
                gradient = gradient.to(device="cpu", dtype=copy.dtype)
                copy.landed_grad = gradient if copy.landed_grad is None else copy.landed_grad + gradient

    @staticmethod
    def _hand_over_scales() -> StepScales | None:
        if not _all_live():
            return None
        for group in list(owners):
            group.finish_update()
        return GradScaler._hand_over_all()

    def _take_host_gradients(self) -> list[torch.Tensor | None]:
        gradients = []
        for parameter in self._host_parameters.values():
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def finish_update(self) -> None:
        """Waits for the running update, and raises whatever it raised.

        Raises:
            RoundPipeError: a layer or a step function waits here; it would wait for itself.
        """
        _core.require_callers_thread()
        if is_updating():
            raise _core.RoundPipeError(
                "[step] the step function calls something that waits for step functions, such as synchronize() or "
                "state_dict(), and would wait for itself; call it after model.step"
            )
        pending = self._pending
        if pending is None:
            return
        pending.wait()
        unpublished = self._unpublished
        # Also when step_fn raised, because it may have changed some parameters.
        self._unpublished = True
        self._pending = None
        self._note_copies()
        self._unpublished = pending.result() or unpublished

    def _publish_host_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self._host_parameters.values():
                copy = self._copies.get(id(parameter))
                if copy is not None:
                    parameter.copy_(copy)
        self._versions = _versions(self._sources)

    def _publish_copies(self) -> None:
        """Publishes values that other code has written into the optimizer's parameters."""
        for pipeline in self._pipelines:
            pipeline.asynchronous = False
            pipeline.drain()
        self._unpublished = True
        self._publish_now()

    def _publish_now(self) -> None:
        """Publishes the latest update. Nothing may be running."""
        if self._binding is not None or not self._unpublished:
            return
        with uninterrupted():
            self._unpublished = False
            self._publish_host_parameters()
            for pipeline in self._pipelines:
                pipeline.begin_publish(True)
                pipeline.finish_publish()
            self._note_copies()

    def synchronize(self) -> None:
        """Waits for all work; parameters are then up to date, and `.grad` holds gradients that no step has consumed."""
        self.finish_update()
        for pipeline in self._pipelines:
            pipeline.drain()
        if self._binding is not None:
            self._binding.finish()
        if self._built:
            self._refresh_copies()
            self._unpublished |= self._copies_written()
        self._publish_now()
        for pipeline in self._pipelines:
            pipeline.expose()
        if _all_live():
            GradScaler._synchronize_all()

    # -- steps outside `step` ---------------------------------------------------------------------------------------

    def owns_any(self, ids: set[int]) -> bool:
        """Whether one of these ids belongs to a parameter of the models."""
        return not self._ids.isdisjoint(ids)

    def owns_trained(self, ids: set[int]) -> bool:
        """Whether one of these ids belongs to a parameter of the models that has an optimizer's copy."""
        return not ids.isdisjoint(self._copies)

    def note_reach(self) -> None:
        """Notes that the user may now hold the models' own parameters. Until an optimizer is made for the models, the
        `.grad` of these parameters is filled when a backward returns."""
        if self.is_untouched:
            for pipeline in self._pipelines:
                pipeline.exposes_gradients = True

    def _has_gradients(self) -> bool:
        return any(pipeline.has_gradients for pipeline in self._pipelines)

    def show_gradients(self) -> None:
        """Fills the `.grad` of the models' own parameters, if there are gradients that no step has consumed."""
        self.note_reach()
        if not self._has_gradients():
            return
        for pipeline in self._pipelines:
            pipeline.drain()
        self.show_weights()
        for pipeline in self._pipelines:
            pipeline.expose()

    def hand_over(self) -> None:
        """Waits for gradients that no step has consumed, and adds them to those of the optimizer's parameters.

        Waits first for a step function that is still running, because it uses the gradients handed over before.
        """
        self.finish_update()
        if not self._has_gradients() and all(p.grad is None for p in self._host_parameters.values()):
            return
        for pipeline in self._pipelines:
            pipeline.drain()
        with uninterrupted():
            tickets = [pipeline.begin_step() for pipeline in self._pipelines]
            host_gradients = self._take_host_gradients()
            for ticket in tickets:
                ticket.hand_over()
            self._add_host_gradients(host_gradients)

    def begin_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepares for a step of a torch optimizer over parameters of these models, outside `step`.

        Raises:
            ValueError: a fused optimizer updates the models.
        """
        if self._binding is not None:
            if isinstance(optimizer, BoundOptimizer) and optimizer.binding is self._binding:
                return
            self._check_unbound(f"{type(optimizer).__name__}.step()")
        _core.require_engine()
        self.finish_update()
        self.check_trainable()
        if self._has_copies_in(optimizer):
            self._refresh_copies()
            self.hand_over()
        else:
            self.synchronize()
            self.note_reach()

    def changed_from_outside(self) -> None:
        """Publishes changes made to the optimizer's parameters after the step function that used them."""
        self.finish_update()
        self._unpublished = True

    def finish_plain_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the next call read the weights of that step."""
        # Asks the optimizer, not the copies' version counters: torch's fused kernels do not count their writes.
        if self._has_copies_in(optimizer):
            self._publish_copies()

    def _has_copies_in(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(group is self for group in split_parameters(optimizer)[1])

    def zero_gradients(self, set_to_none: bool) -> None:
        """Clears all gradients that no step has consumed, once they have landed."""
        self.synchronize()
        self.clear_copies(set_to_none)

    def clear_copies(self, set_to_none: bool) -> None:
        """Clears the current gradients of the optimizer's parameters, without waiting."""
        for copy in self._copies.values():
            if set_to_none:
                copy.landed_grad = None
            elif copy.landed_grad is not None:
                copy.landed_grad.detach_().zero_()

    # -- a fused optimizer ------------------------------------------------------------------------------------------

    def _check_unbound(self, what: str) -> None:
        if self._binding is not None:
            raise ValueError(
                f"[RoundPipe] {what}: a roundpipe.optim optimizer was made for this model and updates it in place; "
                "use model.step(optimizer), or wrap the model again for another way of stepping"
            )

    @property
    def is_untouched(self) -> bool:
        """Whether no optimizer has been given these parameters."""
        return not self._built and self._binding is None

    @property
    def is_fused(self) -> bool:
        """Whether a fused optimizer was made for these models."""
        return self._binding is not None

    def pipelines(self) -> list[_core.Pipeline]:
        """All pipelines that hold parameters; the host's comes last."""
        return [*self._pipelines, *([self.host_pipeline] if self.host_pipeline is not None else [])]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The models' own parameters that require grad, each once, under its first name."""
        seen: set[int] = set()
        named = []
        for name, parameter in self._all_names():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                named.append((name, parameter))
        return named

    def bind(
        self, group_of: dict[int, int], algorithm: _core.Algorithm, moments: Moments, gradients: Gradients
    ) -> Binding:
        """Makes a fused optimizer update these models from now on. Moments of an earlier one are dropped; the fp32
        masters stay.

        Args:
            group_of: maps the id of each trained parameter to its group.
        """
        if self._built:
            raise ValueError(
                "[optim] the model's optim_parameters() are in use, expected a model that is stepped in one way only; "
                "give optim_parameters() to a torch.optim optimizer, or wrap the model again"
            )
        # Refuses invalid requests before anything is changed.
        _core.require_engine()
        _core.threads()
        _core.instruction_set()
        self.synchronize()
        if self._host_parameters and self.host_pipeline is None:
            self.host_pipeline = _core.host_parameters(
                "host", list(self._host_parameters), list(self._host_parameters.values())
            )
        self._names = self._all_names()
        self._trained = set(group_of)
        for pipeline in self._pipelines:
            pipeline.exposes_gradients = False
        self._binding = Binding(self.pipelines(), self.host_pipeline, group_of, algorithm, moments, gradients)
        return self._binding

    def step_fused(
        self,
        optimizer: torch.optim.Optimizer,
        is_async: bool,
        scaler: GradScaler | None = None,
        max_grad_norm: float | None = None,
        lr_scheduler: Any = None,
    ) -> Step:
        """See `RoundPipe.step`."""
        _core.require_engine()
        binding = self._binding
        if binding is None or not isinstance(optimizer, BoundOptimizer) or optimizer.binding is not binding:
            raise ValueError(
                f"[step] the {type(optimizer).__name__} was not made for this model (or another one was made since); "
                "make it with roundpipe.optim.AdamW(model, ...), or give step a function that calls optimizer.step()"
            )
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"[step] max_grad_norm is {max_grad_norm}, expected a positive number or None")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"[step] scaler is a {type(scaler).__name__}, expected a roundpipe.GradScaler")
        schedulers = as_schedulers(lr_scheduler)
        groups = optimizer.core_groups()
        self.check_trainable()
        self.finish_update()
        for pipeline in self._pipelines:
            pipeline.asynchronous = is_async
            pipeline.raise_pending()
        scaling = scaler is not None and scaler.is_enabled()
        scales = self._hand_over_scales() if scaling else None
        loss_scale = 0.0
        if scaler is not None and scales is not None:
            loss_scale = scaler._scale_of(scales)
        binding.make_room()  # outside the block, so that Ctrl+C ends the wait
        with uninterrupted():
            run = binding.step(groups, is_async, max_grad_norm or 0.0, loss_scale)
            if scaler is not None and scales is not None:
                self._pending = Update(lambda: self._update_scale(scaler, scales, run))
        if self._pending is not None and not is_async:
            # The scale of the next losses depends on these gradients.
            self.finish_update()
            GradScaler._synchronize_all()
        optimizer.count_step()
        for scheduler in schedulers:
            scheduler.step()
        return Step(run)

    @staticmethod
    def _update_scale(scaler: GradScaler, scales: StepScales, run: _core.StepRun) -> bool:
        """Runs on the optimizer thread. Returns False: there is nothing to publish."""
        run.wait_decided()
        with scales.active():
            scaler._update_after(run.overflowed)
        return False

    def show_weights(self) -> None:
        """Makes the models' parameters show the weights that calls read, if a fused step has hidden them."""
        if self._binding is not None and self._binding.hides_weights:
            self._binding.show_weights()
        if self._copies_written():
            self._publish_copies()

    def zero_fused_gradients(self) -> None:
        """Drops the gradients that no step has consumed, without waiting."""
        for pipeline in self.pipelines():
            pipeline.drop_gradients()
