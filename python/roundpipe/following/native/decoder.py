"""One decoder layer of transformers, as a native layer sees it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch.nn.functional as F
from torch import nn

from roundpipe import _core
from roundpipe.following.native import adapters, experts
from roundpipe.following.native.code import family_of, modeling_of
from roundpipe.ops.functional import Arithmetic
from roundpipe.quantise.modules import encodings_of, part_names, plain_class

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPTURING = "transformers.utils.output_capturing"
# By class: its parameters, if they are not just a weight.
_PARAMETERS = {"Linear": {"weight", "bias"}, "GptOssAttention": {"sinks"}, **experts.PARAMETERS}


def activation_of(module: nn.Module) -> str | None:
    """The native name of an activation module; None if there is none."""
    activations = sys.modules["transformers.activations"]
    kind = type(module)
    if kind is nn.SiLU or kind is activations.SiLUActivation:
        return None if getattr(module, "inplace", False) else "silu"
    if kind is nn.ReLU:
        return None if module.inplace else "relu"
    if kind is activations.GELUActivation:
        return "gelu" if module.act is F.gelu else None
    if kind is activations.GELUTanh:
        act = module.act
        tanh = isinstance(act, functools.partial) and act.func is F.gelu and act.keywords == {"approximate": "tanh"}
        return "gelu_tanh" if tanh else None
    return None


def reason_against(layer: nn.Module, prefix: str) -> str | None:
    """Why a native layer would not do what `layer` does now; None if it would.

    Args:
        prefix: of the family's class names, see `family_of`.
    """
    modeling = modeling_of(prefix)
    norm = getattr(modeling, f"{prefix}RMSNorm")
    expected: dict[str, type[nn.Module]] = {
        "": getattr(modeling, f"{prefix}DecoderLayer"),
        "self_attn": getattr(modeling, f"{prefix}Attention"),
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
    }
    expected |= {f"self_attn.{name}": nn.Linear for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if prefix in ("Qwen3", "Qwen3Moe"):
        expected |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    is_sparse = experts.has_experts(layer)
    if is_sparse:
        expected |= {name: getattr(modeling, prefix + kind) for name, kind in experts.MODULES[prefix].items()}
    else:
        expected |= {f"mlp.{name}": nn.Linear for name in ("gate_proj", "up_proj", "down_proj")}
        expected["mlp"] = getattr(modeling, f"{prefix}MLP")
    activation = experts.activation_path(layer)
    for name, projection in adapters.adapted(layer).items():
        reason = adapters.reason_against(name, projection)
        if reason is not None:
            return reason
        expected |= {name: type(projection), **adapters.inner_modules(name, projection)}
    found = dict(layer.named_modules())
    for name, module in found.items():
        shown = name or "the layer"
        kind = plain_class(module)
        if name and name == activation:
            if activation_of(module) is None:
                return f"{name} is {type(module).__name__}, which has no native form"
        elif name not in expected:
            return f"{shown} is a module that the class has not"
        elif kind is not expected[name]:
            return f"{shown} is {type(module).__module__}.{type(module).__name__}, not {expected[name].__name__}"
        parameters = set() if adapters.is_adapted(module) else _PARAMETERS.get(kind.__name__, {"weight"})
        reason = instance_reason(module, parameters | part_names(module), set())
        if reason is not None:
            return f"{shown} {reason}"
    missing = {*expected, *([] if activation is None else [activation])} - found.keys()
    if missing:
        return f"{min(missing)} is missing"
    if len(list(layer.parameters())) != len(list(layer.named_parameters(remove_duplicate=False))):
        return "two of its modules share a parameter"
    attention: Any = layer.self_attn
    if attention.is_causal is not True:
        return f"self_attn.is_causal is {attention.is_causal!r}"
    heads, groups = attention.q_proj.out_features, attention.num_key_value_groups
    if heads != groups * attention.k_proj.out_features or heads % attention.head_dim:
        return f"self_attn.num_key_value_groups = {groups} does not fit its projections"
    reason = experts.reason_against_numbers(layer) if is_sparse else None
    if reason is not None:
        return reason
    if getattr(layer, "gradient_checkpointing", False):
        return "gradient_checkpointing is on"
    if os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA", "0") == "1":
        return "TRANSFORMERS_SDPA_FORCE_GQA is set"
    return None


def instance_reason(module: nn.Module, parameters: set[str], buffers: set[str]) -> str | None:
    """What a module has beside its class's code and these parameters and buffers; None if nothing."""
    own = vars(module)
    if "forward" in own:
        return "has a forward of its own"
    if own.get("_compiled_call_impl") is not None:
        return "is compiled"
    for name in HOOKS:
        if any(getattr(hook, "__module__", None) != _CAPTURING for hook in own[name].values()):
            return f"has hooks ({name})"
    for name in own["_buffers"]:
        if name not in buffers:
            return f"has a buffer ({name})"
    for name, parameter in own["_parameters"].items():
        if name not in parameters or (parameter is not None and type(parameter) is not nn.Parameter):
            return f"has a parameter {name} of class {type(parameter).__name__}"
    return None


