"""A fused optimizer and the models whose blocks it updates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from roundpipe import _core

MOMENTS = {"float32": _core.MomentFormat.FLOAT32, "8bit": _core.MomentFormat.BLOCKWISE_8BIT}
Moments = Literal["float32", "8bit"]
Gradients = Literal["weights", "float32"]


class Step:
    """One step of a fused optimizer, returned by `model.step(optimizer)`. `float(step)` is `step.grad_norm`."""

    def __init__(self, run: _core.StepRun) -> None:
        self._run = run

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, unscaled, before clipping. Waits until the last gradient has landed.

        NaN unless the step was given `max_grad_norm` or a `scaler` (`max_grad_norm=math.inf` only measures). Also NaN
        if the backward failed.
        """
        self._run.wait_decided()
        return self._run.norm

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing because a gradient under a scaler was inf or NaN. Waits like `grad_norm`."""
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


class Binding:
    """The state of a fused optimizer for a group of models, block by block.

    Args:
        pipelines: all pipelines that hold parameters.
        host: the pipeline among them that holds the host's parameters, if there are any.
        group_of: maps the id of a trained parameter to the index of its hyperparameters.
        algorithm: the update rule.
        moments: the format of the moments, see `roundpipe.optim.AdamW`.
        gradients: "float32" keeps the gradients of 16-bit weights in fp32 on the host.
    """

    def __init__(
        self,
        pipelines: list[_core.Pipeline],
        host: _core.Pipeline | None,
        group_of: Mapping[int, int],
        algorithm: _core.Algorithm,
        moments: Moments,
        gradients: Gradients,
    ) -> None:
        self._pipelines = pipelines
        self._host = host
        blocks = [pipeline.block_parameters() for pipeline in self._pipelines]
        groups = [[[group_of.get(id(parameter), -1) for parameter in block] for block in of] for of in blocks]
        self._places = {
            id(parameter): (b, i)
            for b, block in enumerate(itertools.chain.from_iterable(blocks))
            for i, parameter in enumerate(block)
        }
        if gradients == "float32":
            for pipeline in self._pipelines:
                pipeline.keep_gradients_in_fp32()
        self._core = _core.ModelOptimizer(self._pipelines, groups, algorithm, MOMENTS[moments])
        self.hides_weights = False

    def make_room(self) -> None:
        """Waits until a step can start without waiting for another one; raises whatever an earlier step raised."""
        self._core.make_room()

    def step(
        self, groups: list[_core.Hyperparameters], is_async: bool, max_grad_norm: float, loss_scale: float
    ) -> _core.StepRun:
        """Starts a step. A `max_grad_norm` of 0 does not clip; a `loss_scale` of 0 means that losses are not scaled."""
        run = self._core.step(groups, is_async, max_grad_norm, loss_scale)
        self.hides_weights = True
        if self._host is not None:
            self._host.show_weights()
        return run

    def show_weights(self) -> None:
        """Waits for the weights that calls read, and lets the user's parameters show them."""
        for pipeline in self._pipelines:
            pipeline.show_weights()
        self.hides_weights = False

    def finish(self) -> None:
        """Waits for all steps; calls then read the newest weights."""
        self._core.finish()
        self.hides_weights = False

    def state(self, parameter: nn.Parameter) -> tuple[_core.ParameterState, torch.Tensor | None]:
        """The state of a trained parameter and the remainder or master of its fp32 value. No step may be running."""
        place = self._places[id(parameter)]
        return self._core.state(*place), self._core.rest(*place)

    def restart_master(self, parameter: nn.Parameter) -> None:
        """Restarts the fp32 master from the parameter's value. No step may be running."""
        self._core.restart_master(*self._places[id(parameter)], parameter)

    def accept_weights(self) -> None:
        """Declares that the parameters' current values and masters belong together."""
        self._core.accept_weights()

    def host_bytes(self, groups: list[_core.Hyperparameters]) -> _core.HostBytes:
        """The number of trained parameters, and the bytes of weights with gradients, of masters, and of moments."""
        return self._core.host_bytes(groups)


class BoundOptimizer(torch.optim.Optimizer):
    """An optimizer that may be bound to models in the pipeline, whose weights it then updates in place.

    Attributes:
        binding: the binding to those models; None for an optimizer of plain parameters.
    """

    binding: Binding | None

    def core_groups(self) -> list[_core.Hyperparameters]:
        """The groups' current hyperparameters."""
        raise NotImplementedError

    def count_step(self) -> None:
        """Tells torch's schedulers that a step was made."""
        self._opt_called = True


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
