"""Loss scaling for fp16 that works with asynchronous steps.

Workers scale losses while an earlier step may still be deciding the next scale. So there are two scales: losses use the
*front* scale, and `update` changes the *current* one. The engine has both (`_core.ScaleMoves`). Here is what
torch's class and step functions of Python need beside that: a queued step remembers the scale of its own losses and
unscales with it, and an `update` may follow on the main thread.

A scaler belongs to the models in whose calls it has scaled a loss, or whose step has used it. Other models' steps,
synchronisations and checks leave it alone, and it them.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast, overload

import torch

from roundpipe import _core
from roundpipe.model.step.optimizer_context import OptimizerCtx
from roundpipe.model.step.plain_steps import changed_from_outside, show_gradients_of, stepped_groups


class StepMaker(Protocol):
    """Steps models together; a `StepGroup`."""

    def finish_update(self) -> None:
        """Waits for the queued step function."""


class StepScales:
    """The scale by which scalers multiplied the losses of one step.

    The main thread makes it, then one optimizer thread uses it: `with token.active(): step_fn()`.

    Args:
        scales: of each scaler.
        maker: makes the step; a scaler that the step uses belongs to it from then on.
        pipelines: of its models.
    """

    def __init__(
        self,
        scales: dict[GradScaler, torch.Tensor],
        maker: StepMaker | None = None,
        pipelines: Sequence[_core.Pipeline] = (),
    ) -> None:
        self._scales = weakref.WeakKeyDictionary(scales)
        self._maker = maker
        self._pipelines = pipelines
        self._outside = weakref.WeakKeyDictionary({scaler: scaler._moves.outside_losses() for scaler in scales})
        self._made = False  # the step function ran and did not raise

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this thread unscale with this step's scales until the block ends or, per scaler, until its `update`."""
        outer = _active.scales
        _active.scales = self
        try:
            yield
            self._made = True
        finally:
            _active.scales = outer

    def of(self, scaler: GradScaler) -> torch.Tensor | None:
        """The scale of the losses that a scaler scaled; None if it has scaled none, or was updated."""
        return self._scales.get(scaler)

    def take(self, scaler: GradScaler) -> torch.Tensor | None:
        """The same, for an update."""
        return self._scales.pop(scaler, None)

    def note_use(self, scaler: GradScaler) -> None:
        """The step uses a scaler."""
        if self._maker is None:
            return
        scaler._belong_to(self._maker, self._pipelines)
        if scaler in self._outside:
            scaler._moves.stepped_outside(self._outside[scaler])

    def queued(self) -> None:
        """The step function has been queued; it may be followed by calls of the scalers on the main thread."""
        for scaler in list(self._scales):
            if self._maker is None or scaler._may_belong_to(self._maker, self._pipelines):
                scaler._queued = self


class _Moves(_core.ScaleMoves):
    """What the models that a scaler belongs to know of it."""

    def __init__(self, scaler: GradScaler) -> None:
        super().__init__()
        self.scaler = weakref.ref(scaler)


class _Active(threading.local):
    scales: StepScales | None = None


class _Outside(threading.local):
    """The scalers that have scaled losses on this thread, which the next step that uses them consumes."""

    def __init__(self) -> None:
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()


