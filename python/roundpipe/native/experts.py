"""The mixture of experts in a decoder layer, as a native layer sees it."""

from __future__ import annotations

from typing import Any

from torch import nn

# By family: its modules in a layer with experts, and the last part of their classes' names.
MODULES = {
    "Qwen3Moe": {"mlp": "SparseMoeBlock", "mlp.gate": "TopKRouter", "mlp.experts": "Experts"},
}
# By the last part of the class's name.
PARAMETERS = {"Experts": frozenset({"gate_up_proj", "down_proj"})}
# What transformers' decorator of the class says about it.
_FLAGS = {
    "Qwen3Moe": {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
    }
}


def _family(layer: nn.Module) -> str:
    return type(layer).__name__.removesuffix("DecoderLayer")


def has_experts(layer: nn.Module) -> bool:
    """Whether a layer is one with experts; some families have both kinds."""
    family = _family(layer)
    return family in MODULES and type(layer.mlp).__name__ == family + MODULES[family]["mlp"]


def activation_path(layer: nn.Module) -> str:
    """The name of the layer's activation module."""
    return "mlp.experts.act_fn" if has_experts(layer) else "mlp.act_fn"


def reason_against_numbers(layer: Any) -> str | None:
    """Why the numbers in the modules of a layer with experts do not fit the native form; None if they do."""
    experts, router = layer.mlp.experts, layer.mlp.gate
    for name, expected in _FLAGS[_family(layer)].items():
        if getattr(experts, name, None) != expected:
            return f"mlp.experts.{name} is {getattr(experts, name, None)!r}, not {expected!r}"
    if "_apply_gate" in vars(experts):
        return "mlp.experts has an _apply_gate of its own"
    count, width = router.weight.shape
    for shown, found, expected in (
        ("mlp.experts.num_experts", experts.num_experts, count),
        ("mlp.experts.gate_up_proj", experts.gate_up_proj.shape[0], count),
        ("mlp.experts.down_proj", experts.down_proj.shape[0], count),
        ("mlp.gate.hidden_dim", router.hidden_dim, width),
    ):
        if found != expected:
            return f"{shown} = {found} does not fit mlp.gate.weight {tuple(router.weight.shape)}"
    return None


def numbers_of(layer: Any) -> dict[str, Any]:
    """What the router of a layer with experts reads."""
    return {"top_k": layer.mlp.gate.top_k, "normalizes": bool(layer.mlp.gate.norm_topk_prob)}
