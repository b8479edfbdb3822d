"""What both ways of stepping models share: `TorchSteps` and `FusedSteps`.

Asynchronous steps: call s + 1 reads the weights of update s - 1, so update s runs while call s + 1 computes, and
staleness is exactly one. An update is published when the next step is made, never in between, so the weights that a
call reads do not depend on timing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from roundpipe import _core
from roundpipe.distributed.joint_training import JointTraining
from roundpipe.distributed.nodes import Nodes
from roundpipe.model.step.models import SteppedModels
from roundpipe.model.step.plain_steps import watch_optimizers

watch_optimizers()


class StateReader(Protocol):
    """Somebody who reads the state of a training as it is, such as a save."""

    def wait_read(self) -> None:
        """Returns when the state may change. Interruptible."""


class RunningSave(Protocol):
    """A save of the models' state that may still be under way."""

    def wait_over(self) -> None: ...


class StepGroup(ABC):
    """Models that one optimizer steps together, in one of two ways.

    `TorchSteps` is the way until a fused optimizer is made for the models, `FusedSteps` from then on. Once the
    parameters' copies are in use, the way can no longer change.

    Attributes:
        models: the models and host parameters.
        joint: their training by several nodes; None if this process trains them alone.
        steps: how many steps were made.
        save: the last save of their state.
        schedulers: torch's learning-rate schedulers that the last step moved.
    """

    def __init__(self, models: SteppedModels, joint: JointTraining | None) -> None:
        self.models = models
        self.joint = joint
        self.steps = 0  # made so far
        self.save: RunningSave | None = None  # the last one
        self.schedulers: Sequence[Any] = ()

    @property
    def nodes(self) -> Nodes | None:
        """The nodes that train the models; None if this process trains them alone."""
        return None if self.joint is None else self.joint.nodes

    @abstractmethod
    def show_weights(self) -> None:
        """Makes the models' parameters show the newest weights that a step in the pipeline has made; with an optimizer
        over copies, those that calls read."""

    @abstractmethod
    def note_reach(self) -> None:
        """Notes that the user may now hold the models' own parameters."""

    def check_trainable(self) -> None:
        """Raises ValueError if a parameter became trainable after the optimizer was made."""
        late = self._late_parameter()
        if late is not None:
            raise ValueError(
                f"[RoundPipe] parameter '{late}' was frozen when the optimizer's parameters were made and requires "
                "grad now, so no optimizer would update it; set requires_grad before optim_parameters() or the "
                "first step, and wrap the model again to change it (freezing later is fine). PEFT's set_adapter "
                "makes the adapter trainable that it names, and the end of disable_adapter() all active ones: let "
                "what is trained require grad before the optimizer is made"
            )

    @abstractmethod
    def _late_parameter(self) -> str | None:
        """The name of a parameter that became trainable after the optimizer was made."""

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
        refuse_gradient_hooks(self.models.parameters)

    @abstractmethod
    def finish_update(self) -> None:
        """Waits for the running update, and raises whatever it raised.

        Raises:
            RoundPipeError: a layer or a step function waits here; it would wait for itself.
        """

    def finish_all_updates(self) -> None:
        """Waits for the running update, as `finish_update` does, and for those of other models, whose step functions
        may step an optimizer over these models' parameters, too."""
        self.finish_update()
        _core.wait_step_functions()

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work; parameters are then up to date, and `.grad` holds gradients that no step has consumed."""

    def show_gradients(self) -> None:
        """Fills the `.grad` of the models' own parameters, if there are gradients that no step has consumed."""
        self.note_reach()
        if self.models.has_gradients():
            self.models.drain()
            self.show_weights()
            self.models.show_gradients()


def refuse_gradient_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Raises ValueError if one of the parameters has hooks on its gradient."""
    for parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"[RoundPipe] a parameter of shape {tuple(parameter.shape)} has hooks on its gradient, which "
                "nothing would call, as the engine sums gradients; expected none; change .grad after the backward "
                "instead, before the optimizer's step"
            )
