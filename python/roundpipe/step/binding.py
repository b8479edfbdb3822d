"""A fused optimizer and the models whose blocks it updates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

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
        optimizer: has trained parameters in its groups.
        moments: the format of the moments, see `roundpipe.optim.AdamW`.
        gradients: "float32" keeps the gradients of 16-bit weights in fp32 on the host.
        nodes: those that share the state; None if this process has all of it.

    Attributes:
        core: the engine's optimizer.
        trained: ids of the trained parameters.
    """

    def __init__(
        self,
        pipelines: list[_core.Pipeline],
        optimizer: BoundOptimizer,
        moments: Moments,
        gradients: Gradients,
        nodes: _core.Nodes | None = None,
    ) -> None:
        group_of = {id(p): index for index, options in enumerate(optimizer.param_groups) for p in options["params"]}
        self.trained = frozenset(group_of)
        blocks = [pipeline.block_parameters() for pipeline in pipelines]
        groups = [[[group_of.get(id(parameter), -1) for parameter in block] for block in of] for of in blocks]
        self._places = {
            id(parameter): (b, i)
            for b, block in enumerate(itertools.chain.from_iterable(blocks))
            for i, parameter in enumerate(block)
        }
        if gradients == "float32":
            for pipeline in pipelines:
                pipeline.keep_gradients_in_fp32()
        self.core = _core.ModelOptimizer(pipelines, groups, optimizer.algorithm, MOMENTS[moments], nodes=nodes)

    def place(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The number of the parameter's block, counted over all pipelines, and its index there."""
        return self._places[id(parameter)]

    def blocks_with_trained(self) -> set[int]:
        """The numbers of the blocks in which a parameter is trained."""
        return {place[0] for key, place in self._places.items() if key in self.trained}

    def state(self, parameter: nn.Parameter) -> tuple[_core.ParameterState, torch.Tensor | None]:
        """The state of a trained parameter, and its remainder (for fp16, the master). No step may be running."""
        place = self._places[id(parameter)]
        return self.core.state(*place), self.core.remainder(*place)

    def shard(self, parameter: nn.Parameter) -> tuple[int, int]:
        """The first of the elements of a trained parameter that this process updates, counted in the order of memory,
        and the one after the last."""
        block, index = self._places[id(parameter)]
        return self.core.shard(block)[index]

    def restart_master(self, parameter: nn.Parameter) -> None:
        """Restarts the fp32 master from the parameter's value. No step may be running."""
        self.core.restart_master(*self._places[id(parameter)], parameter)


class BoundOptimizer(torch.optim.Optimizer):
    """An optimizer that may be bound to models in the pipeline, whose weights it then updates in place.

    Attributes:
        algorithm: the update rule.
        binding: the binding to those models; None for an optimizer of plain parameters.
    """

    algorithm: ClassVar[_core.Algorithm]
    binding: Binding | None

    def hyperparameters(self, group: dict[str, Any]) -> _core.Hyperparameters:
        """The hyperparameters that a group's options are; raises for values that no step can take."""
        raise NotImplementedError

    def core_groups(self) -> list[_core.Hyperparameters]:
        """The groups' current hyperparameters."""
        return [self.hyperparameters(group) for group in self.param_groups]

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
