"""Loss scaling for fp16 that works with asynchronous steps.

Workers scale losses while an earlier step may still be deciding the next scale. So there are two scales: losses use the
*front* scale, `update` changes the *current* one. A queued step remembers the scale of its own losses and unscales with
it. The main thread decides when the front scale moves: at `model.step` if the step function updates the scale, at
`update` if the main thread does. So the program decides the scale of every loss; timing never does.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast, overload

import torch

from roundpipe.step.optimizer_context import OptimizerCtx
from roundpipe.step.plain_steps import changed_from_outside, show_gradients_of
from roundpipe.step.update import Update, after_steps

_live_lock = threading.Lock()
_live: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # guarded by _live_lock


class StepScales:
    """The scale by which each live scaler multiplied the losses of one step.

    The main thread makes it, then one optimizer thread uses it: `with token.active(): step_fn()`.
    """

    def __init__(self, scales: dict[GradScaler, torch.Tensor]) -> None:
        self._scales = weakref.WeakKeyDictionary(scales)
        self._made = False  # the step function ran and did not raise

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this thread unscale with this step's scales until the block ends or, per scaler, until its `update`."""
        outer = _active.scales
        _active.scales = self._scales
        try:
            yield
            self._made = True
        finally:
            _active.scales = outer


class _Active(threading.local):
    scales: weakref.WeakKeyDictionary[GradScaler, torch.Tensor] | None = None


