"""The optimizer's side of a model: its parameters, its thread, and which weights a call reads.

Asynchronous steps: call s + 1 reads the weights of update s - 1, so update s runs while call s + 1 computes, and
staleness is exactly one. An update is published to the weights when the next step is made, never in between, so what
a call reads does not depend on timing.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.binding import Binding, Gradients, Moments, Step, as_schedulers
from roundpipe.optimizer_context import OptimizerCtx
from roundpipe.scaler import GradScaler, StepScales, _all_live

if TYPE_CHECKING:
    from roundpipe.pipe import RoundPipe

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundpipe-optimizer")
_groups: weakref.WeakSet[StepGroup] = weakref.WeakSet()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Puts off Ctrl+C until the block is over. For short blocks that must not stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


class _Update:
    """One update, on the optimizer thread. REQUIRES: made where Ctrl+C is put off.

    In place of a Future, whose lock stays locked when Ctrl+C arrives at the wrong statement of a wait.

    Args:
        work: returns whether an update was made.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._over = _core.Event()
        self._made = False
        self._error: BaseException | None = None
        _thread.submit(self._run, work)

    def _run(self, work: Callable[[], bool]) -> None:
        try:
            self._made = work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.fire()

    def wait(self) -> None:
        """Waits until it is over."""
        self._over.wait()

    def result(self) -> bool:
        """Whether an update was made, or raises what the update raised. REQUIRES: it is over."""
        if self._error is not None:
            raise self._error
        return self._made