def config_of(layer: Any, arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC) -> _core.DecoderConfig:
    """The native configuration of a layer that has no `reason_against`."""
    attention = layer.self_attn
    path = experts.activation_path(layer)
    activation = None if path is None else activation_of(layer.get_submodule(path))
    is_sparse = experts.has_experts(layer)

    def eps(name: str) -> float:
        norm = getattr(attention, name, None)
        return 0.0 if norm is None else float(norm.variance_epsilon)

    return _core.DecoderConfig(
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        input_norm_eps=layer.input_layernorm.variance_epsilon,
        post_norm_eps=layer.post_attention_layernorm.variance_epsilon,
        query_norm_eps=eps("q_norm"),
        key_norm_eps=eps("k_norm"),
        scales_norms_in_float=experts.family(layer) == "GptOss",
        attention_dropout=attention.attention_dropout,
        training=attention.training,
        activation=None if is_sparse else activation,
        lora=adapters.numbers_of(layer),
        moe=_core.MoeConfig(activation=activation, **experts.numbers_of(layer)) if is_sparse else None,
        arithmetic=arithmetic,
    )


class NativeDecoder:
    """Tells the engine how to run one call of a decoder layer natively.

    Attributes:
        kind: what it is, for the engine.
        number: of the call, in the model's order.
        layer: the module.
        names: of its parameters.
        encodings: by name, of those that are encoded.
        model_config: the transformers config that its attention reads.
        activation: the native name of its MLP's activation; None if it has experts instead, or adapters.
        has_experts: whether it has them.
        arithmetic: in which it computes.
        reason: why its latest look found that it cannot run natively; None if it can.
    """

    kind = "decoder"

    def __init__(self, layer: Any, prefix: str, number: int, arithmetic: Arithmetic) -> None:
        self.number, self.arithmetic = number, arithmetic
        self.layer = layer
        self.names = [name for name, _ in layer.named_parameters()]
        self.encodings = encodings_of(layer)
        self.model_config: Any = self.layer.self_attn.config
        self.reason: str | None = None
        self._prefix = prefix
        self._modules = list(layer.modules())
        self._snapshots: list[tuple[Any, ...]] = []
        self._config: _core.DecoderConfig | None = None
        self.has_experts = experts.has_experts(layer)
        self._adapted = list(adapters.adapted(layer).values())
        plain = not self.has_experts and not any(name.startswith("mlp.") for name in adapters.adapted(layer))
        self.activation = activation_of(self.layer.mlp.act_fn) if plain else None

    def config(self) -> _core.DecoderConfig | None:
        """The configuration for a call that is made now; None if Python has to run the layer. Cheap if nothing has
        changed; then it is the same object."""
        merged = any(module.merged_adapters for module in self._adapted)  # a list that PEFT changes in place
        if merged or not self._snapshots or not _core.modules_unchanged(self._modules, self._snapshots):
            self._look()
        return self._config

    def exact_parts(self) -> str:
        """What computes exactly, and why, although the arithmetic is another one; empty if nothing does."""
        config = self.config()
        weights = [parameter for _, parameter in self.layer.named_parameters()]
        return "" if config is None else _core.exact_parts(config, self.names, weights, self.encodings)

    def _look(self) -> None:
        self._snapshots = [
            (dict(vars(module)), *(part for each in _changing_of(module) for part in (each, dict(each))))
            for module in self._modules
        ]
        self.reason = reason_against(self.layer, self._prefix)
        if self.reason is None and self.layer.self_attn.config is not self.model_config:
            self.reason = "self_attn.config has been replaced"
        self._config = config_of(self.layer, self.arithmetic) if self.reason is None else None


def _changing_of(module: nn.Module) -> list[dict[Any, Any]]:
    """The dicts of a module that change in place."""
    return [*(vars(module)[name] for name in HOOKS), *adapters.changing_of(module)]


def native_decoder(
    layer: nn.Module, number: int, arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC
) -> NativeDecoder | str:
    """The native form of a layer, or the reason why it has none."""
    prefix = family_of(layer)
    if prefix is None:
        return f"{type(layer).__module__}.{type(layer).__name__} has no native form"
    reason = reason_against(layer, prefix)
    return NativeDecoder(layer, prefix, number, arithmetic) if reason is None else reason
