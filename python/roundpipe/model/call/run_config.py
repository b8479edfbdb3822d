"""Options of one call of a model, and their inheritance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.model.call.execute_plan import ModelExecutePlan

RecomputeGrain = Literal["stage", "layer"]
GRAINS = {"stage": _core.RecomputeGrain.STAGE, "layer": _core.RecomputeGrain.LAYER}


def grain_name(grain: _core.RecomputeGrain) -> RecomputeGrain:
    """The option's value that stands for the engine's."""
    return "layer" if grain == _core.RecomputeGrain.LAYER else "stage"


TiedGradAccumulation = Literal["layer", "microbatch"]
SplitInputFn = Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[tuple[Any, ...]], list[dict[str, Any]]]]
SplitInput = tuple[Any, Any] | SplitInputFn


@dataclass
class RoundPipeRunConfig:
    """Options of one call. A field left `None` is inherited from the model's config, then from the default.

    Given stages are copied, and a model copies the whole configuration that it is given: later changes have no effect.

    Attributes:
        requires_grad: whether the outputs carry gradients. Default: the grad mode at the call.
        output_device: device of the merged outputs. Default: cpu.
        preserve_rng_state: whether recompute draws the same random numbers as the forward. Default: True.
        recompute_grain: "stage" keeps only a stage's inputs until its backward, "layer" keeps those of every layer and
            runs the backward layer by layer, in less memory: its stages have one layer each, also where longer ones are
            given. Default: "stage".
        tied_grad_accumulation: the order in which the gradients of a tied parameter are added. "layer" sums each
            layer's gradients over the microbatches on the device, then adds the layers' sums. "microbatch" adds the
            gradients of all layers for every microbatch, as a loop of backward passes does, and moves them to the host
            each time. Default: "layer".
        gradient_groups: microbatches are cut into so many consecutive groups (as `torch.tensor_split` cuts rows), and
            gradients are summed within each group, then over the groups. Devices may share a trainable layer by whole
            groups, which shortens a step; sums differ in their last bits from those of one loop. At most one group a
            microbatch. Default: 1.
        num_microbatch: number of microbatches of a batch. Default: devices + 1, or fewer for a smaller batch. "auto"
            lets the planner choose once, for the first training call; see `RoundPipe.auto_microbatches`.
        split_input: `(args_spec | None, kwargs_spec | None)` of torch pipelining chunk specs, or a function
            `(args, kwargs, n) -> (list of args, list of kwargs)`. Default: tensors along dim 0.
        split_label: a chunk spec tree, or a function `(label, n) -> list`. Default: tensors along dim 0.
        merge_output: True merges automatically, False returns the unmerged microbatches; or a chunk spec
            tree, or a function of the list of outputs. Default: True.
        execute_plan: the stages, or a whole plan with devices, of one step (from `RoundPipe.last_plan()`, the planner
            or the simulator). Default: the planner chooses.
        fault_tolerant: whether training goes on when a device fails: the jobs that it had run again on the devices that
            are left, with the same bits. What they need for that stays on the host until their results are there. See
            docs/reliability.md. Default: False.
        verify_every: one job of every so many training calls runs on a second device as well, and must have the same
            bits there. If it has not, both devices and a third one run it again, and the call ends with a
            `RoundPipeError`: it names the device that is wrong, which is taken out, if the runs tell. With one device,
            the job runs there twice, which finds less. For cards that corrupt silently; see docs/reliability.md. 0
            turns it off. Default: 0.

    Raises:
        ValueError: a field has a value that is not listed above.
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | int | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: RecomputeGrain | None = None
    num_microbatch: int | Literal["auto"] | None = None
    split_input: SplitInput | None = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | _core.Plan | None = None
    # Last, because the published package's fields keep their order.
    tied_grad_accumulation: TiedGradAccumulation | None = None
    gradient_groups: int | None = None
    fault_tolerant: bool | None = None
    verify_every: int | None = None

    def __post_init__(self) -> None:
        check(self, "RoundPipeRunConfig")
        if isinstance(self.execute_plan, ModelExecutePlan):
            self.execute_plan = self.execute_plan.copied()


@dataclass(frozen=True)
class ResolvedRunConfig:
    """The options of one call, with nothing left to inherit. See `RoundPipeRunConfig` for the fields.

    Attributes:
        num_microbatch_is_default: the user did not ask for this number, so a small batch may lower it.
        num_microbatch_is_open: the planner is to choose the number, and has not done so; until then it is the default.
        split_input: `None` is automatic; the same holds for `split_label`.
        merge_output: `True` is automatic.
        execute_plan: `None` asks the planner.
    """

    requires_grad: bool
    output_device: torch.device
    preserve_rng_state: bool
    recompute_grain: RecomputeGrain
    tied_grad_accumulation: TiedGradAccumulation
    gradient_groups: int
    fault_tolerant: bool
    verify_every: int
    num_microbatch: int
    num_microbatch_is_default: bool
    num_microbatch_is_open: bool
    split_input: SplitInput | None
    split_label: Any
    merge_output: Any
    execute_plan: ModelExecutePlan | _core.Plan | None