_active = _Active()


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

    def _make_scales(self) -> None:
        self._lock = threading.RLock()
        # Guarded by _lock. Front tensors are replaced, never changed, so a reader may keep one.
        self._current: torch.Tensor | None = None  # () fp32, result of the latest update, changed in place
        self._front: torch.Tensor | None = None  # () fp32, for the next losses
        self._used: torch.Tensor | None = None  # the front scale of the latest losses
        self._pending = False  # losses were scaled since the last hand-over
        # Used by the main thread only.
        self._queued: StepScales | None = None  # of the last step function, until `update` on the main thread
        self._late: Update | None = None  # an `update` that the main thread has queued
        self._updates_on_main = False
        with _live_lock:
            _live.add(self)

    # The base class reads and sets the scale by this one name. Each thread sees the scale that applies to it.
    @property
    def _scale(self) -> torch.Tensor | None:
        scales = _active.scales
        step_scale = None if scales is None else scales.get(self)
        return self._current if step_scale is None else step_scale

    @_scale.setter
    def _scale(self, value: torch.Tensor | None) -> None:
        with self._lock:
            self._current = value
            self._restart()

    def _restart(self) -> None:
        """Forgets the scales that earlier losses used. Holds _lock."""
        self._used, self._pending = None, False
        self._advance_front()

    def _advance_front(self) -> None:
        """Makes the next losses use the current scale. Holds _lock."""
        self._front = None if self._current is None else self._current.clone()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def scale(self, outputs: Any) -> Any:
        """Multiplies `outputs`, a tensor or a (nested) iterable of tensors, by the front scale."""
        if not self._enabled:
            return outputs
        scales = _active.scales
        if scales is not None and self in scales:
            return _times(outputs, scales[self])
        with self._lock:
            if self._current is None:
                self._lazy_init_scale_growth_tracker(torch.device("cpu"))
            front = self._used = cast(torch.Tensor, self._front)
            self._pending = True
        return _times(outputs, front)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the optimizer's gradients by the scale of their losses, as torch's `unscale_` does."""
        if self._is_behind_a_step:
            self._behind_the_step(lambda: super(GradScaler, self).unscale_(optimizer), optimizer)
        else:
            self._show_gradients(optimizer)
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales if that has not been done, and steps the optimizer unless there is inf or NaN, as torch's `step`."""
        if self._is_behind_a_step:
            self._behind_the_step(lambda: super(GradScaler, self).step(optimizer, *args, **kwargs), optimizer)
            return None
        self._show_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def _show_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Fills the `.grad` of models' own parameters that `optimizer` steps, outside a step function."""
        if self._enabled and _active.scales is None:
            show_gradients_of(optimizer)

    @property
    def _is_behind_a_step(self) -> bool:
        """Whether this is the main thread and it has not yet updated the scale for a queued step function."""
        return self._enabled and _active.scales is None and self._queued is not None

    def _behind_the_step(self, work: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        """Runs `work` on the optimizer thread, as part of the step that was queued last, and waits for it."""
        scales = cast(StepScales, self._queued)

        def run() -> bool:
            with OptimizerCtx(), scales.active():
                work()
            return False

        update = after_steps(run)
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
        self._updates_on_main = True
        with self._lock:
            self._advance_front()

        def run() -> bool:
            # If the step was not made, the step or its batch has raised already.
            if scales._made:
                with scales.active():
                    self._update_here(new_scale)
            return False

        self._queued = None
        self._late = after_steps(run)
        if not is_async:
            self._finish_late()
            with self._lock:
                self._advance_front()

    def _finish_late(self) -> None:
        """Waits for the queued update, and raises whatever it raised."""
        late, self._late = self._late, None
        if late is not None:
            late.wait()
            late.result()

    def _update_here(self, new_scale: float | torch.Tensor | None) -> None:
        """Runs `update` in this thread, at once."""
        scales = _active.scales
        step_scale = None if scales is None else scales.pop(self, None)
        with self._lock:
            before = None if self._current is None else self._current.clone()
            super().update(new_scale)
            if scales is None:
                self._restart()
            elif new_scale is None and step_scale is not None:
                current, before = cast(torch.Tensor, self._current), cast(torch.Tensor, before)
                if current < before:  # inf or NaN, caused by a `step_scale` that was too large
                    backed_off = (step_scale.double() * self._backoff_factor).float()
                    current.copy_(torch.minimum(before, backed_off))

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
            after_steps(lambda: False).wait()
        return self

    def _note_step(self) -> None:
        """Makes the scale of the next losses that of the step to be made, though this node may have had no loss."""
        if self._enabled and not self._pending:
            self.scale(torch.zeros(()))

    def _scale_of(self, scales: StepScales) -> float:
        """The scale of the step's losses; raises ValueError if no loss was scaled."""
        scale = scales._scales.get(self)
        if scale is None:
            raise ValueError("[step] the scaler has scaled no loss yet, expected scaler.scale(loss) in loss_fn")
        return float(scale)

    def _update_after(self, overflowed: bool) -> None:
        """`update` after a step whose gradients other code has checked."""
        state = self._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(overflowed))}
        self._update_here(None)

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale if _active.scales is not None else self._front

    def resume_state(self) -> dict[str, Any]:
        """What a run that resumes needs beside `state_dict()`: the scale of the next losses, and who moves it."""
        with self._lock:
            front = self._used if self._pending else self._front
            return {"front": None if front is None else float(front), "updates_on_main": self._updates_on_main}

    def load_resume_state(self, state: dict[str, Any]) -> None:
        """Restores `resume_state()`, after `load_state_dict`."""
        with self._lock:
            front = state["front"]
            self._front = None if front is None else torch.tensor(front, dtype=torch.float32)
            self._updates_on_main = state["updates_on_main"]

    def state_dict(self) -> dict[str, Any]:
        """The current scale and the growth state; {} if disabled."""
        state = super().state_dict()
        with self._lock:
            if state and self._current is not None:
                state["scale"] = self._current.item()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`. The next losses use the restored scale."""
        with self._lock:
            super().load_state_dict(state_dict)
            self._restart()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            k: v
            for k, v in state.items()
            if k not in ("_lock", "_current", "_front", "_used", "_pending", "_scale", "_queued", "_late")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_scales()
        super().__setstate__(state)

    @classmethod
    def _hand_over_all(cls) -> StepScales:
        """Hands over the losses' scales. The main thread calls this at each step, once earlier step functions finished.

        Returns the scales of the losses so far, for the step that is about to be queued, and makes later losses use the
        current scale. Two models stepped one after the other get the same scales.
        """
        scales = {}
        for scaler in live_scalers():
            scaler._finish_late()
            with scaler._lock:
                step_scale = scaler._front if scaler._used is None else scaler._used
                if step_scale is not None:
                    scales[scaler] = step_scale
                scaler._pending = False
                if not scaler._updates_on_main:
                    scaler._advance_front()
        return StepScales(scales)

    @classmethod
    def _queue_all(cls, scales: StepScales) -> None:
        """Notes a step function that the main thread has queued, so that the scale may be updated for it."""
        for scaler in live_scalers():
            scaler._queued = scales

    @classmethod
    def _synchronize_all(cls, after_step: bool = False) -> None:
        """Makes the next losses use the current scale; no step function may be running.

        A scaler keeps its front scale if no step has consumed its losses yet, because all losses of a step must share
        one scale.

        Args:
            after_step: whether this follows a synchronous step, which an `update` on the main thread may follow.
        """
        for scaler in live_scalers():
            scaler._finish_late()
            with scaler._lock:
                if not (scaler._pending or (after_step and scaler._updates_on_main)):
                    scaler._advance_front()


def live_scalers() -> list[GradScaler]:
    """All scalers that exist."""
    with _live_lock:
        return list(_live)


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
