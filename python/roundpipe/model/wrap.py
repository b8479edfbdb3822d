"""Turns any model into RoundPipe modules, with as much of it on the devices as its structure allows."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.data.microbatch import merge_what_fits
from roundpipe.device.pool import devices
from roundpipe.following.native.report import NativeOption, check_option, without_native_layers
from roundpipe.following.refusals import refuse_compiled, refuse_weights, warn_batch_norm
from roundpipe.model.call.loss_function import as_losses, outputs_as_loss
from roundpipe.model.call.run_config import RoundPipeRunConfig, layered
from roundpipe.model.facade import ModelFacade
from roundpipe.model.host_contents import contents_of
from roundpipe.model.memory.budget import HOST_VARIABLE, budget_of, predict_model, refuse_host
from roundpipe.model.pipe import RoundPipe
from roundpipe.model.step.torch_steps import TorchSteps
from roundpipe.model.step_call import check_step_call
from roundpipe.model.stepped import SteppedModel
from roundpipe.ops.functional import Arithmetic

if TYPE_CHECKING:
    from roundpipe.following.language_model import LanguageModel
    from roundpipe.ops.token_wise import ChunkTokens

PRESETS = frozenset({"GptOssForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
"""Model classes that `use_sequential_preset=True` accepts."""


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Iterable[nn.Module | str] | None = None,
    override_config: Mapping[nn.Module | str, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    loss_chunk_tokens: ChunkTokens = "auto",
    mlp_chunk_tokens: ChunkTokens = "auto",
    native: NativeOption = None,
    arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC,
    **roundpipe_kwargs: Any,
) -> Any:
    """Wraps a model: a transformers model by following its own forward, any other model part by part.

    Following: the model's own layers become the pipeline's layers, with one layer before them (embeddings, masks,
    positions) and one after them (last norm, head, loss). Outputs, loss and gradients are those of the plain model,
    whatever its forward does around its layers. If that does not hold, a causal language model is refused, and any
    other model is wrapped part by part, with a warning. The model's loss is the loss of the whole batch, however the
    batch is cut into microbatches; this includes `forward_backward` without a `loss_fn`. A batch that cannot be cut
    runs as one microbatch. The model may be wrapped by peft.

    Part by part, from the root down: an `nn.Sequential` becomes a `RoundPipe` of many layers. A module becomes a
    `RoundPipe` of a single layer if its own parameters hold at least `lower_threshold` bytes, or if its parameters and
    buffers hold at most `upper_threshold` bytes; below `lower_threshold` bytes in total, it runs as one microbatch.
    Each element of an `nn.ModuleList` becomes a `RoundPipe`. Its outputs are merged if they can be; the others go to
    the next element as microbatches. Any other module stays on the host, and its children are examined. Modules
    without parameters and buffers stay on the host too. A module used in several places is wrapped once. Modules that
    share a parameter are wrapped together, as one layer.

    Args:
        model: changed in place: wrapped children are replaced.
        use_sequential_preset: True requires a model class with a preset, that is, one whose following is tested with
            each release; False wraps part by part; None follows every transformers model that can be followed.
        lower_threshold: in bytes.
        upper_threshold: in bytes; by default the model's bytes / (devices + 1).
        skip_modules: modules (or their names) that stay on the host, with all their submodules.
        override_config: options for a module (or its name) and all its submodules; they win over `model_run_config`.
        model_run_config: options for all modules.
        name: the model's name in messages.
        loss_chunk_tokens: for a followed model: when only the loss is needed, logits are held for this many tokens at a
            time; "auto" does so if they would take more than 16 MiB, with as many tokens as have 64 MiB of fp32 logits
            on the host and 1 GiB on a card (at most 4,096), whatever is free; None never does.
        mlp_chunk_tokens: for a followed model: the inner activations of its MLPs are held for this many tokens at a
            time; "auto" does so for rows of more than 16,384 tokens, None never does.
        native: for a followed model: whether the engine runs its decoder layers itself, without Python. None does so
            where the layer's class has a native form and both have the same bits in a comparison made here; see
            `layers_are_native` of the result. False never does so. True requires it for every layer, and "exact" also
            that the bits are those of the Python layers, which "fast" arithmetic has not.
        arithmetic: "exact" or "fast": whether native layers and losses compute with torch's operators, and so with
            their bits, or with fused kernels, which move a fifth of the bytes and have other last bits, the same ones
            on any number of devices. Parts that run in Python compute exactly; `layers_are_native` says what does.
        **roundpipe_kwargs: options for every `RoundPipe`.

    Returns:
        A `RoundPipe`, or an `AutoRoundPipe` if the root stays on the host.

    Raises:
        NotImplementedError: a preset is required and the model's class has none.
        ValueError: a causal language model cannot be followed, the model is compiled as a whole or has weights that
            are not plain tensors, more microbatches would change the result, a name or module is not in the model, a
            shared parameter cannot be kept in one place, or native layers are required and one has no native form.
    """
    if isinstance(model, (RoundPipe, AutoRoundPipe)):
        raise ValueError(
            f"[wrap_model_to_roundpipe] the model is wrapped already, as {type(model).__name__}; expected a plain one"
        )
    check_option(native, arithmetic)
    config = model_run_config or RoundPipeRunConfig()
    language_model = _language_model_in(model)
    if use_sequential_preset and (language_model is None or type(language_model).__name__ not in PRESETS):
        raise NotImplementedError(
            f"[wrap_model_to_roundpipe] there is no preset for {type(model).__name__}, expected one of "
            f"{sorted(PRESETS)}; leave use_sequential_preset out to wrap it in the way that fits"
        )
    refuse_weights(model)
    refuse_compiled(model)
    by_parts = use_sequential_preset is False or bool(skip_modules) or bool(override_config and language_model is None)
    if use_sequential_preset or (not by_parts and (language_model is not None or upper_threshold is None)):
        followed = _followed(model, language_model is not None, loss_chunk_tokens, mlp_chunk_tokens, arithmetic)
        if followed is not None:
            followed.check_microbatches(None if config.num_microbatch == "auto" else config.num_microbatch)
            return _pipe_of(followed, model, name or followed.name, config, native, roundpipe_kwargs)
    not_native = without_native_layers(native, "the model is wrapped part by part, and only followed ones have them")
    # Each part checks its own budget; together they must fit as well.
    host_budget = budget_of(roundpipe_kwargs.get("host_memory"), "host_memory", HOST_VARIABLE)
    if host_budget is not None:
        name_of_kind = type(model).__name__
        refuse_host("wrap_model_to_roundpipe", name_of_kind, host_budget, lambda rule: predict_model(model, rule))
    wrapper = _Wrapper(model, lower_threshold, upper_threshold, skip_modules or (), override_config or {})
    layout = wrapper.layout()
    wrapper.warn_unused_overrides(layout)

    pipes: dict[int, RoundPipe] = {}
    cut: list[nn.Module] = []  # modules that run with more than one microbatch
    for unit in layout.units.values():
        if isinstance(unit.module, RoundPipe):
            pipes[id(unit.module)] = unit.module
            continue
        label = name if unit.module is model else f"{name or type(model).__name__}.{unit.path}"
        unit_config = layered(unit.override, unit.structure(lower_threshold), config)
        cut += [unit.module] * (unit_config.num_microbatch != 1)
        pipe = RoundPipe.__new__(RoundPipe)
        own = object.__getattribute__(pipe, "__dict__")
        own["_is_part"], own["_native"] = unit.module is not model, not_native
        pipe.__init__(unit.module, name=label, model_run_config=unit_config, **roundpipe_kwargs)  # type: ignore[misc]
        pipes[id(unit.module)] = pipe
    if id(model) in pipes:
        return pipes[id(model)]
    warn_batch_norm(name or type(model).__name__, cut)
    for host in layout.hosts.values():
        for child_name, child in list(host.module._modules.items()):
            if child is not None and id(child) in pipes:
                setattr(host.module, child_name, pipes[id(child)])
    process_group = roundpipe_kwargs.get("process_group")
    root = AutoRoundPipe(model, name, roundpipe_kwargs.get("optim_dtype"), process_group=process_group)
    object.__getattribute__(root, "__dict__")["_native"] = not_native
    return root


def _pipe_of(
    followed: LanguageModel,
    model: nn.Module,
    name: str,
    config: RoundPipeRunConfig,
    native: NativeOption,
    roundpipe_kwargs: dict[str, Any],
) -> RoundPipe:
    """The pipeline of a followed model."""
    from roundpipe.following.native.layers import make_native

    pipe = RoundPipe.__new__(RoundPipe)
    object.__getattribute__(pipe, "__dict__")["_native"] = make_native(followed, native)
    alone = {**roundpipe_kwargs, "process_group": False}
    pipe.__init__(followed.chain, name=name, model_run_config=config, **alone)  # type: ignore[misc]
    pipe._set_language_model(followed, model)
    pipe._join_nodes(roundpipe_kwargs.get("process_group"), pipe.num_layers)
    return pipe


def wrap_model(model: nn.Module, **roundpipe_kwargs: Any) -> Any:
    """`wrap_model_to_roundpipe` with `use_sequential_preset=True`, under the published package's name."""
    return wrap_model_to_roundpipe(model, use_sequential_preset=True, **roundpipe_kwargs)