def copied(config: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
    """Returns a copy with its own stages and chunk specs; for None, a config that inherits everything."""
    if not isinstance(config, RoundPipeRunConfig):
        check(config or RoundPipeRunConfig(), "RoundPipe")
        return RoundPipeRunConfig()
    specs = {
        name: pytree.tree_map(lambda leaf: leaf, getattr(config, name))
        for name in ("split_input", "split_label", "merge_output")
    }
    return replace(config, **specs)


def layered(*configs: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
    """Returns one config that takes each field from the first of `configs` that sets it."""
    present = [config for config in configs if config is not None]
    return RoundPipeRunConfig(
        **{
            field.name: next((v for c in present if (v := getattr(c, field.name)) is not None), None)
            for field in fields(RoundPipeRunConfig)
        }
    )


def resolve(
    call_config: RoundPipeRunConfig | None,
    model_config: RoundPipeRunConfig | None,
    *,
    devices: int,
    chosen: int | None = None,
) -> ResolvedRunConfig:
    """Resolves the options of one call: the call's own, then the model's, then the defaults.

    Call it in the caller's thread, because it reads the current grad mode.

    Args:
        call_config: the options given at the call.
        model_config: the options that the model was built with.
        devices: the number of devices.
        chosen: the number of microbatches that "auto" stands for; None: it has not been chosen.

    Raises:
        ValueError: a field was set to an invalid value after its config was built.
    """
    if call_config is not None:
        check(call_config, "run config of the call")
    if model_config is not None:
        check(model_config, "run config of the model")
    config = layered(call_config, model_config)
    defaults = _core.RunOptions()

    def given(name: str) -> Any:
        value = getattr(config, name)
        return getattr(defaults, name) if value is None else value

    number = config.num_microbatch
    return ResolvedRunConfig(
        requires_grad=torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad,
        output_device=torch.device("cpu" if config.output_device is None else config.output_device),
        preserve_rng_state=given("preserve_rng_state"),
        recompute_grain=config.recompute_grain or grain_name(defaults.recompute_grain),
        tied_grad_accumulation=config.tied_grad_accumulation or _accumulation_name(defaults),
        gradient_groups=given("gradient_groups"),
        fault_tolerant=given("fault_tolerant"),
        verify_every=given("verify_every"),
        num_microbatch=(chosen if number == "auto" else number) or _core.default_microbatches(devices),
        num_microbatch_is_default=number in (None, "auto"),
        num_microbatch_is_open=number == "auto" and chosen is None,
        split_input=config.split_input,
        split_label=config.split_label,
        merge_output=True if config.merge_output is None else config.merge_output,
        execute_plan=config.execute_plan,
    )


def _accumulation_name(options: _core.RunOptions) -> TiedGradAccumulation:
    of_layers = options.tied_grad_accumulation == _core.TiedGradAccumulation.LAYER
    return "layer" if of_layers else "microbatch"


def check(config: RoundPipeRunConfig, where: str) -> None:
    """Raises ValueError, tagged with `where`, for the first invalid field of `config`."""

    def fail(field: str, expected: str) -> ValueError:
        return ValueError(f"[{where}] {field} is {getattr(config, field)!r}, expected {expected} or None to inherit")

    if not isinstance(config, RoundPipeRunConfig):
        raise ValueError(f"[{where}] got a {type(config).__name__}, expected a RoundPipeRunConfig")
    for name in ("requires_grad", "preserve_rng_state", "fault_tolerant"):
        if getattr(config, name) not in (None, True, False):
            raise fail(name, "True, False")
    if config.output_device is not None:
        try:
            torch.device(config.output_device)
        except (RuntimeError, TypeError) as error:
            raise fail("output_device", "a torch device such as 'cpu'") from error
    if config.recompute_grain not in (None, "stage", "layer"):
        raise fail("recompute_grain", "'stage', 'layer'")
    if config.tied_grad_accumulation not in (None, "layer", "microbatch"):
        raise fail("tied_grad_accumulation", "'layer', 'microbatch'")
    n = config.num_microbatch
    if n not in (None, "auto") and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise fail("num_microbatch", "an integer of at least 1, 'auto'")
    groups = config.gradient_groups
    if groups is not None and (not isinstance(groups, int) or isinstance(groups, bool) or groups < 1):
        raise fail("gradient_groups", "an integer of at least 1")
    every = config.verify_every
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or not 0 <= every < 2**31):
        raise fail("verify_every", "an integer of at least 0")
    split = config.split_input
    if split is not None and not callable(split) and not (isinstance(split, (tuple, list)) and len(split) == 2):
        raise fail("split_input", "a pair (args_spec, kwargs_spec), a function (args, kwargs, n)")
    if config.execute_plan is not None and not isinstance(config.execute_plan, (ModelExecutePlan, _core.Plan)):
        raise fail("execute_plan", "a ModelExecutePlan")


def FullRoundPipeRunConfig(  # noqa: N802  the published package's name
    function_run_config: RoundPipeRunConfig, model_run_config: RoundPipeRunConfig
) -> ResolvedRunConfig:
    """Resolves the options of a call with the devices of the pool; see `resolve`."""
    from roundpipe.device.pool import devices

    return resolve(function_run_config, model_run_config, devices=len(devices()))
