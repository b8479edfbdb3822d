"""A model in the pipeline."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from roundpipe import _core
from roundpipe.device.pool import devices
from roundpipe.distributed.loss_counts import note_backward_of, noting_failure
from roundpipe.following.layers.emulated import EmulatedLayer, NativeEmulatedLayer
from roundpipe.following.layers.shell import PythonLayer, layers_of
from roundpipe.following.refusals import refuse_weights, warn_batch_norm, warn_single_layer
from roundpipe.model.call.execute_plan import ModelExecutePlan, plan_of
from roundpipe.model.call.joint_plan import RunType
from roundpipe.model.call.loss_function import MicrobatchLoss, outputs_as_loss
from roundpipe.model.call.request import CallRequest
from roundpipe.model.call.run_config import RoundPipeRunConfig, copied, resolve
from roundpipe.model.call_hooks import HasCallHooks, refuse_hooks_of
from roundpipe.model.memory.budget import (
    DEVICE_VARIABLE,
    HOST_VARIABLE,
    budget_of,
    is_unmeasured,
    predict_model,
    refuse_host,
)
from roundpipe.model.memory.prediction import MemoryPrediction, memory_prediction
from roundpipe.model.pending import Pending, merged
from roundpipe.model.preparation import Preparation, StepArguments
from roundpipe.model.published_attributes import OF_A_PIPE
from roundpipe.model.run_records import RunRecords
from roundpipe.model.step.torch_steps import TorchSteps
from roundpipe.model.step_call import check_gradients, check_step_call
from roundpipe.model.stepped import SteppedModel
from roundpipe.model.timer import print_times

if TYPE_CHECKING:
    from roundpipe.following.language_model import LanguageModel


_MODES = {"infer": _core.PlanMode.INFERENCE, "train": _core.PlanMode.TRAIN, "fused": _core.PlanMode.FUSED}


class RoundPipe(HasCallHooks, RunRecords, SteppedModel):
    """Trains a model whose weights stay on the host, on devices that hold one stage of it at a time.

    An `nn.Sequential` is split into its children, one layer each; any other module is one layer. The model's parameters
    become views of flat host blocks. Attributes are read, written and deleted on the original model.

    Args:
        model: the model, on the CPU.
        optim_dtype: dtype of the optimizer's parameters; None keeps each parameter's dtype.
        name: keys the random state (see `layer_seed`) and appears in messages; None takes the class name.
        model_run_config: defaults of this model's calls.
        pin_model: "alloc" page-locks the host's weights and gradients if accelerators read them; where the system
            forbids it, they stay pageable, with a warning. "register" does the same: parameters always move into
            blocks that RoundPipe allocates, and the pages of these blocks are registered in place if the accelerator's
            runtime can (CUDA, ROCm). "off" leaves them pageable. See `roundpipe.host_arena`.
        check_loss: raise an error when a loss is NaN (not with ROUNDPIPE_CHECK_LOSS=0 in the environment). A GradScaler
            that belongs to the model handles NaN itself.
        host_memory: limit for the model, its gradients and a fused optimizer on the host, such as "64GB"; None reads
            the environment variable ROUNDPIPE_HOST_MEMORY. Checked before anything is allocated, and with the state of
            the optimizer when that is made.
        device_memory: limit for a step on each device; None reads ROUNDPIPE_DEVICE_MEMORY. Steps are planned within
            it, and a step of a new shape is checked before it runs. Without it, steps are planned within what each
            device has, where that is known; "unmeasured" leaves that out, with the run of each kind of layer that it
            takes.
        process_group: the ranks of torch.distributed that train the model together, see `roundpipe.distributed`; None
            takes the default group, if there is one with several ranks, and False trains the model alone. Collective:
            every rank wraps the same models in the same order.

    Raises:
        ValueError: the model has no layers, does not fit its budget, or has a parameter that is not on the CPU or is
            in another RoundPipe that still lives; an argument is not one of those listed above; or another rank has
            another model.
    """

    _FALLBACK = OF_A_PIPE

    _is_part = False  # part of a larger model, whose wrapper issues the warnings for the whole
    _pipeline: _core.Pipeline
    _front: _core.Front  # holds the claim to the parameters
    _modules_in_order: list[tuple[str, nn.Module]]
    _run_config: RoundPipeRunConfig
    _check_loss: bool
    _layer_count: int
    _language_model: LanguageModel | None
    _pinned: bool
    _host_budget: int | None
    _device_budget: int | None
    _measures: bool
    _model_core: _core.ModelCore

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: Literal["alloc", "register", "off"] = "alloc",
        check_loss: bool = True,
        host_memory: str | int | None = None,
        device_memory: str | int | None = None,
        process_group: torch.distributed.ProcessGroup | Literal[False] | None = None,
    ) -> None:
        # nn.Module.__init__ is left out on purpose: its state is the original model's.
        if not isinstance(model, nn.Module):
            raise ValueError(f"[RoundPipe] model is a {type(model).__name__}, expected an nn.Module")
        if isinstance(model, RoundPipe):
            raise ValueError("[RoundPipe] the model is wrapped already; use it as it is")
        refuse_weights(model)
        if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
            raise ValueError(f"[RoundPipe] optim_dtype is {optim_dtype!r}, expected a floating-point dtype or None")
        if pin_model not in ("alloc", "register", "off"):
            raise ValueError(f"[RoundPipe] pin_model is {pin_model!r}, expected 'alloc', 'register' or 'off'")
        own = object.__getattribute__(self, "__dict__")
        own["_name"] = type(model).__name__ if name is None else name
        own["_run_config"] = copied(model_run_config)
        own["_original_model"] = own["_wrapped"] = model
        own["_check_loss"] = check_loss and _core.checks_losses()
        own["_pre_hooks"], own["_after_hooks"] = OrderedDict(), OrderedDict()
        own["_language_model"] = None
        own["_auto_microbatches"] = None
        own["_optim_dtype"] = optim_dtype
        own["_pinned"] = pin_model != "off" and any(device != "cpu" for device in devices().torch_devices)
        own["_host_budget"] = budget_of(host_memory, "host_memory", HOST_VARIABLE)
        own["_measures"] = not is_unmeasured(device_memory)
        own["_device_budget"] = budget_of(device_memory, "device_memory", DEVICE_VARIABLE) if self._measures else None
        self._build(model)
        if own["_run_config"].num_microbatch != 1 and not self._is_part:
            warn_batch_norm(self._name, [model])
        if not self._is_part:
            self._join_nodes(process_group, self._layer_count)

    def _build(self, chain: nn.Module) -> None:
        """Builds the pipeline for a chain of layers."""
        if self._host_budget is not None:
            refuse_host("RoundPipe", self._name, self._host_budget, lambda rule: predict_model(chain, rule))
        modules = list(layers_of(chain))
        if all(module is not chain for _, module in modules):
            refuse_hooks_of(chain, f"the {type(chain).__name__}")
        if len(modules) == 1 and not self._is_part:
            warn_single_layer(modules[0][1])
        layers: list[PythonLayer | NativeEmulatedLayer] = [
            NativeEmulatedLayer(module, layer_name)
            if isinstance(module, EmulatedLayer)
            else PythonLayer(
                module,
                layer_name,
                is_last=index == len(modules) - 1,
                native=self._native.of(module),
                passages=self._native.passages(module),
            )
            for index, (layer_name, module) in enumerate(modules)
        ]
        own = object.__getattribute__(self, "__dict__")
        before = own.get("_pipeline")
        if before is None and _core.any_claimed(list(chain.parameters())):
            gc.collect()  # models that are garbage, and only not collected yet
        own["_pipeline"] = _core.Pipeline(self._name, layers, self._pinned, before)
        own["_front"] = _core.Front(own["_pipeline"])
        own.pop("_step_claim", None)
        own["_layer_count"] = len(layers)
        own["_modules_in_order"] = modules
        own["_model_core"] = _core.ModelCore(
            own["_pipeline"], self._host_budget, self._device_budget, self._measures, self._check_loss
        )
        own["_step_group"] = TorchSteps({"": self}, {}, self._optim_dtype, self._joint)

    # -- the original model shows through ---------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("calls", "random_seed", "auto_microbatches"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __bool__(self) -> bool:
        return bool(self._original_model)

    def __len__(self) -> int:
        return len(self._original_model)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        self._step_group.show_weights()
        return self._original_model[index]  # type: ignore[index]

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        layers: Any = self._original_model
        layers[index] = module

    def __delitem__(self, index: Any) -> None:
        layers: Any = self._original_model
        del layers[index]

    def __iter__(self) -> Iterator[Any]:
        self._step_group.show_weights()
        return iter(self._original_model)  # type: ignore[call-overload, no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_with_hooks(args, kwargs)

    def _set_language_model(self, followed: LanguageModel, model: nn.Module) -> None:
        """Registers that the pipeline's layers come from `followed`, which stands for `model`."""
        self.set_original_model(model)
        object.__getattribute__(self, "__dict__")["_language_model"] = followed

    def _follow_changes(self) -> None:
        """Follows the model again, before an optimizer has been made for it, if adapters were added to it or parameters
        became trainable or, before the first step, frozen. Gradients that no step has consumed stay in `.grad`."""
        if self._language_model is None:
            self._take_over_layers()
            return
        group = self._step_group
        if not group.is_untouched:
            return
        if not self._language_model.is_outdated(frees=not group.steps and not self._pipeline.has_gradients):
            return
        if group.steps or self._pipeline.has_gradients:
            if self._language_model.is_resized:
                raise ValueError(
                    f"[RoundPipe] parameters of {self._name} were resized after batches were trained with it, expected "
                    "a change before the first batch; wrap the model again"
                )
            group.synchronize()
        else:
            self._pipeline.drain()  # and no more: parameters that were resized keep their new values
        own = object.__getattribute__(self, "__dict__")
        own["_language_model"] = followed = self._language_model.followed_anew()
        from roundpipe.following.native.layers import make_native  # imports transformers, which takes seconds

        own["_native"] = make_native(followed, self._native.option)
        self._rebuild(followed.chain)

    def _rebuild(self, chain: nn.Module) -> None:
        """Builds the pipeline anew. REQUIRES: nothing runs, and `.grad` holds all gradients."""
        before, steps = self._pipeline, self._step_group.steps
        self._build(chain)
        self._step_group.steps = steps
        for name in ("calls", "random_seed", "exposes_gradients"):
            setattr(self._pipeline, name, getattr(before, name))

    def _take_over_layers(self) -> None:
        """Rebuilds the pipeline if layers of an `nn.Sequential` were added, removed or replaced.

        Raises:
            ValueError: an optimizer has already been made for the previous layers.
        """
        chain = object.__getattribute__(self, "__dict__")["_wrapped"]
        before, now = self._modules_in_order, list(layers_of(chain))
        if len(now) == len(before) and all(a[1] is b[1] for a, b in zip(now, before, strict=True)):
            return
        if not self._step_group.is_untouched:
            raise ValueError(
                f"[RoundPipe] layers of {self._name} were added, removed or replaced after an optimizer was made for "
                "it; change the model first, then make the optimizer, or wrap the model again"
            )
        self._step_group.synchronize()
        self._rebuild(chain)

    def _may_replace(self) -> bool:
        return self._language_model is not None and self._step_group.is_untouched

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The original model's class for a followed model, because peft checks whether the class is transformers'."""
        own = object.__getattribute__(self, "__dict__")
        return type(self) if own.get("_language_model") is None else type(own["_original_model"])

    # -- calls ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig | None = None,
        roundpipe_loss_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs the model over the devices, microbatch by microbatch.

        Args:
            *args: arguments of the model; tensors are split along dim 0, see `RoundPipeRunConfig.split_input`.
            roundpipe_run_config: options of this call.
            roundpipe_loss_only: for a language model that is given labels: the outputs hold only the loss, so the
                logits of all tokens need not exist at once.
            **kwargs: keyword arguments of the model.

        Returns:
            The merged outputs on `output_device`. If gradients are required, the outputs carry an autograd graph whose
            backward runs in the pipeline.

        Raises:
            ValueError: a batch, option or plan does not fit.
            torch.OutOfMemoryError: the model does not fit a device even layer by layer; the message gives the numbers
                and says what would fit.
            Exception: whatever a layer raised, in this call or in work still running from an earlier one.
        """
        preparation = self._prepare(roundpipe_run_config)
        if preparation.config.requires_grad:
            request = self._request(preparation, lambda ready: ready.call(args, kwargs, roundpipe_loss_only))
        else:
            request = preparation.call(args, kwargs, roundpipe_loss_only)
        requires_grad = request.config.requires_grad
        with ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            modes.enter_context(torch.set_grad_enabled(requires_grad))
            arguments = request.arguments(passages=self._native.enter(request.batch))
            parts = self._model_core.forward(arguments, request.options())
            for _, structure in parts:
                structure.check_open("forward")
            print_times(self._pipeline)
            if self._joint is not None:
                note_backward_of(self._joint.counts, (tensor for tensors, _ in parts for tensor in tensors))
            return merged(parts, request.config)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = outputs_as_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
        **unknown: Any,
    ) -> Any:
        """Runs forward, loss and backward of one batch.

        Returns as soon as the losses are known; the backward may still be running. Gradients add up until `step`.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: second argument of `loss_fn`, split like the inputs, see `RoundPipeRunConfig.split_label`.
            loss_fn: takes `(outputs, label)` of one microbatch and returns its loss, or several as a list or tuple,
                whose sum is differentiated. Runs on the device's thread.
            return_outputs: also return the merged outputs, detached.
            run_config: options of this call.

        Returns:
            The sum of the microbatches' losses, detached, on the CPU (a list if `loss_fn` returns several), or
            `(loss, outputs)`.

        Raises:
            ValueError: a batch, label, option, plan or loss does not fit, or gradients are off.
            RoundPipeError: the loss is NaN; the batch's gradients are dropped.
            torch.OutOfMemoryError: see `forward`.
            Exception: whatever a layer or `loss_fn` raised, in this call or in work still running from an earlier one.
        """
        check_step_call(self, "forward_backward", input_args, unknown)
        given = StepArguments("forward_backward", input_args, input_kwargs, label, loss_fn, return_outputs, run_config)
        return self._submit(given, refuses_nan_early=False).loss()

    def submit(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = outputs_as_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
        **unknown: Any,
    ) -> Pending:
        """Starts the work of `forward_backward` and returns at once.

        With few microbatches, the devices need the next batch before the last loss is read. This loop submits it early:

            pending = None
            for batch in batches:
                following = model.submit((batch,), loss_fn=loss_fn)
                model.step(update)
                if pending is not None:
                    print(pending.loss())
                pending = following

        The arguments are those of `forward_backward`. A NaN loss is found on the device, before its gradients are used.

        Returns:
            The submitted batch; read its loss once with `Pending.loss`.

        Raises:
            ValueError: a batch, label, option or plan does not fit.
            Exception: whatever a layer or `loss_fn` raised in work still running from an earlier call.
        """
        check_step_call(self, "submit", input_args, unknown)
        given = StepArguments("submit", input_args, input_kwargs, label, loss_fn, return_outputs, run_config)
        return self._submit(given, refuses_nan_early=True)

    def _prepare(self, run_config: RoundPipeRunConfig | None) -> Preparation:
        """Prepares the model for a call with these options."""
        self._follow_changes()
        self._step_group.before_call()
        config = resolve(run_config, self._run_config, devices=len(devices()), chosen=self._auto_microbatches)
        return Preparation(self._name, self._layer_count, self._original_model, self._language_model, config)

    def _request(self, preparation: Preparation, made: Callable[[Preparation], CallRequest]) -> CallRequest:
        """The request that `made` makes of the preparation; the first that trains with `num_microbatch="auto"` decides
        the number."""
        if not preparation.config.num_microbatch_is_open:
            return made(preparation)

        if callable(preparation.config.split_input):
            raise ValueError(
                f"[{self._name}] num_microbatch is 'auto' and split_input is a function, expected a number beside a "
                "function, since only the function knows how far a batch can be cut"
            )

        def with_number(count: int) -> CallRequest:
            return made(preparation.with_microbatches(count))

        def fits(count: int) -> bool:
            request = with_number(count)
            return self._model_core.fits(request.arguments(), request.options())

        most = len(with_number(_core.MOST_MICROBATCHES).batch)
        with torch.inference_mode(False), torch.enable_grad():
            groups = preparation.config.gradient_groups
            chosen = _core.choose_microbatches(self._pipeline, most, groups, fits)
        print(f'[RoundPipe] num_microbatch="auto" of {self._name} is {chosen.count} ({chosen.reason})', file=sys.stderr)
        self.auto_microbatches = chosen.count
        return with_number(chosen.count)

    def _prepare_step(self, given: StepArguments) -> CallRequest:
        if not callable(given.loss_fn):
            raise ValueError(f"[{given.where}] loss_fn is a {type(given.loss_fn).__name__}, expected a function")
        preparation = self._prepare(given.run_config)
        check_gradients(preparation.config, given.where)
        return self._request(preparation, lambda ready: ready.step(given))

    def _submit(self, given: StepArguments, refuses_nan_early: bool) -> Pending:
        count = None if self._joint is None else _core.CallCount(self._joint.counts)
        with noting_failure(count):
            request = self._prepare_step(dataclasses.replace(given, count=count))
            assert request.loss_fn is not None
            loss = MicrobatchLoss(request.loss_fn)
            arguments = request.arguments(loss, self._native.enter(request.batch))
            submitted = self._model_core.submit(arguments, request.options(), request.return_outputs, refuses_nan_early)
        return Pending(self._pipeline, submitted, request, loss, count)

    def predict_memory(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = outputs_as_loss,
        run_config: RoundPipeRunConfig | None = None,
    ) -> MemoryPrediction:
        """Predicts the memory that `forward_backward` with these arguments would take, without making a step.

        Each kind of layer runs once with one microbatch, outside the pipeline. Only shapes count, so the values may be
        anything that the model accepts. Settles no asynchronous step: later calls have the bits that they would have
        had.

        Raises:
            ValueError: `forward_backward` would refuse these arguments.
        """
        given = StepArguments("predict_memory", input_args, input_kwargs, label, loss_fn, False, run_config)
        request = self._prepare_step(given)
        self._step_group.show_weights()  # layers may look at values; this settles no step
        predicted = self._model_core.predict_memory(request.arguments(), request.options())
        return memory_prediction(predicted, () if self._language_model is None else (f"layers: {self._native}",))

    def memory_prediction(self) -> MemoryPrediction | None:
        """Returns the prediction that planned the last kind of step, with the peak measured since; None before the
        first step, or without `device_memory`."""
        last = self._model_core.last_prediction()
        return None if last is None else memory_prediction(last)

    def _searched_plan(self, run_type: RunType) -> ModelExecutePlan:
        """The planner's plan for a call with the model's own number of microbatches."""
        chosen = self._auto_microbatches
        microbatches = resolve(None, self._run_config, devices=len(devices()), chosen=chosen).num_microbatch
        stages = self._pipeline.planned_stages(_MODES[run_type], microbatches)
        return plan_of(*([range(s.first, s.last) for s in cut] for cut in (stages.forward, stages.backward)))