def _language_model_in(model: nn.Module) -> nn.Module | None:
    """See `language_model_in`. Models outside transformers skip its import, which takes seconds."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from roundpipe.following.language_model import language_model_in

    return language_model_in(model)


def _followed(
    model: nn.Module,
    is_causal: bool,
    loss_chunk_tokens: ChunkTokens,
    mlp_chunk_tokens: ChunkTokens,
    arithmetic: Arithmetic,
) -> LanguageModel | None:
    """Follows a transformers model as a chain of layers. None for other models, and, with a warning, for models that
    cannot be followed; a causal language model that cannot be followed raises."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from roundpipe.following.language_model import LanguageModel, transformers_model_in
    from roundpipe.following.placeholder import CannotFollow

    if transformers_model_in(model) is None:
        return None
    try:
        return LanguageModel(model, loss_chunk_tokens, mlp_chunk_tokens, arithmetic)
    except CannotFollow as reason:
        if is_causal:
            raise
        warnings.warn(
            f"{str(reason).rpartition(';')[0]}; it is wrapped part by part, and what lies around "
            "its parts runs on the host",
            stacklevel=3,
        )
        return None


@dataclass
class _Place:
    """A module with its place: on the host, or (`unit`) as one RoundPipe."""

    path: str
    module: nn.Module
    unit: bool
    override: RoundPipeRunConfig
    whole: bool = False  # a host module with all its submodules: a skipped one
    listed: bool = False  # element of a ModuleList

    def structure(self, lower_threshold: int) -> RoundPipeRunConfig:
        """The options that follow from the unit's position."""
        tiny = not self.listed and not _is_sequential(self.module) and _total_bytes(self.module) < lower_threshold
        return RoundPipeRunConfig(
            num_microbatch=1 if tiny and self.path else None, merge_output=merge_what_fits if self.listed else None
        )