class StepGroup:
    """Models and host parameters that one optimizer steps together.

    Args:
        pipes: the models in the pipeline, by the names of their modules in the whole model ("" for the root).
        host_parameters: parameters that stay on the host and are used there, by name.
        optim_dtype: dtype of the optimizer's copies; None keeps each parameter's.
    """

    def __init__(
        self,
        pipes: dict[str, RoundPipe],
        host_parameters: dict[str, nn.Parameter],
        optim_dtype: torch.dtype | None,
    ) -> None:
        # Not the models themselves: one holds this group, and a cycle would keep its memory until a garbage collection.
        self._pipes = {path: weakref.ref(pipe) for path, pipe in pipes.items()}
        self._pipelines = [pipe._pipeline for pipe in pipes.values()]
        self._host_parameters = host_parameters
        self._optim_dtype = optim_dtype
        self._copies: dict[int, nn.Parameter] = {}  # by id of the user's parameter; trainable ones only
        self._sources: list[nn.Parameter] = []  # the users' parameters that _copies belong to
        self._versions: list[int] = []  # of _sources, as last seen
        self._names: list[tuple[str, nn.Parameter]] = []  # every name of every parameter
        self._trained: set[int] = set()  # ids of the parameters that a fused optimizer trains
        self._built = False
        self._pending: _Update | None = None
        self._unpublished = False
        self._binding: Binding | None = None
        self.host_pipeline: _core.Pipeline | None = None  # of the host parameters, for a fused optimizer
        _groups.add(self)

    # -- the optimizer's parameters ---------------------------------------------------------------------------------

    def optim_named_parameters(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters with their names; a frozen parameter is the user's own."""
        self._check_unbound("optim_parameters")
        self._build()
        return self._iterate(prefix, remove_duplicate)

    def _iterate(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._names:
            if remove_duplicate and id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, self._copies.get(id(parameter), parameter)

    def _build(self) -> None:
        if self._built:
            return
        with _uninterrupted():
            self._build_copies()

    def _all_names(self) -> list[tuple[str, nn.Parameter]]:
        names: list[tuple[str, nn.Parameter]] = []
        for path, reference in self._pipes.items():
            pipe = reference()
            if pipe is None:
                raise ReferenceError("[RoundPipe] the model is gone, expected it to live as long as its optimizer")
            for name, parameter in pipe._original_model.named_parameters(remove_duplicate=False):
                names.append((f"{path}.{name}" if path else name, parameter))
        names.extend(self._host_parameters.items())
        return names

    def _build_copies(self) -> None:
        self._names = self._all_names()
        for _, parameter in self._names:
            if not parameter.requires_grad or id(parameter) in self._copies:
                continue
            dtype = self._optim_dtype if self._optim_dtype and parameter.is_floating_point() else parameter.dtype
            copy = nn.Parameter(parameter.detach().to(device="cpu", dtype=dtype, copy=True))
            copy.__dict__.update(parameter.__dict__)
            self._copies[id(parameter)] = copy
            self._sources.append(parameter)
        self._versions = [source._version for source in self._sources]
        for pipeline in self._pipelines:
            blocks = pipeline.block_parameters()
            pipeline.set_optimizer_parameters([[self._copies.get(id(p), p) for p in block] for block in blocks])
        self._built = True

    def check_trainable(self) -> None:
        """Raises ValueError when a parameter became trainable after the optimizer's copies were made."""
        known = self._copies if self._binding is None else self._trained
        for name, parameter in self._names:
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"[RoundPipe] parameter '{name}' was frozen when the optimizer's parameters were made and requires "
                    "grad now, so no optimizer would update it; set requires_grad before optim_parameters() or the "
                    "first step, and wrap the model again to change it (freezing later is fine)"
                )

    def _refresh_copies(self) -> None:
        """Takes over values that the user has written into the model's parameters."""
        with torch.no_grad():
            for index, source in enumerate(self._sources):
                if source._version != self._versions[index]:
                    self._copies[id(source)].copy_(source)
                    self._versions[index] = source._version

    # -- steps ------------------------------------------------------------------------------------------------------

    def step(self, step_fn: Callable[..., Any], is_async: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See `RoundPipe.step`."""
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
        with _uninterrupted():
            # May raise, so before anything is promised: a version that is begun has to be finished.
            tickets = [pipeline.begin_step() for pipeline in self._pipelines]
            host_gradients = self._take_host_gradients()
            publish = self._unpublished
            self._unpublished = False
            if publish:
                self._publish_host_parameters()
                for pipeline in self._pipelines:
                    pipeline.begin_publish(False)
            self._pending = _Update(
                lambda: self._update(publish, tickets, host_gradients, scales, lambda: step_fn(*args, **kwargs))
            )
        if not is_async:
            self.finish_update()
            for pipeline in self._pipelines:
                pipeline.drain()
            self._publish_now()
            if scales is not None:
                GradScaler._synchronize_all()

    def _update(
        self,
        publish: bool,
        tickets: list[_core.StepTicket],
        host_gradients: list[torch.Tensor | None],
        scales: StepScales | None,
        step_fn: Callable[[], Any],
    ) -> bool:
        """On the optimizer thread. False when the gradients' call had failed, and nothing was done."""
        if publish:
            for pipeline in self._pipelines:
                pipeline.finish_publish()
        landed = [ticket.hand_over() for ticket in tickets]
        if not all(landed):
            self._drop_gradients()
            return False
        with torch.no_grad():
            for parameter, gradient in zip(self._host_parameters.values(), host_gradients, strict=True):
                if gradient is None:
                    continue
                copy = self._copies[id(parameter)]
                gradient = gradient.to(device="cpu", dtype=copy.dtype)
                copy.grad = gradient if copy.grad is None else copy.grad + gradient
        try:
            with OptimizerCtx():
                if scales is None:
                    step_fn()
                else:
                    with scales.active():
                        step_fn()
        except BaseException:
            # As if the step had not been made, as far as that is ours to undo.
            self._drop_gradients()
            raise
        return True

    def _drop_gradients(self) -> None:
        for copy in self._copies.values():
            copy.grad = None

    @staticmethod
    def _hand_over_scales() -> StepScales | None:
        if not _all_live():
            return None
        for group in list(_groups):
            group.finish_update()
        return GradScaler._hand_over_all()

    def _take_host_gradients(self) -> list[torch.Tensor | None]:
        gradients = []
        for parameter in self._host_parameters.values():
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def finish_update(self) -> None:
        """Waits for the update that runs, and raises what it raised."""
        pending = self._pending
        if pending is None:
            return
        pending.wait()
        unpublished = self._unpublished
        # Also when step_fn raised: it may have changed some parameters.
        self._unpublished = True
        self._pending = None
        self._unpublished = pending.result() or unpublished

    def _publish_host_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self._host_parameters.values():
                copy = self._copies.get(id(parameter))
                if copy is not None:
                    parameter.copy_(copy)
        self._versions = [source._version for source in self._sources]

    def _publish_now(self) -> None:
        """Makes the latest update what calls read. Nothing may be running."""
        if self._binding is not None or not self._unpublished:
            return
        with _uninterrupted():
            self._unpublished = False
            self._publish_host_parameters()
            for pipeline in self._pipelines:
                pipeline.begin_publish(True)
                pipeline.finish_publish()

    def synchronize(self) -> None:
        """Waits for everything; parameters up to date, `.grad` filled with what no step has consumed yet."""
        self.finish_update()
        for pipeline in self._pipelines:
            pipeline.drain()
        if self._binding is not None:
            self._binding.finish()
        if self._built:
            self._refresh_copies()
        self._publish_now()
        for pipeline in self._pipelines:
            pipeline.expose()
        if _all_live():
            GradScaler._synchronize_all()

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
        """All that hold parameters, those of the host last."""
        return [*self._pipelines, *([self.host_pipeline] if self.host_pipeline is not None else [])]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The models' own parameters that require grad, each once, by its first name."""
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
        """Lets a fused optimizer update these models from now on. Moments of an earlier one are dropped, the fp32
        masters stay.

        Args:
            group_of: by id of each trained parameter, its group.
        """
        if self._built:
            raise ValueError(
                "[optim] the model's optim_parameters() are in use, expected a model that is stepped in one way only; "
                "give optim_parameters() to a torch.optim optimizer, or wrap the model again"
            )
        self.synchronize()
        if self._host_parameters and self.host_pipeline is None:
            self.host_pipeline = _core.host_parameters(
                "host", list(self._host_parameters), list(self._host_parameters.values())
            )
        self._names = self._all_names()
        self._trained = set(group_of)
        self._binding = Binding(self, group_of, algorithm, moments, gradients)
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
        from roundpipe.optim.for_model import ForModel  # makes its bindings here

        binding = self._binding
        if binding is None or not isinstance(optimizer, ForModel) or optimizer.binding is not binding:
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
        binding.make_room()  # outside of the block, so that Ctrl+C ends the wait
        with _uninterrupted():
            run = binding.step(groups, is_async, max_grad_norm or 0.0, loss_scale)
            if scaler is not None and scales is not None:
                self._pending = _Update(lambda: self._update_scale(scaler, scales, run))
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
        """On the optimizer thread. False: there is nothing to publish."""
        run.wait_decided()
        with scales.active():
            scaler._update_after(run.overflowed)
        return False

    def show_weights(self) -> None:
        """Lets the models' parameters show the weights that calls read, if a fused step has hidden them."""
        if self._binding is not None and self._binding.hides_weights:
            self._binding.show_weights()

    def zero_fused_gradients(self) -> None:
        """Drops the gradients that no step has taken, without waiting."""
        for pipeline in self.pipelines():
            pipeline.drop_gradients()
