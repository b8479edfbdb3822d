"""Steps models in the pipeline, and provides the parameters for optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from roundpipe import _core
from roundpipe.following.native.report import NativeLayers
from roundpipe.model.facade import ModelFacade
from roundpipe.model.published_attributes import source_of_names
from roundpipe.model.step.optimizer_context import in_optimizer_context
from roundpipe.model.step.scaler import GradScaler

if TYPE_CHECKING:
    from roundpipe.model.step.fused_optimizer import BoundOptimizer, ClipBy, Step


_OF_AN_OPTIMIZER = ("scaler", "max_grad_norm", "lr_scheduler", "clip_by")  # the arguments of its step


class SteppedModel(ModelFacade):
    """A model whose weights are updated by its `TorchSteps` or `FusedSteps`."""

    _native = NativeLayers(None, whole="only layers of transformers models that are followed have a native form")

    @property
    def layers_are_native(self) -> NativeLayers:
        """Whether the engine runs the model's decoder layers itself, without Python: true if it does so with all of
        them. Its text says how many run so, and why the others do not; `reasons` has every reason. It describes the
        model as it is now: a call looks at the layers again."""
        self._follow_changes()
        return self._native

    @overload
    def step(
        self,
        step_fn: BoundOptimizer,
        is_async: bool = ...,
        *,
        scaler: GradScaler | None = ...,
        max_grad_norm: float | None = ...,
        clip_by: ClipBy = ...,
        lr_scheduler: Any = ...,
    ) -> Step: ...

    @overload
    def step(self, step_fn: Callable[..., Any], is_async: bool = ..., *args: Any, **kwargs: Any) -> None: ...

    def step(self, step_fn: Any, is_async: bool = True, *args: Any, **kwargs: Any) -> Step | None:
        """Updates the weights with the gradients summed since the last step, in one of two ways.

        `step(optimizer)`, with a `roundpipe.optim` optimizer made for this model, updates each layer as soon as its
        gradient has landed; an update delays only its own layer. Returns at once, in both modes, unless two
        earlier steps are still in progress: then it waits for the first of them. After it, until the next call or
        `synchronize()`, read parameters only from this model: your own references may show NaN.

        `step(step_fn, is_async, *args, **kwargs)` runs the function on the optimizer thread once all gradients have
        landed. Inside it, `model.parameters()` are the optimizer's parameters, with `.grad` filled; clear their
        gradients there, for example with `optimizer.zero_grad()`.

        Args:
            step_fn: the optimizer, or a function that updates the optimizer's parameters.
            is_async: True: the next call still reads the weights from before this step, and the call after it reads
                this step's weights (staleness exactly one). False: the next call reads the new weights; with a
                function, `step` waits for them.
            *args: for `step_fn`.
            **kwargs: for `step_fn`. An optimizer takes any of these: `scaler`, the `roundpipe.GradScaler` that scaled
                the losses: gradients are unscaled, a step with inf or NaN changes nothing, and the scale is updated.
                `max_grad_norm`: scales gradients down to this norm if their norm over the whole model is larger; every
                update then waits for all gradients. `clip_by`: what `max_grad_norm` is compared with, so that nothing
                waits, for an optimizer with `gradients="at_once"`. "last_norm": the norm of the step before; the first
                step is not clipped. "measured_norm": what `measure_gradients` has found for the same batch.
                `lr_scheduler`: a torch scheduler (or several), stepped after this step.

        Returns:
            With an optimizer, the step, with `grad_norm` and `skipped`; else None.

        Raises:
            TypeError: an optimizer's step has no such argument.
            ValueError: the optimizer was not made for this model, or an option does not fit.
            Exception: whatever the last step or work still running raised; this step is then not made. With a function
                and `is_async=False`, also whatever this step raised.
        """
        if isinstance(step_fn, torch.optim.Optimizer):
            if unknown := sorted(kwargs.keys() - _OF_AN_OPTIMIZER):
                raise TypeError(
                    f"[step] got {', '.join(unknown)}, expected, with an optimizer, no other than is_async, "
                    f"{', '.join(_OF_AN_OPTIMIZER)}"
                )
            return self._step_group.step_fused(step_fn, is_async, *args, **kwargs)
        self._claim_steps()
        self._step_group.step(step_fn, is_async, args, kwargs)
        return None

    def measure_gradients(self, optimizer: BoundOptimizer) -> float:
        """The first of two passes over a batch that clip exactly, for an optimizer with `gradients="at_once"`.

        Measures the gradients of the last `forward_backward` as they land, drops them, and leaves everything as it was
        before that call: weights, the optimizer's state, buffers, and the number of calls, so that the same batch draws
        the same random numbers again. Then call `forward_backward` with this batch a second time, and
        `step(optimizer, is_async=False, max_grad_norm=..., clip_by="measured_norm")`, which has the bits of a step
        whose gradients wait. What your loop draws itself, draw once for both calls. Waits until the last gradient has
        landed.

        Args:
            optimizer: a `roundpipe.optim` optimizer made for this model.

        Returns:
            The norm of all gradients, by which that step clips.

        Raises:
            ValueError: the optimizer was not made for this model, its gradients wait for steps, or there are none.
            Exception: whatever the last step or work still running raised.
        """
        return self._step_group.measure_gradients(optimizer)

    def synchronize(self) -> None:
        """Waits for all work. Then parameters are up to date, and `.grad` holds gradients that no step has consumed.

        Raises:
            Exception: whatever the running work raised.
        """
        _core.require_engine()
        self._step_group.synchronize()

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters in `optim_dtype`, on the host, with the model's names. Parameters that were frozen
        when the optimizer's parameters were made have none."""
        self._follow_changes()
        self._claim_steps()
        return self._step_group.optim_named_parameters(prefix, remove_duplicate)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters in `optim_dtype`, on the host."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The original model's parameters, with the last published weights; inside `step_fn`, the optimizer's.

        Waits for gradients that no step has consumed, and fills `.grad` with them.
        """
        if in_optimizer_context():
            return self.optim_named_parameters(prefix, remove_duplicate)
        self._step_group.show_weights()
        self._step_group.show_gradients()
        if self._step_group.has_copies:
            warnings.warn(
                "[RoundPipe] parameters() outside of step_fn are the model's own, and the optimizer updates copies of "
                "them; use optim_parameters() to see the copies",
                stacklevel=3,
            )
        return source_of_names(self).named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[no-any-return]

    def _all_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under every name, for code that steps the model."""
        return source_of_names(self).named_parameters(remove_duplicate=False)  # type: ignore[no-any-return]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """See `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))