_active, _outside = _Active(), _Outside()
_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # all that are enabled


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _bound(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of torch's scaler by name; a first argument that is not a string is `init_scale`."""
    order = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    if not (args and isinstance(args[0], str)):
        order = [*order[1:], order[0].replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    try:
        given = inspect.Signature(order).bind(*args, **options).arguments
    except TypeError as error:
        raise TypeError(f"GradScaler(): {error}") from None
    for name in ("init_scale", "growth_factor", "backoff_factor"):
        if not isinstance(given.get(name, 1.0), (int, float)):
            raise ValueError(f"[GradScaler] {name} is {given[name]!r}, expected a number")
    return given


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose losses and steps may run in different threads.

    Any thread may call `scale`. `step` and `unscale_` belong in the function given to `model.step`. On the main thread,
    they wait for the queued steps, and return None after such a step. `update` may be called at the end of that
    function, or on the main thread after `model.step`. If no step is queued, each of them behaves as torch's. Because
    an asynchronous step runs beside the next batch, a new scale reaches the losses one step later than with
    synchronous steps. If an overflow is seen twice in between, the scale backs off once.

    Scale and growth tracker live on the host, where the optimizer's gradients are. Outside a step, `get_scale()`
    is the scale of the next losses. Inside a step, it is the scale of the step's gradients, and after `update` the new
    one. Save and load `state_dict` only when no step is running (`model.synchronize()`).

    Args:
        init_scale: first scale.
        growth_factor: factor of the scale after `growth_interval` steps without inf or NaN, > 1.
        backoff_factor: factor of the scale after a step with inf or NaN, < 1.
        growth_interval: number of steps.
        enabled: False makes `step` a plain optimizer step; everything else then does nothing.
        device: type of the losses' device; by default the accelerator's type, or "cpu". "cuda" without CUDA disables
            the scaler with a warning, as in torch. May also come first, as in torch's signature.
    """

    @overload
    def __init__(
        self,
        init_scale: float = ...,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
        *,
        device: str | None = ...,
    ) -> None: ...

    @overload
    def __init__(
        self,
        device: str,
        init_scale: float = ...,
        growth_factor: float = ...,
        backoff_factor: float = ...,
        growth_interval: int = ...,
        enabled: bool = ...,
    ) -> None: ...

    def __init__(self, *args: Any, **options: Any) -> None:
        given = _bound(args, options)
        if given.get("device") is None:
            given["device"] = _default_device()
        self._make_scales()
        super().__init__(**given)
        if self._enabled:
            _scalers.add(self)

    def _make_scales(self) -> None:
        self._moves = _Moves(self)
        self._makers: weakref.WeakSet[StepMaker] = weakref.WeakSet()  # of the steps that have used the scaler
        # Used by the main thread only.
        self._met: weakref.WeakSet[_core.Pipeline] = weakref.WeakSet()  # have made a step since there is this scaler
        self._queued: StepScales | None = None  # of the last step function, until `update` on the main thread
        self._late: _core.FunctionRun | None = None  # an `update` that the main thread has queued

    # The base class reads, changes and sets these by their names. Each thread sees the scale that applies to it.
    @property
    def _scale(self) -> torch.Tensor | None:
        scales = _active.scales
        step_scale = None if scales is None else scales.of(self)
        return self._moves.current if step_scale is None else step_scale

    @_scale.setter
    def _scale(self, value: torch.Tensor | None) -> None:
        if value is not None:
            cast(torch.Tensor, self._ready().current).copy_(value)
            self._moves.restart_losses()

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        return self._moves.growth_tracker

    @_growth_tracker.setter
    def _growth_tracker(self, value: torch.Tensor | None) -> None:
        if value is not None:
            cast(torch.Tensor, self._ready().growth_tracker).copy_(value)

    def loss_scale(self) -> _core.LossScale | None:
        """The engine's part, for losses that it makes itself; None if disabled."""
        return self._ready() if self._enabled else None

    def _ready(self) -> _Moves:
        """The engine's part, once it has a scale."""
        if not self._moves.started:
            self._moves.start(self._init_scale, self._init_growth_tracker)
        return self._moves

    def _belong_to(self, maker: StepMaker, pipelines: Sequence[_core.Pipeline]) -> None:
        self._makers.add(maker)
        self._moves.belong_to(list(pipelines))

    def _belongs_to(self, maker: StepMaker, pipelines: Sequence[_core.Pipeline]) -> bool:
        return maker in self._makers or any(pipeline.has_loss_scale(self._moves) for pipeline in pipelines)

    def _may_belong_to(self, maker: StepMaker, pipelines: Sequence[_core.Pipeline]) -> bool:
        """The same for a scaler that no step has used yet: this one may be the first."""
        return self._belongs_to(maker, pipelines) or not self._makers

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._ready()

    def scale(self, outputs: Any) -> Any:
        """Multiplies `outputs`, a tensor or a (nested) iterable of tensors, by the front scale."""
        if not self._enabled:
            return outputs
        scales = _active.scales
        step_scale = None if scales is None else scales.of(self)
        if step_scale is not None:
            return _times(outputs, step_scale)
        _outside.scalers.add(self)
        return _times(outputs, self._ready().use())

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale of their losses, as torch's `unscale_` does."""
        if self._is_behind_a_step:
            self._behind_the_step(lambda: super(GradScaler, self).unscale_(optimizer), optimizer)
        else:
            self._note_use(optimizer)
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales if that has not been done, and steps the optimizer unless there is inf or NaN, as torch's `step`."""
        if self._is_behind_a_step:
            self._behind_the_step(lambda: super(GradScaler, self).step(optimizer, *args, **kwargs), optimizer)
            return None
        self._note_use(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _note_use(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes which models' step uses the scaler. Outside a step function, fills the `.grad` of models' own
        parameters that `optimizer` steps."""
        if not self._enabled:
            return
        if _active.scales is not None:
            _active.scales.note_use(self)
            return
        self._moves.finish_steps()
        show_gradients_of(optimizer)
        for group in stepped_groups(optimizer):
            self._belong_to(group, group.models.all_pipelines())

    @property
    def _is_behind_a_step(self) -> bool:
        """Whether this is the main thread and it has not yet updated the scale for a queued step function."""
        return self._enabled and _active.scales is None and self._queued is not None

    def _behind_the_step(self, work: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        """Runs `work` on the optimizer thread, as part of the step that was queued last, and waits for it."""
        scales = cast(StepScales, self._queued)

        def run() -> bool:
            with OptimizerCtx(), scales.active():
                scales.note_use(self)
                work()
            return False

        update = _core.after_step_functions(run)
        update.wait()
        update.result()
        changed_from_outside(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None, is_async: bool = True) -> None:
        """Sets the scale after a step, as torch's `update`.

        Args:
            new_scale: replaces the scale that would follow from the step's gradients.
            is_async: for the main thread after `model.step`. True returns at once, and the losses get the new scale
                with the next `update`. False waits for the step, and the next losses use the new scale.
        """
        if not self._enabled:
            return
        if not self._is_behind_a_step:
            self._update_here(new_scale)
            return
        scales = cast(StepScales, self._queued)
        self._finish_late()
        self._moves.move_outside()

        def run() -> bool:
            # If the step was not made, the step or its batch has raised already.
            if scales._made:
                with scales.active():
                    self._update_here(new_scale)
            return False

        self._queued = None
        self._late = _core.after_step_functions(run)
        if not is_async:
            self._finish_late()
            self._moves.advance()

    def _finish_late(self) -> None:
        """Waits for the queued update, and raises whatever it raised."""
        late, self._late = self._late, None
        if late is not None:
            late.wait()
            late.result()

    def _update_here(self, new_scale: float | torch.Tensor | None) -> None:
        """Runs `update` in this thread, at once."""
        scales = _active.scales
        if scales is None:
            self._moves.finish_steps()
            super().update(new_scale)
            self._moves.restart_losses()
            return
        scales.note_use(self)
        step_scale = scales.take(self)
        before = None if self._moves.current is None else self._moves.current.clone()
        super().update(new_scale)
        if new_scale is None and step_scale is not None and before is not None:
            self._moves.decided(before, step_scale, self._backoff_factor)

    @property
    def enabled(self) -> bool:
        """Whether losses are scaled."""
        return self._enabled

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """The growth factor; `up_to_date` waits for the queued steps first, because they may set it."""
        return self._settled(up_to_date)._growth_factor

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """The backoff factor; `up_to_date` as in `get_growth_factor`."""
        return self._settled(up_to_date)._backoff_factor

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """The growth interval; `up_to_date` as in `get_growth_factor`."""
        return self._settled(up_to_date)._growth_interval

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor for future updates, but not for queued ones."""
        self._settled(True)._growth_factor = new_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor for future updates, but not for queued ones."""
        self._settled(True)._backoff_factor = new_factor

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval for future updates, but not for queued ones."""
        self._settled(True)._growth_interval = new_interval

    def _settled(self, wait: bool) -> GradScaler:
        """Returns this scaler; `wait` on the main thread first waits until no queued step can change it."""
        if wait and _active.scales is None and (self._queued is not None or self._late is not None):
            _core.after_step_functions(lambda: False).wait()
        return self

    def _get_scale_async(self) -> torch.Tensor | None:
        if _active.scales is not None or not self._moves.started:
            return self._scale
        return self._moves.next()

    def resume_state(self) -> dict[str, Any]:
        """What a run that resumes needs beside `state_dict()`: the scale of the next losses, and who moves it."""
        front = float(self._moves.waiting_or_next()) if self._moves.started else None
        return {"front": front, "updates_on_main": self._moves.moves_outside}

    def load_resume_state(self, state: dict[str, Any]) -> None:
        """Restores `resume_state()`, after `load_state_dict`."""
        if state["front"] is not None:
            self._ready().restart(torch.tensor(state["front"], dtype=torch.float32))
        self._moves.moves_outside = state["updates_on_main"]

    def state_dict(self) -> dict[str, Any]:
        """The current scale and the growth state; {} if disabled."""
        if self._enabled and _active.scales is None:
            self._moves.finish_steps()
        return self._with_current(super().state_dict())

    def _with_current(self, state: dict[str, Any]) -> dict[str, Any]:
        if state and self._moves.started:
            state["scale"] = cast(torch.Tensor, self._moves.current).item()
        return state

    def later_state(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that waits for the steps made so far and returns `state_dict()` after them, and
        `resume_state()` as it is now. Taking it waits for no step of a fused optimizer."""
        if self._late is not None:
            self._late.wait()
        resume, state = self.resume_state(), self._with_current(super().state_dict())
        if not (state and self._moves.started):
            return lambda: {"state": state, "resume": resume}
        later = self._moves.later_state()

        def read() -> dict[str, Any]:
            decided = later()
            return {
                "state": state | {"scale": decided.scale, "_growth_tracker": decided.growth_tracker},
                "resume": resume,
            }

        return read

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`. The next losses use the restored scale."""
        if self._enabled:
            self._moves.finish_steps()
        super().load_state_dict(state_dict)
        self._moves.restart_losses()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        own = ("_moves", "_makers", "_met", "_scale", "_growth_tracker", "_queued", "_late")
        return {key: value for key, value in state.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_scales()
        super().__setstate__(state)
        if self._enabled:
            _scalers.add(self)

    def _begin_step(self, maker: StepMaker, pipelines: Sequence[_core.Pipeline], several_nodes: bool) -> torch.Tensor:
        """The scale of the losses so far, for a step that is about to be made.

        Raises:
            ValueError: no loss has been scaled.
        """
        for other in list(self._makers):
            other.finish_update()
        self._finish_late()
        if several_nodes:
            self._ready()
        scale = self._moves.begin_step(list(pipelines), several_nodes)
        self._belong_to(maker, pipelines)
        return scale

    def _stepped(self, pipelines: Sequence[_core.Pipeline], run: _core.StepRun, scale: torch.Tensor) -> None:
        """A fused step of losses with this scale was started. It counts as one with the steps of other optimizers since
        the last update."""
        rule = _core.ScaleRule(self._growth_factor, self._backoff_factor, self._growth_interval)
        states = self._per_optimizer_states
        found = [value for state in states.values() for value in state["found_inf_per_device"].values()]
        self._moves.stepped_by(list(pipelines), run, scale, rule, any(value.item() != 0 for value in found))
        states.clear()


def _scalers_of(pipelines: Iterable[_core.Pipeline]) -> list[GradScaler]:
    """The scalers that belong to the models of these pipelines."""
    found: dict[int, GradScaler] = {}
    for pipeline in pipelines:
        for losses in pipeline.loss_scales():
            scaler = losses.scaler() if isinstance(losses, _Moves) else None
            if scaler is not None:
                found[id(scaler)] = scaler
    return list(found.values())


def hand_over(maker: StepMaker, pipelines: Sequence[_core.Pipeline]) -> StepScales | None:
    """Hands over the scales of losses to a step function that is about to be queued.

    The function may use the scalers that belong to its models and, if it is the first, one that has scaled losses on
    this thread. The main thread calls this at each step, once earlier step functions of the models have finished.

    Returns:
        The scales of the losses so far; later losses use the current ones. None if there is no scaler.
    """
    # A model knows a scaler once it has made a loss with it, which a batch that was submitted may still have to do.
    known = list(_scalers)
    for pipeline in pipelines:
        if any(pipeline not in scaler._met for scaler in known):
            pipeline.wait_losses()
    for scaler in known:
        scaler._met.update(pipelines)
    scales = {}
    for scaler in {*_scalers_of(pipelines), *_outside.scalers}:
        if not scaler._moves.started:
            continue
        if scaler._belongs_to(maker, pipelines):
            scales[scaler] = scaler._begin_step(maker, pipelines, several_nodes=False)
            scaler._moves.stepped(list(pipelines))
        else:
            scales[scaler] = scaler._moves.next()
    return StepScales(scales, maker, pipelines) if scales else None


def synchronize_scales(maker: StepMaker, pipelines: Sequence[_core.Pipeline], after_step: bool = False) -> None:
    """Makes the next losses use the current scale; no step function of the models may be running.

    A scaler keeps the scale of its next losses if no step has consumed its losses yet, because all losses of a step
    must share one scale.

    Args:
        after_step: whether this follows a synchronous step, which an `update` on the main thread may follow.
    """
    for scaler in {*_scalers_of(pipelines), *_outside.scalers}:
        if not scaler._belongs_to(maker, pipelines):
            continue
        scaler._finish_late()
        if not (after_step and scaler._moves.moves_outside):
            scaler._moves.settle(list(pipelines))


def _times(outputs: Any, scale: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs * scale.to(outputs.device, non_blocking=True)
    if isinstance(outputs, (list, tuple)):
        scaled = [_times(value, scale) for value in outputs]
        return type(outputs)(*scaled) if hasattr(outputs, "_fields") else type(outputs)(scaled)
    try:
        return (_times(value, scale) for value in iter(outputs))
    except TypeError:
        raise ValueError(
            f"[GradScaler.scale] got a {type(outputs).__name__}, expected a tensor or an iterable of tensors"
        ) from None
