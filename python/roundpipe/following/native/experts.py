"""The mixture of experts in a decoder layer, as a native layer sees it."""

from __future__ import annotations

from typing import Any

from torch import nn

# By family: its modules in a layer with experts, and the last part of their classes' names.
MODULES = {
    "Qwen3Moe": {"mlp": "SparseMoeBlock", "mlp.gate": "TopKRouter", "mlp.experts": "Experts"},
    "GptOss": {"mlp": "MLP", "mlp.router": "TopKRouter", "mlp.experts": "Experts"},
}
# By class: its parameters, if they are not just a weight.
PARAMETERS = {
    "Qwen3MoeExperts": {"gate_up_proj", "down_proj"},
    "GptOssExperts": {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"},
    "GptOssTopKRouter": {"weight", "bias"},
}
# What transformers' decorator of the class says about it.
_FLAGS = {"has_gate": True, "has_post_expert_norm": False, "_is_expert_parallel": False}
_FLAGS_OF = {
    "Qwen3Moe": {**_FLAGS, "has_bias": False, "is_transposed": False, "is_concatenated": True},
    "GptOss": {**_FLAGS, "has_bias": True, "is_transposed": True, "is_concatenated": False},
}


def family(layer: nn.Module) -> str:
    """The prefix of the class names of the layer's family."""
    return type(layer).__name__.removesuffix("DecoderLayer")


def has_experts(layer: nn.Module) -> bool:
    """Whether a layer is one with experts; some families have both kinds."""
    modules = MODULES.get(family(layer))
    return modules is not None and type(layer.mlp).__name__ == family(layer) + modules["mlp"]


def activation_path(layer: nn.Module) -> str | None:
    """The name of the layer's activation module; None if it has none."""
    if not has_experts(layer):
        return "mlp.act_fn"
    return None if family(layer) == "GptOss" else "mlp.experts.act_fn"


def reason_against_numbers(layer: Any) -> str | None:
    """Why the numbers in the modules of a layer with experts do not fit the native form; None if they do."""
    experts, name, router = layer.mlp.experts, *_router_of(layer)
    for flag, expected in _FLAGS_OF[family(layer)].items():
        if getattr(experts, flag, None) is not expected:
            return f"mlp.experts.{flag} is {getattr(experts, flag, None)!r}, not {expected!r}"
    if "_apply_gate" in vars(experts):
        return "mlp.experts has an _apply_gate of its own"
    for number in ("alpha", "limit") if family(layer) == "GptOss" else ():
        if not isinstance(getattr(experts, number, None), float | int):
            return f"mlp.experts.{number} is {getattr(experts, number, None)!r}, not a number"
    count, width = router.weight.shape
    for shown, found, expected in (
        ("mlp.experts.num_experts", experts.num_experts, count),
        ("the number of matrices in mlp.experts.gate_up_proj", _matrices(experts, "gate_up_proj"), count),
        ("the number of matrices in mlp.experts.down_proj", _matrices(experts, "down_proj"), count),
        (f"{name}.hidden_dim", router.hidden_dim, width),
    ):
        if found != expected:
            return f"{shown} is {found}, but {name}.weight is {list(router.weight.shape)}"
    return None


def _matrices(experts: Any, name: str) -> int:
    stacked = experts._parameters.get(name)
    count: int = experts.parts(name)[0].shape[0] if stacked is None else stacked.shape[0]
    return count


def numbers_of(layer: Any) -> dict[str, Any]:
    """What the router and the gate of a layer with experts read, as arguments of `_core.MoeConfig`."""
    experts, (_, router) = layer.mlp.experts, _router_of(layer)
    if family(layer) == "GptOss":
        clamped = float(experts.alpha), float(experts.limit)
        return {"top_k": router.top_k, "shares": "softmax_of_chosen", "clamped": clamped}
    shares = "normalized" if router.norm_topk_prob else "softmax_of_all"
    return {"top_k": router.top_k, "shares": shares, "clamped": None}


def _router_of(layer: Any) -> tuple[str, Any]:
    name = next(name for name, kind in MODULES[family(layer)].items() if kind == "TopKRouter")
    return name, layer.get_submodule(name)
