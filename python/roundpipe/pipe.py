"""A model in the pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.budget import DEVICE_VARIABLE, HOST_VARIABLE, budget_of, predict_model, refuse_host
from roundpipe.device_pool import devices
from roundpipe.emulated import EmulatedLayer, NativeEmulatedLayer
from roundpipe.execute_plan import DEFAULT_THRESHOLD, ModelExecutePlan
from roundpipe.facade import ModelFacade
from roundpipe.loss_function import NAN_LOSS, run_loss
from roundpipe.microbatch import effective_microbatches, merge_outputs, split_call, split_label
from roundpipe.optimizer_context import in_optimizer_context
from roundpipe.pending import Pending
from roundpipe.run_config import ResolvedRunConfig, RoundPipeRunConfig, resolve
from roundpipe.scaler import GradScaler, _all_live
from roundpipe.shell import PythonLayer, layers_of
from roundpipe.step_memory import MemoryPrediction, StepMemory, StepShape, step_shape
from roundpipe.stepping import StepGroup
from roundpipe.values import split, to_host

if TYPE_CHECKING:
    from roundpipe.binding import Step
    from roundpipe.following.language_model import LanguageModel
    from roundpipe.optim.for_model import ForModel

_MODES = {"infer": _core.PlanMode.INFERENCE, "train": _core.PlanMode.TRAIN, "fused": _core.PlanMode.FUSED}
_FUSED, _TRAIN, _INFERENCE = _core.PlanMode.FUSED, _core.PlanMode.TRAIN, _core.PlanMode.INFERENCE
_GRAINS = {"stage": _core.RecomputeGrain.STAGE, "layer": _core.RecomputeGrain.LAYER}


def _outputs_as_loss(outputs: Any, label: Any) -> Any:
    return outputs


def _merged(parts: list[Any], config: ResolvedRunConfig) -> Any:
    """The outputs of all microbatches as one, where they are wanted."""
    outputs = [structure.join(tensors) for tensors, structure in parts]
    if config.output_device.type != "cpu":
        outputs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(config.output_device), outputs)
    return merge_outputs(outputs, config.merge_output)


def _tell(pipeline: _core.Pipeline) -> None:
    """Warns of what the engine has noted."""
    if notice := pipeline.take_notice():
        warnings.warn(notice, RuntimeWarning, stacklevel=4)


class RoundPipe(ModelFacade):
    """Trains a model whose weights stay on the host, on devices that hold one stage of it at a time.

    An `nn.Sequential` is split into its children, each a layer; any other module is one layer. The model's parameters
    become views of flat host blocks. Attributes are read, written and deleted on the original model.

    Args:
        model: the model, on the CPU.
        optim_dtype: dtype of the optimizer's parameters; None keeps each parameter's.
        name: keys the random state, see `layer_seed`, and appears in messages; None takes the class name.
        model_run_config: defaults of this model's calls.
        pin_model: "alloc" page-locks the host's weights and gradients where accelerators read them; where the system
            forbids it, they stay pageable, with a warning. "register" does the same: parameters move into blocks
            of ours in any case, and the pages of these are registered in place where the accelerator's runtime can
            (CUDA, ROCm). "off" leaves them pageable. See `roundpipe.host_arena`.
        check_loss: raise when a loss is NaN (not while a GradScaler exists, which handles that).
        host_memory: what the model, its gradients and a fused optimizer may take on the host, such as "64GB"; the
            environment variable ROUNDPIPE_HOST_MEMORY stands in for None. Checked before anything is taken.
        device_memory: what a step may take on each device; stands in for None: ROUNDPIPE_DEVICE_MEMORY. Steps are
            planned within it, and one of a new shape is checked before it runs.

    Raises:
        ValueError: no layers, a model that does not fit its budget, a parameter that is not on the CPU, or an argument
            that is not listed above.
    """

    _OWN = ModelFacade._OWN | frozenset(
        {
            "forward",
            "forward_backward",
            "step",
            "optim_named_parameters",
            "set_original_model",
            "_set_language_model",
            "parameters",
            "named_parameters",
            "layer_seed",
            "host_bytes",
            "last_plan",
            "last_records",
            "num_layers",
            "calls",
            "random_seed",
            "_auto_plan",
            "_split_batch",
            "_route",
            "_submit",
            "_finish",
            "submit",
            "costs",
            "_options",
            "_pipeline",
            "_run_config",
            "_name",
            "_check_loss",
            "_layer_count",
            "_language_model",
            "_optim_dtype",
            "_pinned",
            "_build",
            "_host_budget",
            "_device_budget",
            "_memory",
            "_prepare_step",
            "predict_memory",
            "memory_prediction",
        }
    )

    _pipeline: _core.Pipeline
    _run_config: RoundPipeRunConfig
    _name: str
    _check_loss: bool
    _layer_count: int
    _language_model: LanguageModel | None
    _optim_dtype: torch.dtype | None
    _pinned: bool
    _host_budget: int | None
    _device_budget: int | None
    _memory: StepMemory

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
    ) -> None:
        # nn.Module.__init__ is left out on purpose: that state is the original model's.
        if not isinstance(model, nn.Module):
            raise ValueError(f"[RoundPipe] model is a {type(model).__name__}, expected an nn.Module")
        if isinstance(model, RoundPipe):
            raise ValueError("[RoundPipe] the model is wrapped already; use it as it is")
        if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
            raise ValueError(f"[RoundPipe] optim_dtype is {optim_dtype!r}, expected a floating-point dtype or None")
        if pin_model not in ("alloc", "register", "off"):
            raise ValueError(f"[RoundPipe] pin_model is {pin_model!r}, expected 'alloc', 'register' or 'off'")
        own = object.__getattribute__(self, "__dict__")
        own["_name"] = type(model).__name__ if name is None else name
        own["_run_config"] = RoundPipeRunConfig() if model_run_config is None else model_run_config
        own["_original_model"] = model
        own["_check_loss"] = check_loss
        own["_language_model"] = None
        own["_optim_dtype"] = optim_dtype
        own["_pinned"] = pin_model != "off" and any(device != "cpu" for device in devices().torch_devices)
        own["_host_budget"] = budget_of(host_memory, "host_memory", HOST_VARIABLE)
        own["_device_budget"] = budget_of(device_memory, "device_memory", DEVICE_VARIABLE)
        self._build(model)

    def _build(self, chain: nn.Module) -> None:
        """Makes the pipeline of a chain of layers."""
        if self._host_budget is not None:
            refuse_host("RoundPipe", self._name, self._host_budget, lambda moments: predict_model(chain, moments))
        modules = list(layers_of(chain))
        layers: list[PythonLayer | NativeEmulatedLayer] = [
            NativeEmulatedLayer(module, layer_name)
            if isinstance(module, EmulatedLayer)
            else PythonLayer(module, layer_name, is_last=index == len(modules) - 1)
            for index, (layer_name, module) in enumerate(modules)
        ]
        own = object.__getattribute__(self, "__dict__")
        own["_pipeline"] = _core.Pipeline(self._name, layers, self._pinned)
        own["_step_group"] = StepGroup({"": self}, {}, self._optim_dtype)
        own["_layer_count"] = len(layers)
        real = [layer for layer in layers if isinstance(layer, PythonLayer)]
        # Emulated layers take time, not memory.
        budget = self._device_budget if len(real) == len(layers) else None
        own["_memory"] = StepMemory(self._name, real, self._host_budget, budget)

    # -- the original model shows through ---------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("calls", "random_seed"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self._original_model)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        self._step_group.show_weights()
        return self._original_model[index]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        self._step_group.show_weights()
        return iter(self._original_model)  # type: ignore[call-overload, no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def _set_language_model(self, followed: LanguageModel, model: nn.Module) -> None:
        """The layers are those of `followed`, which stands for `model`."""
        self.set_original_model(model)
        object.__getattribute__(self, "__dict__")["_language_model"] = followed

    def _follow_changes(self) -> None:
        """Follows the model anew when adapters were put into it or parameters frozen, before it is stepped."""
        if self._language_model is None or not self._step_group.is_untouched:
            return
        followed = self._language_model.followed_anew()
        if followed is not None:
            self._pipeline.drain()
            object.__getattribute__(self, "__dict__")["_language_model"] = followed
            self._build(followed.chain)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """A followed model passes for its own class, too: peft looks whether it is one of transformers'."""
        own = object.__getattribute__(self, "__dict__")
        return type(self) if own.get("_language_model") is None else type(own["_original_model"])

    def set_original_model(self, model: nn.Module) -> None:
        """Makes attributes read, written and deleted here those of `model`; what the pipeline runs stays."""
        if not isinstance(model, nn.Module):
            raise ValueError(f"[set_original_model] got a {type(model).__name__}, expected an nn.Module")
        object.__getattribute__(self, "__dict__")["_original_model"] = model

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
            roundpipe_loss_only: of a language model that is given labels: the outputs hold the loss alone, for which
                the logits of all tokens need not be there at once.
            **kwargs: keyword arguments of the model.

        Returns:
            The merged outputs on `output_device`. With gradients required they carry an autograd graph whose backward
            runs through the pipeline.

        Raises:
            ValueError: a batch, option or plan that does not fit.
            Exception: whatever a layer raised, in this call or in work still running from an earlier one.
        """
        self._follow_changes()
        self._step_group.check_trainable()
        config = resolve(roundpipe_run_config, self._run_config, devices=len(devices()))
        batch = self._split_batch(args, kwargs, config, roundpipe_loss_only)
        requires_grad = config.requires_grad
        route = self._route("train" if requires_grad else "infer", config)
        with ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            modes.enter_context(torch.set_grad_enabled(requires_grad))
            mode = _TRAIN if requires_grad else _INFERENCE
            options = self._options(config, requires_grad, lambda: step_shape(batch, [], None, route, mode))
            parts = self._pipeline.forward(batch, options, route)
            _tell(self._pipeline)
            for _, structure in parts:
                structure.check_open("forward")
            return _merged(parts, config)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = _outputs_as_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Forward, loss and backward of one batch.

        Returns as soon as the losses are known; the backward may still be running. Gradients add up until `step`.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: second argument of `loss_fn`, split like the inputs, see `RoundPipeRunConfig.split_label`.
            loss_fn: `(outputs, label)` of one microbatch -> its loss, or several as a list or tuple, whose sum is
                differentiated. Runs on the device's thread.
            return_outputs: also return the merged outputs, detached.
            run_config: options of this call.

        Returns:
            The sum of the microbatches' losses, detached, on the CPU (a list if `loss_fn` returns several), or
            `(loss, outputs)`.

        Raises:
            ValueError: a batch, label, option, plan or loss that does not fit.
            RoundPipeError: the loss is NaN; the batch's gradients are dropped.
            Exception: whatever a layer or `loss_fn` raised, in this call or in work still running from an earlier one.
        """
        return self._submit(
            "forward_backward", input_args, input_kwargs, label, loss_fn, return_outputs, run_config
        ).loss()

    def submit(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = _outputs_as_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Pending:
        """Starts what `forward_backward` does and returns at once.

        With few microbatches the devices need the next batch before the last loss is read. A loop that gives it early:

            pending = None
            for batch in batches:
                following = model.submit((batch,), loss_fn=loss_fn)
                model.step(update)
                if pending is not None:
                    print(pending.loss())
                pending = following

        The arguments are those of `forward_backward`. A NaN loss is found on the device, before its gradients are used.

        Returns:
            The batch; read its loss once with `Pending.loss`.

        Raises:
            ValueError: a batch, label, option or plan that does not fit.
            Exception: whatever a layer or `loss_fn` raised in work still running from an earlier call.
        """
        return self._submit("submit", input_args, input_kwargs, label, loss_fn, return_outputs, run_config)

    def _prepare_step(
        self,
        input_args: tuple[Any, ...],
        input_kwargs: dict[str, Any] | None,
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        run_config: RoundPipeRunConfig | None,
        where: str,
        return_outputs: bool,
    ) -> tuple[ResolvedRunConfig, list[Any], list[Any], Callable[[Any, Any], Any], Any]:
        """The options, microbatches, labels, loss and route of one call of `forward_backward`."""
        if not callable(loss_fn):
            raise ValueError(f"[{where}] loss_fn is a {type(loss_fn).__name__}, expected a function")
        self._follow_changes()
        self._step_group.check_trainable()
        config = resolve(run_config, self._run_config, devices=len(devices()))
        args = tuple(input_args) if isinstance(input_args, (list, tuple)) else (input_args,)
        own_loss = self._language_model is not None and loss_fn is _outputs_as_loss
        batch = self._split_batch(args, dict(input_kwargs or {}), config, loss_only=own_loss and not return_outputs)
        if self._language_model is not None and own_loss:
            loss_fn = self._language_model.mean_loss(len(batch))
        labels = [split(to_host(part, where)) for part in split_label(label, len(batch), config.split_label)]
        route = self._route("fused", config)
        return config, batch, labels, loss_fn, route

    def _submit(
        self,
        where: str,
        input_args: tuple[Any, ...],
        input_kwargs: dict[str, Any] | None,
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        run_config: RoundPipeRunConfig | None,
    ) -> Pending:
        config, batch, labels, loss_fn, route = self._prepare_step(
            input_args, input_kwargs, label, loss_fn, run_config, where, return_outputs
        )
        single = [True]
        early_check = where == "submit" and self._check_loss and not _all_live()
        with torch.inference_mode(False), torch.enable_grad():
            options = self._options(config, True, lambda: step_shape(batch, labels, loss_fn, route, _FUSED))
            losses = run_loss(loss_fn, single, early_check)
            submitted = self._pipeline.submit(batch, labels, losses, return_outputs, options, route)
        return Pending(self, submitted, single, return_outputs, config)

    def _finish(
        self, submitted: _core.Submitted, single: list[bool], return_outputs: bool, config: ResolvedRunConfig
    ) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            losses, parts = self._pipeline.finish(submitted)
        _tell(self._pipeline)
        if self._check_loss and not _all_live():
            for index, microbatch in enumerate(losses):
                if any(bool(loss.isnan()) for loss in microbatch):
                    self._pipeline.discard_last_call(NAN_LOSS.format(f" of microbatch {index}"))
        with torch.no_grad():
            totals = [sum(values[1:], values[0]) for values in zip(*losses, strict=True)]
        value = totals[0] if single[0] else totals
        if not return_outputs:
            return value
        return value, _merged(parts, config)

    def _split_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: ResolvedRunConfig, loss_only: bool = False
    ) -> list[Any]:
        """Per microbatch: the tensors of its arguments, and their structure."""
        args, kwargs = to_host((args, kwargs), self._name)
        count = effective_microbatches(
            args, kwargs, config.num_microbatch, config.num_microbatch_is_default, config.split_input
        )
        calls = split_call(args, kwargs, count, config.split_input)
        if self._language_model is not None:
            calls = self._language_model.prepare(calls, loss_only)
        return [split(call, is_call=True) for call in calls]

    def predict_memory(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: dict[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = _outputs_as_loss,
        run_config: RoundPipeRunConfig | None = None,
    ) -> MemoryPrediction:
        """What `forward_backward` with these arguments would take, without a step being made.

        Each kind of layer runs once, on the device's thread of nobody: beside the pipeline, with one microbatch. Only
        shapes count, so the values may be anything that the model takes.

        Raises:
            ValueError: what `forward_backward` refuses.
        """
        config, batch, labels, loss_fn, route = self._prepare_step(
            input_args, input_kwargs, label, loss_fn, run_config, "predict_memory", return_outputs=False
        )
        shape = step_shape(batch, labels, loss_fn, route, _FUSED)
        with torch.inference_mode(False), torch.enable_grad():
            return self._memory.predict(self._pipeline, shape, config.recompute_grain)

    def memory_prediction(self) -> MemoryPrediction | None:
        """The prediction that the last kind of step was planned with, and the peak measured since; None before one, or
        without `device_memory`."""
        return self._memory.last()

    def _options(
        self, config: ResolvedRunConfig, requires_grad: bool, step: Callable[[], StepShape]
    ) -> _core.CallOptions:
        """How the engine runs a call; `step` is what the call is, asked for where there is a budget for it."""
        grain = config.recompute_grain
        if self._memory.device_budget is not None:
            grain = self._memory.admit(self._pipeline, step(), grain)
        options = _core.CallOptions()
        options.requires_grad = requires_grad
        options.preserve_rng_state = config.preserve_rng_state
        options.recompute_grain = _GRAINS[grain]
        return options

    def _route(
        self, run_type: Literal["infer", "train", "fused"], config: ResolvedRunConfig
    ) -> _core.Stages | _core.Plan | None:
        """How a call is to run; None leaves it to the planner."""
        plan = config.execute_plan
        if plan is None:
            return None
        if isinstance(plan, _core.Plan):
            return plan
        plan.check_valid(run_type, self._layer_count)
        stages = _core.Stages()
        stages.forward = [_core.Range(stage.start, stage.stop) for stage in plan.fwd_plan]
        if run_type != "infer":
            stages.backward = [_core.Range(stage.start, stage.stop) for stage in plan.bwd_plan]
        return stages

    def _auto_plan(
        self,
        run_type: Literal["infer", "train", "fused"],
        min_stages: int,
        upper_threshold: float,
        model_memory_limit: float | None,
    ) -> ModelExecutePlan:
        limit_bytes = 0 if model_memory_limit is None else int(model_memory_limit * 1e9)
        if min_stages == 0 and upper_threshold == DEFAULT_THRESHOLD and not limit_bytes:
            microbatches = resolve(None, self._run_config, devices=len(devices())).num_microbatch
            stages = self._pipeline.planned_stages(_MODES[run_type], microbatches)
        else:
            stages = self._pipeline.choose_stages(_MODES[run_type], min_stages, upper_threshold, limit_bytes)
        plan = ModelExecutePlan()
        plan.fwd_plan = [range(stage.first, stage.last) for stage in stages.forward]
        plan.bwd_plan = [range(stage.first, stage.last) for stage in stages.backward]
        return plan

    # -- steps and parameters ---------------------------------------------------------------------------------------

    @overload
    def step(
        self,
        step_fn: ForModel,
        is_async: bool = ...,
        *,
        scaler: GradScaler | None = ...,
        max_grad_norm: float | None = ...,
        lr_scheduler: Any = ...,
    ) -> Step: ...

    @overload
    def step(self, step_fn: Callable[..., Any], is_async: bool = ..., *args: Any, **kwargs: Any) -> None: ...

    def step(self, step_fn: Any, is_async: bool = True, *args: Any, **kwargs: Any) -> Step | None:
        """Updates the weights with the gradients summed since the last step. Two ways:

        `step(optimizer)` with a `roundpipe.optim` optimizer that was made for this model: each layer is updated as soon
        as its gradient has landed, and gates only itself. Returns at once, in both modes. Then, until the next call
        or `synchronize()`, read parameters through this model only: your own references may show NaN.

        `step(step_fn, is_async, *args, **kwargs)`: runs the function on the optimizer thread once all gradients are
        there. Inside it, `model.parameters()` are the optimizer's parameters, with `.grad` filled; clear them there,
        for example with `optimizer.zero_grad()`.

        Args:
            step_fn: the optimizer, or a function that updates the optimizer's parameters.
            is_async: the next call still reads the weights from before this step, the one after it reads this step's
                (staleness exactly one). False: the next call reads the new weights; with a function, waits for them.
            *args: for `step_fn`.
            **kwargs: for `step_fn`. With an optimizer, any of these: `scaler`, a `roundpipe.GradScaler` that scaled the
                losses: gradients are unscaled, a step with inf or NaN changes nothing, and the scale is updated.
                `max_grad_norm`: gradients whose norm over the whole model is larger are scaled down to it; every update
                then waits for all gradients. `lr_scheduler`: a torch scheduler (or several), stepped after this step.

        Returns:
            With an optimizer the step, whose `grad_norm` and `skipped` can be read; else None.

        Raises:
            ValueError: the optimizer was not made for this model, or an option that does not fit.
            Exception: what the last step or work still running raised; this step is then not made. With a function and
                `is_async=False` also what this one raised.
        """
        if isinstance(step_fn, torch.optim.Optimizer):
            return self._step_group.step_fused(step_fn, is_async, *args, **kwargs)
        self._step_group.step(step_fn, is_async, args, kwargs)
        return None

    def synchronize(self) -> None:
        """Waits for everything: parameters up to date, `.grad` filled with what no step has consumed.

        Raises:
            Exception: what work still running raised.
        """
        self._step_group.synchronize()

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters in `optim_dtype`, on the host, with the model's names. Frozen ones are the
        model's own."""
        self._follow_changes()
        return self._step_group.optim_named_parameters(prefix, remove_duplicate)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's parameters in `optim_dtype`, on the host."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The original model's parameters, which hold the last published weights; in `step_fn` the optimizer's."""
        if in_optimizer_context():
            return self.optim_named_parameters(prefix, remove_duplicate)
        if self._step_group.is_fused:
            self._step_group.show_weights()
            return self._original_model.named_parameters(prefix, recurse, remove_duplicate)
        warnings.warn(
            "[RoundPipe] parameters() outside of step_fn are the model's own, which an optimizer must not update; "
            "give optim_parameters() to the optimizer",
            stacklevel=3,
        )
        return self._original_model.named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """See `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    # -- what it did ------------------------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """How many layers the pipeline sees."""
        return self._layer_count

    @property
    def calls(self) -> int:
        """Pipelined calls so far; keys the random state of the next one. Set it when resuming a run."""
        return self._pipeline.calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self._pipeline.calls = calls

    @property
    def random_seed(self) -> int:
        """`torch.initial_seed()` when the model was wrapped; the base of `layer_seed`. Set it when resuming a run."""
        return self._pipeline.random_seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        self._pipeline.random_seed = seed

    def layer_seed(self, call: int, microbatch: int, layer: int) -> int:
        """The seed with which `layer` runs `microbatch` of pipelined call number `call` (0, 1, ...).

        A loop that calls `torch.manual_seed(model.layer_seed(call, microbatch, layer))` before each layer draws the
        numbers that the pipeline draws. The loss function counts as layer `num_layers`.
        """
        return _core.layer_seed(self.random_seed, self._name, call, microbatch, layer)

    def costs(self) -> list[_core.LayerCost]:
        """What each layer is thought to take, for one microbatch; measured once calls have run."""
        return self._pipeline.costs()

    def host_bytes(self) -> int:
        """Host memory of weights and gradients, in bytes."""
        return self._pipeline.host_bytes()

    def last_plan(self) -> _core.Plan | None:
        """The jobs of the last call."""
        return self._pipeline.last_plan()

    def last_records(self) -> list[tuple[str, int, int, int, int, float, float]]:
        """What the last call executed: (phase, first layer, last layer, microbatch, device, start ms, end ms)."""
        return [record[:7] for record in self._pipeline.last_records()]