@dataclass
class _Layout:
    """The place of every module, by id."""

    units: dict[int, _Place] = field(default_factory=dict)
    hosts: dict[int, _Place] = field(default_factory=dict)

    def parameters_of(self, place: _Place) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that live at `place`, with names relative to the root."""
        recurse = place.unit or place.whole
        for name, parameter in place.module.named_parameters(recurse=recurse):
            yield _join(place.path, name), parameter

    def torn_parameter(self) -> tuple[str, str, list[_Place]] | None:
        """Finds a parameter that lives in two places (its two names and the places), or None. The host is one place."""
        seen: dict[int, tuple[str, _Place]] = {}
        for place in [*self.hosts.values(), *self.units.values()]:
            for name, parameter in self.parameters_of(place):
                first_name, first = seen.setdefault(id(parameter), (name, place))
                if first is not place and (first.unit or place.unit):
                    return first_name, name, [first, place]
        return None


class _Wrapper:
    """Decides the layout of one model."""

    def __init__(
        self,
        model: nn.Module,
        lower_threshold: int,
        upper_threshold: int | None,
        skip_modules: Iterable[nn.Module | str],
        override_config: Mapping[nn.Module | str, RoundPipeRunConfig],
    ) -> None:
        self.model = model
        self.lower = lower_threshold
        self.upper_is_default = upper_threshold is None
        if upper_threshold is None:
            upper_threshold = _total_bytes(model) // (len(devices()) + 1)
        self.upper = upper_threshold
        self.members = {id(module) for module in model.modules()}
        self.skipped = {id(self.find(key, "skip_modules")) for key in skip_modules}
        self.overrides = {id(self.find(key, "override_config")): config for key, config in override_config.items()}
        self.forced: set[int] = set()  # modules that must be one layer because they share parameters

    def find(self, key: nn.Module | str, where: str) -> nn.Module:
        if isinstance(key, str):
            try:
                return self.model.get_submodule(key)
            except AttributeError as error:
                raise ValueError(
                    f"[{where}] the model has no module {key!r}; expected a name from named_modules()"
                ) from error
        if id(key) not in self.members:
            raise ValueError(
                f"[{where}] a {type(key).__name__} is not a module of the model; expected one of modules()"
            )
        return key

    def layout(self) -> _Layout:
        while True:
            layout = _Layout()
            self.place(layout, "", self.model, RoundPipeRunConfig(), listed=False)
            torn = layout.torn_parameter()
            if torn is None:
                return layout
            self.forced.add(id(self.common_module(*torn)))

    def place(
        self, layout: _Layout, path: str, module: nn.Module, override: RoundPipeRunConfig, listed: bool
    ) -> _Place:
        """Places `module` and all its submodules; a module seen before keeps its place."""
        known = layout.units.get(id(module)) or layout.hosts.get(id(module))
        if known is not None:
            known.listed &= listed
            return known
        override = layered(self.overrides.get(id(module)), override)
        unit = self.is_unit(module, listed)
        place = _Place(path, module, unit, override, whole=id(module) in self.skipped, listed=listed)
        (layout.units if unit else layout.hosts)[id(module)] = place
        if unit or place.whole:
            return place
        in_list = isinstance(module, nn.ModuleList)
        for name, child in module._modules.items():
            if child is not None:
                self.place(layout, _join(path, name), child, override, in_list)
        return place

    def is_unit(self, module: nn.Module, listed: bool) -> bool:
        if id(module) in self.skipped:
            return False
        if id(module) in self.forced or _is_wrapped(module):
            return True
        if not _has_forward(module) or self.holds_fixed(module):
            return False
        if _is_sequential(module) and module is self.model and len(module) > 0:
            return True
        total = _total_bytes(module)
        if total == 0:
            return False
        return _is_sequential(module) or listed or _own_bytes(module) >= max(self.lower, 1) or total <= self.upper

    def holds_fixed(self, module: nn.Module) -> bool:
        """Whether `module` contains a skipped or an already wrapped module."""
        return any(id(part) in self.skipped or _is_wrapped(part) for part in module.modules())

    def common_module(self, name: str, other_name: str, places: list[_Place]) -> nn.Module:
        """The innermost module that holds both places of a shared parameter and can be one layer."""
        parts = [place.path.split(".") if place.path else [] for place in places]
        common: list[str] = []
        for a, b in zip(*parts, strict=False):
            if a != b:
                break
            common.append(a)
        while common and not _has_forward(self.model.get_submodule(".".join(common))):
            common.pop()
        path = ".".join(common)
        module = self.model.get_submodule(path)
        what = f"parameters {name} and {other_name} are one (tied), but would be in two places"
        size = _total_bytes(module)
        label = f"module {path}" if path else "the whole model"
        if not _has_forward(module) or self.holds_fixed(module) or id(module) in self.forced:
            raise ValueError(
                f"[wrap_model_to_roundpipe] {what}, and {label} that holds both cannot be one layer, as a part of it "
                "is skipped, wrapped already, or it has no forward; skip both modules, untie the parameters, or build "
                "a RoundPipe over an nn.Sequential by hand"
            )
        if not self.upper_is_default and size > self.upper:
            raise ValueError(
                f"[wrap_model_to_roundpipe] {what}, and {label} that holds both has {size} bytes, expected at most "
                f"upper_threshold = {self.upper} for one layer; raise upper_threshold, or untie the parameters"
            )
        warnings.warn(
            f"[wrap_model_to_roundpipe] {what}: {label} ({size} bytes) becomes a single layer. "
            "Untie them, or build a RoundPipe over an nn.Sequential by hand, to have more layers.",
            stacklevel=4,
        )
        return module

    def warn_unused_overrides(self, layout: _Layout) -> None:
        for path, module in self.model.named_modules():
            if id(module) in self.overrides and id(module) not in layout.units and id(module) not in layout.hosts:
                warnings.warn(
                    f"[wrap_model_to_roundpipe] override_config for {path} has no effect: it is inside a module that "
                    "is wrapped as a whole",
                    stacklevel=3,
                )


class AutoRoundPipe(SteppedModel):
    """A model whose root runs on the host, with `RoundPipe` modules inside it.

    All attributes that this class does not define are read, written and deleted on the original model, and calling
    this object calls the original model. Made by `wrap_model_to_roundpipe`, or by hand from a model that holds
    `RoundPipe` modules.

    Args:
        model: the original model, with its wrapped parts in place.
        name: the name in messages; None takes the class name.
        optim_dtype: dtype of the optimizer's parameters; None keeps each parameter's dtype.
        process_group: see `RoundPipe`.
        **roundpipe_kwargs: other options of `RoundPipe`, which have no effect here.

    Raises:
        ValueError: the model is already wrapped, or a parameter is used both inside and outside a `RoundPipe`.
        TypeError: `RoundPipe` does not have such an option.
    """

    _why_not_cut = (  # used in a message of `ModelExecutePlan.auto`
        "an AutoRoundPipe, whose root runs on the host and has no layers to cut; expected a RoundPipe: pass the "
        "RoundPipe modules inside it one by one"
    )

    _order: dict[str, int]
    _contents: list[int]

    def __init__(
        self,
        model: nn.Module,
        name: str | None = None,
        optim_dtype: torch.dtype | None = None,
        process_group: Any = None,
        **roundpipe_kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module) or isinstance(model, ModelFacade):
            raise ValueError(f"[AutoRoundPipe] model is a {type(model).__name__}, expected a plain nn.Module")
        unknown = roundpipe_kwargs.keys() - inspect.signature(RoundPipe.__init__).parameters.keys()
        if unknown:
            raise TypeError(f"AutoRoundPipe() got unexpected options: {', '.join(sorted(unknown))}")
        # nn.Module.__init__ is left out on purpose: its state is the original model's.
        own = object.__getattribute__(self, "__dict__")
        own["_original_model"] = own["_wrapped"] = model
        own["_name"] = type(model).__name__ if name is None else name
        own["_optim_dtype"] = optim_dtype
        self._take_parts()
        self._join_nodes(process_group, None)
        if self._joint is not None:
            for part in _parts_of(model)[0].values():
                part._take_joint(self._joint)

    def _take_parts(self) -> None:
        """Records the model's current pipelines and host contents."""
        own = object.__getattribute__(self, "__dict__")
        model = own["_wrapped"]
        pipes, host_parameters = _parts_of(model)
        order = [parameter_name for parameter_name, _ in model.named_parameters(remove_duplicate=False)]
        own["_step_group"] = TorchSteps(pipes, host_parameters, own["_optim_dtype"], self._joint)
        own["_order"] = {parameter_name: place for place, parameter_name in enumerate(order)}
        own["_contents"] = contents_of(model)
        own.pop("_step_claim", None)

    def _follow_changes(self) -> None:
        """Takes over modules or parameters on the host that were added, removed or replaced.

        Raises:
            ValueError: an optimizer has already been made for the previous ones.
        """
        if contents_of(self._wrapped) == self._contents:
            return
        if not self._step_group.is_untouched:
            raise ValueError(
                f"[AutoRoundPipe] parameters or modules of {self._name} were added, removed or replaced after an "
                "optimizer was made for it; change the model first, then make the optimizer, or wrap the model again"
            )
        self._step_group.synchronize()
        self._take_parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original model; its wrapped parts run on the devices."""
        _core.require_engine()
        self._follow_changes()
        self._step_group.before_call()
        return self._original_model(*args, **kwargs)

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
        """Runs forward, loss and backward of one batch; the root sees the whole batch.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: second argument of `loss_fn`.
            loss_fn: takes `(outputs, label)` and returns the loss, or several as a list or tuple, whose sum is
                differentiated.
            return_outputs: also return the outputs.
            run_config: accepted so that the same call works with `RoundPipe`. It has no effect, and a warning says so:
                the parts follow the options that they were wrapped with.

        Returns:
            The detached loss (a list if there are several), or `(loss, detached outputs)`.
        """
        check_step_call(self, "forward_backward", input_args, unknown)
        _core.require_engine()
        self._follow_changes()
        self._step_group.before_call()
        if run_config is not None and run_config != RoundPipeRunConfig():
            warnings.warn(
                "[AutoRoundPipe.forward_backward] run_config has no effect: the root runs on the host; give "
                "model_run_config or override_config to wrap_model_to_roundpipe",
                stacklevel=2,
            )
        with torch.enable_grad():
            args = tuple(input_args) if isinstance(input_args, (list, tuple)) else (input_args,)
            outputs = self._original_model(*args, **(input_kwargs or {}))
            result = loss_fn(outputs, label)
            losses = as_losses(result)
            for loss in losses:
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise ValueError(
                        "[AutoRoundPipe.forward_backward] loss_fn returned something that is not a scalar tensor: "
                        f"{type(loss).__name__}; expected a loss, or a list or tuple of losses"
                    )
            total = losses[0]
            for loss in losses[1:]:
                total = total + loss.to(total.device)
            total.backward()
        detached = [loss.detach() for loss in losses]
        value = detached if isinstance(result, (list, tuple)) else detached[0]
        if not return_outputs:
            return value
        return value, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The optimizer's parameters, on the host, with their names, in the order of the original model."""
        self._follow_changes()
        self._claim_steps()
        named = list(self._step_group.optim_named_parameters("", False))
        named.sort(key=lambda entry: self._order.get(entry[0], len(self._order)))
        first = {id(parameter): name for name, parameter in reversed(named)}
        return iter(
            [
                (_join(prefix, name), parameter)
                for name, parameter in named
                if not remove_duplicate or first[id(parameter)] == name
            ]
        )


