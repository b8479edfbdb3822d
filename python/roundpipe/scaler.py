"""Loss scaling for fp16 that works with asynchronous steps.

Losses are scaled by workers while an earlier step may still be deciding the next scale. So there are two scales: losses
use the *front* scale, which moves only when the main thread hands over at `model.step`; `update` changes the *current*
one. A queued step remembers the scale its own losses had, and unscales with that. Every scale a loss sees is thus
decided by the program and never by timing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

_live_lock = threading.Lock()
_live: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # guarded by _live_lock


class StepScales:
    """The scale that each live scaler's losses of one step were multiplied with.

    Made by the main thread, then used by one optimizer thread: `with token.active(): step_fn()`.
    """

    def __init__(self, scales: dict[GradScaler, torch.Tensor]) -> None:
        self._scales = weakref.WeakKeyDictionary(scales)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Until the end, this thread unscales with this step's scales; a scaler's `update` ends it for that scaler."""
        outer = _active.scales
        _active.scales = self._scales
        try:
            yield
        finally:
            _active.scales = outer


class _Active(threading.local):
    scales: weakref.WeakKeyDictionary[GradScaler, torch.Tensor] | None = None


_active = _Active()


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose losses and steps may run in different threads.

    `scale` may be called by any thread. `unscale_`, `step` and `update` belong into the function given to `model.step`;
    called elsewhere, they do what torch's do. As an asynchronous step runs beside the next batch, a new scale reaches
    the losses one step later than it would without; an overflow seen twice on the way backs off once.

    Scale and growth tracker live on the host, where the optimizer's gradients are. Outside a step `get_scale()`
    is the scale of the next losses; inside it is the one of the step's gradients, and after `update` the new one.
    Save and load `state_dict` when no step is under way (`model.synchronize()`).

    Args:
        device: the type of device the losses are on; by default the accelerator's, or "cpu". "cuda" where there is no
            CUDA disables the scaler with a warning, as in torch.
        init_scale: first scale.
        growth_factor: the scale's factor after `growth_interval` steps without inf or NaN, > 1.
        backoff_factor: the scale's factor after a step with inf or NaN, < 1.
        growth_interval: how many steps.
        enabled: False makes `step` a plain optimizer step and everything else do nothing.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._make_scales()
        super().__init__(
            _default_device() if device is None else device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )

    def _make_scales(self) -> None:
        self._lock = threading.RLock()
        # All guarded by _lock. Front tensors are replaced, never changed, so a reader may keep one.
        self._current: torch.Tensor | None = None  # () fp32, result of the latest update, changed in place
        self._front: torch.Tensor | None = None  # () fp32, for the next losses
        self._used: torch.Tensor | None = None  # the front scale the latest losses were multiplied with
        self._pending = False  # losses were scaled since the last hand-over
        with _live_lock:
            _live.add(self)

    # The base class reads and sets the scale through this one name. Each thread sees the scale that is right for it.
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
        """Forgets what earlier losses used. Holds _lock."""
        self._used, self._pending = None, False
        self._advance_front()

    def _advance_front(self) -> None:
        """Gives the next losses the current scale. Holds _lock."""
        self._front = None if self._current is None else self._current.clone()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def scale(self, outputs: Any) -> Any:
        """`outputs`, a tensor or a (nested) iterable of tensors, times the front scale."""
        if not self._enabled:
            return outputs
        with self._lock:
            if self._current is None:
                self._lazy_init_scale_growth_tracker(torch.device("cpu"))
            front = self._used = cast(torch.Tensor, self._front)
            self._pending = True
        return _times(outputs, front)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Sets the scale after a step, as torch's."""
        if not self._enabled:
            return
        scales = _active.scales
        step_scale = None if scales is None else scales.pop(self, None)
        with self._lock:
            before = None if self._current is None else self._current.clone()
            super().update(new_scale)
            if scales is None:
                self._restart()
            elif new_scale is None and step_scale is not None:
                current, before = cast(torch.Tensor, self._current), cast(torch.Tensor, before)
                if current < before:  # inf or NaN, and it was `step_scale` that was too large
                    backed_off = (step_scale.double() * self._backoff_factor).float()
                    current.copy_(torch.minimum(before, backed_off))

    def _scale_of(self, scales: StepScales) -> float:
        """The scale of the step's losses; raises ValueError when none was scaled."""
        scale = scales._scales.get(self)
        if scale is None:
            raise ValueError("[step] the scaler has scaled no loss yet, expected scaler.scale(loss) in loss_fn")
        return float(scale)

    def _update_after(self, overflowed: bool) -> None:
        """`update` after a step whose gradients somebody else has looked at."""
        state = self._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(overflowed))}
        self.update()

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale if _active.scales is not None else self._front

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
            k: v for k, v in state.items() if k not in ("_lock", "_current", "_front", "_used", "_pending", "_scale")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_scales()
        super().__setstate__(state)

    @classmethod
    def _hand_over_all(cls) -> StepScales:
        """The main thread calls it at each step, after every earlier step function has finished.

        Returns the scales of the losses up to now, for the step that is about to be queued, and lets later
        losses use the current scale. Two models stepped one after the other get the same scales.
        """
        scales = {}
        for scaler in _all_live():
            with scaler._lock:
                step_scale = scaler._front if scaler._used is None else scaler._used
                if step_scale is not None:
                    scales[scaler] = step_scale
                scaler._pending = False
                scaler._advance_front()
        return StepScales(scales)

    @classmethod
    def _synchronize_all(cls) -> None:
        """Lets the next losses use the current scale; no step function may be running.

        A scaler with losses that no step has taken yet keeps its front scale, as all losses of a step must share one.
        """
        for scaler in _all_live():
            with scaler._lock:
                if not scaler._pending:
                    scaler._advance_front()


def _all_live() -> list[GradScaler]:
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
