"""A fused optimizer, and what its steps return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch

from roundpipe import _core

MOMENTS = {"float32": _core.MomentFormat.FLOAT32, "8bit": _core.MomentFormat.BLOCKWISE_8BIT}
MASTERS = {"float32": _core.MasterFormat.FLOAT32, "24bit": _core.MasterFormat.BITS_24}
CLIP_BY = {
    "norm": _core.ClipBy.NORM,
    "last_norm": _core.ClipBy.LAST_NORM,
    "measured_norm": _core.ClipBy.MEASURED_NORM,
}
Moments = Literal["float32", "8bit"]
Masters = Literal["float32", "24bit"]
Gradients = Literal["weights", "float32", "at_once"]
DiskHolds = Literal["moments", "masters"]
ClipBy = Literal["norm", "last_norm", "measured_norm"]


class Formats(NamedTuple):
    """How a fused optimizer keeps what it knows of each parameter; see `roundpipe.optim.AdamW`."""

    moments: Moments = "float32"
    masters: Masters = "float32"
    gradients: Gradients = "weights"

    def check(self) -> None:
        """Raises ValueError for a name that is no format."""
        known = {"moments": [*MOMENTS], "masters": [*MASTERS], "gradients": [*get_args(Gradients)]}
        for name, format_name in self._asdict().items():
            if format_name not in known[name]:
                expected = " or ".join(map(repr, known[name]))
                raise ValueError(f"[optim] {name} is {format_name!r}, expected {expected}")


class Step:
    """One step of a fused optimizer, returned by `model.step(optimizer)`. `float(step)` is `step.grad_norm`."""

    def __init__(self, run: _core.StepRun) -> None:
        self._run = run

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, unscaled, before clipping. Waits until the last gradient has landed and, of an
        optimizer that uses gradients at once, until the last update.

        NaN unless the step was given `max_grad_norm` or a `scaler` (`max_grad_norm=math.inf` only measures). Also NaN
        if the backward failed.
        """
        self._run.wait_measured()
        return self._run.norm

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing because a gradient under a scaler was inf or NaN. With a scaler, waits until
        the last gradient has landed."""
        self._run.wait_decided()
        return self._run.overflowed

    def wait(self) -> None:
        """Waits until the update has finished."""
        self._run.wait_finished()

    @property
    def updated_blocks(self) -> int:
        """How many parameter blocks (a layer's, or a tied parameter) were updated. Waits for all."""
        self.wait()
        return self._run.updated_blocks

    @property
    def abandoned_blocks(self) -> int:
        """How many blocks kept their values because the backward that makes their gradients failed. Waits for all."""
        self.wait()
        return self._run.abandoned_blocks

    def __float__(self) -> float:
        return self.grad_norm

    def item(self) -> float:
        """`grad_norm`."""
        return self.grad_norm


class BoundOptimizer(torch.optim.Optimizer):
    """An optimizer that may be bound to models in the pipeline, whose weights it then updates in place.

    Attributes:
        algorithm: the update rule.
        binding: the engine's optimizer of those models; None for an optimizer of plain parameters.
        disk: where the state is that host memory has no room for.
    """

    algorithm: ClassVar[_core.Algorithm]
    binding: _core.ModelOptimizer | None
    disk: _core.DiskOptions

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        """The hyperparameters that a group's options are; raises for values that no step can take."""
        raise NotImplementedError

    def core_groups(self) -> list[_core.Hyperparameters]:
        """The groups' current hyperparameters."""
        return [self.hyperparameters(group) for group in self.param_groups]

    def count_step(self) -> None:
        """Tells torch's schedulers that a step was made."""
        self._opt_called = True


def core_rule(optimizer: BoundOptimizer, formats: Formats) -> _core.FusedRule:
    """What the engine makes a fused optimizer from."""
    state = _core.StateFormat(MOMENTS[formats.moments], MASTERS[formats.masters])
    in_fp32, at_once = formats.gradients == "float32", formats.gradients == "at_once"
    return _core.FusedRule(optimizer.algorithm, optimizer.core_groups(), state, in_fp32, optimizer.disk, at_once)


def as_schedulers(schedulers: Any) -> Sequence[Any]:
    """Returns one learning-rate scheduler or several as a sequence; each has a `step` without arguments."""
    if schedulers is None:
        return []
    given = list(schedulers) if isinstance(schedulers, Iterable) else [schedulers]
    for scheduler in given:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ValueError(
                f"[step] lr_scheduler is a {type(scheduler).__name__}, expected a torch.optim.lr_scheduler or a list "
                "of them; others, call yourself after the step"
            )
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "[step] lr_scheduler is a ReduceLROnPlateau, which needs a metric; call its step(metric) yourself"
            )
    return given