def _parts_of(model: nn.Module) -> tuple[dict[str, RoundPipe], dict[str, nn.Parameter]]:
    """The `RoundPipe`s inside a model, by their first names, and the parameters outside them."""
    pipes: dict[str, RoundPipe] = {}
    outside: dict[str, nn.Parameter] = {}
    seen: set[int] = set()

    def look(path: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, RoundPipe):
            pipes[path] = module
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                outside.setdefault(_join(path, name), parameter)
        for name, child in module._modules.items():
            if child is not None:
                look(_join(path, name), child)

    look("", model)
    host: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in outside.items():
        host.setdefault(id(parameter), (name, parameter))
    for path, pipe in pipes.items():
        for inner, parameter in pipe._wrapped.named_parameters():
            if id(parameter) in host:
                raise ValueError(
                    f"[AutoRoundPipe] parameter {host[id(parameter)][0]} is also {_join(path, inner)}, inside of a "
                    "RoundPipe and outside of it, expected one place; wrap the modules that share it together"
                )
    return pipes, dict(host.values())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_wrapped(module: nn.Module) -> bool:

    return isinstance(module, RoundPipe)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def _total_bytes(module: nn.Module) -> int:
    return _bytes([*module.parameters(), *module.buffers()])


def _own_bytes(module: nn.Module) -> int:
    """Bytes of the parameters that the module's own forward uses, including those in parameter containers."""
    containers = [child for child in module.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))]
    return _bytes(p for part in [module, *containers] for p in part.parameters(recurse=False))
