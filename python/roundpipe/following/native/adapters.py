"""PEFT's LoRA adapters on the projections of a decoder layer, as a native layer sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from roundpipe import _core
from roundpipe.following.layers.adapters import without_adapters

_LAYER = "peft.tuners.lora.layer"
# The modules that PEFT puts around a model: its class, by the module that defines it; the outer ones first.
_AROUND = ((("PeftModelForCausalLM", "PeftModel"), "peft.peft_model"), (("LoraModel",), "peft.tuners.lora.model"))
# Empty in a plain adapter.
_EMPTY = ("lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# What PEFT changes in place.
_CHANGING = ("scaling", "use_dora", "lora_variant")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is PEFT's linear layer with LoRA adapters."""
    peft = sys.modules.get(_LAYER)
    return peft is not None and type(module) is peft.Linear


def adapted(layer: nn.Module) -> dict[str, Any]:
    """The projections of a layer that have adapters, by name."""
    found: dict[str, Any] = {}
    for name in _core.ADAPTABLE:
        module: Any = layer
        for part in name.split("."):
            module = None if module is None else module._modules.get(part)
        if module is not None and is_adapted(module):
            found[name] = module
    return found


def functions() -> Iterator[tuple[Any, str, Any, bool]]:
    """The functions that adapters run: owner, name, function, and whether it is PEFT's own."""
    peft = sys.modules.get(_LAYER)
    if peft is None:
        return
    for name in ("forward", "_cast_input_dtype", "_check_forward_args"):
        function = getattr(peft.Linear, name, None)  # older versions lack the others
        if function is not None:
            yield peft.Linear, name, function, function.__module__.startswith("peft.tuners.")
    yield nn.Dropout, "forward", nn.Dropout.forward, nn.Dropout.forward.__module__ == nn.Dropout.__module__


def around(model: Any) -> list[nn.Module]:
    """The modules that PEFT puts around a model; none if it has no adapters."""
    return [] if without_adapters(model) is model else [model, model.base_model]


def reason_against_around(modules: list[nn.Module]) -> str | None:
    """Why such modules do more than call the model in them; None if they do not."""
    for module, (names, place) in zip(modules, _AROUND, strict=False):
        if type(module) not in [getattr(sys.modules.get(place), name, None) for name in names]:
            return f"the model is in a {type(module).__name__}"
    return None


def functions_around() -> Iterator[tuple[Any, str, Any, bool]]:
    """Likewise of the modules that PEFT puts around a model."""
    for names, place in _AROUND:
        for kind in (getattr(sys.modules.get(place), name, None) for name in names):
            for name in ("forward", "_enable_peft_forward_hooks"):
                function = getattr(kind, name, None)
                if function is not None:
                    yield kind, name, function, function.__module__.startswith("peft.")


def inner_modules(name: str, module: Any) -> dict[str, type[nn.Module]]:
    """The modules inside of an adapted projection, by name, with their classes."""
    found: dict[str, type[nn.Module]] = {f"{name}.base_layer": nn.Linear}
    parts: dict[str, type[nn.Module]] = {
        "lora_A": nn.ModuleDict,
        "lora_B": nn.ModuleDict,
        "lora_dropout": nn.ModuleDict,
    }
    parts |= {"lora_embedding_A": nn.ParameterDict, "lora_embedding_B": nn.ParameterDict}
    if "lora_magnitude_vector" in module._modules:
        parts["lora_magnitude_vector"] = type(module._modules["lora_magnitude_vector"])  # empty
    found |= {f"{name}.{part}": kind for part, kind in parts.items()}
    for adapter in module.lora_A:
        found[f"{name}.lora_A.{adapter}"] = found[f"{name}.lora_B.{adapter}"] = nn.Linear
        dropout = module.lora_dropout[adapter]
        found[f"{name}.lora_dropout.{adapter}"] = nn.Dropout if type(dropout) is nn.Dropout else nn.Identity
    return found


def reason_against(name: str, module: Any) -> str | None:
    """Why a native layer would not do what this projection does now; None if it would."""
    names = list(module.lora_A)
    if len(names) != 1 or list(module.active_adapters) != names:
        return f"{name} has the adapters {names}, of which {list(module.active_adapters)} are active, not just one"
    if module.disable_adapters:
        return f"{name} has its adapter disabled"
    if module.merged_adapters:
        return f"{name} has a merged adapter"
    if getattr(module, "lora_variant", None) or any(getattr(module, "use_dora", {}).values()):
        return f"{name} has another adapter than plain LoRA"
    if not getattr(module, "cast_input_dtype_enabled", True):
        return f"{name}.cast_input_dtype_enabled is off"
    if any(len(getattr(module, part, ())) for part in _EMPTY):
        return f"{name} has another adapter than plain LoRA"
    if not isinstance(module.scaling[names[0]], float | int):
        return f"{name}.scaling is of class {type(module.scaling[names[0]]).__name__}"
    if module.lora_A[names[0]].bias is not None:
        return f"{name}.lora_A has a bias"
    dropout = module.lora_dropout[names[0]]
    if type(dropout) is nn.Dropout and dropout.inplace:
        return f"{name}.lora_dropout is in place"
    return None


def numbers_of(layer: nn.Module) -> list[tuple[float, float, bool] | None]:
    """By `_core.ADAPTABLE`: scaling, dropout, and whether it drops, of an adapter that has no `reason_against`."""
    found: list[tuple[float, float, bool] | None] = []
    modules = adapted(layer)
    for name in _core.ADAPTABLE:
        module = modules.get(name)
        if module is None:
            found.append(None)
            continue
        (adapter,) = module.lora_A
        dropout = module.lora_dropout[adapter]
        drops = type(dropout) is nn.Dropout
        found.append((float(module.scaling[adapter]), float(dropout.p) if drops else 0.0, drops and dropout.training))
    return found


def changing_of(module: nn.Module) -> list[dict[Any, Any]]:
    """What PEFT changes in place in a module, besides `merged_adapters`."""
    return [vars(module)[name] for name in _CHANGING if name in vars(module)] if is_adapted(module) else []
