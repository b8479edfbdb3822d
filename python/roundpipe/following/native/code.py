"""Whether the code that native layers stand for is transformers' and torch's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

from roundpipe.following.native import adapters
from roundpipe.following.native.experts import MODULES

# By the last part of the module's name: the class names' prefix.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss",
}
_PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm")
_FUNCTIONS = ("apply_rotary_pos_emb", "repeat_kv", "eager_attention_forward")
_BUILT_IN = ("linear", "scaled_dot_product_attention", "gelu")
_FUNCTIONAL = ("silu", "relu", "softmax", "dropout")
_MASK = "create_causal_mask"
_MASK_FUNCTIONS = ("sdpa_mask", "find_packed_sequence_indices", "causal_mask_function")
_EXPERTS_FUNCTIONAL = ("grouped_mm",)
# By the name of an experts implementation of transformers, its function; "eager" is the class's own.
_EXPERTS = {"grouped_mm": "grouped_mm_experts_forward", "batched_mm": "batched_mm_experts_forward"}
_EXPERTS_FUNCTIONS = (*_EXPERTS.values(), "_grouped_linear", "_grouped_mm", "_can_use_grouped_mm", "_batched_linear")


def family_of(layer: nn.Module) -> str | None:
    """The prefix of the class names of transformers' module that defines exactly this layer's class, if native layers
    stand for that; else None."""
    for name, prefix in FAMILIES.items():
        modeling = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if modeling is not None and type(layer) is getattr(modeling, f"{prefix}DecoderLayer", None):
            return prefix
    return None


def modeling_of(prefix: str) -> Any:
    """transformers' module with the classes of a family."""
    name = next(name for name, each in FAMILIES.items() if each == prefix)
    return sys.modules[f"transformers.models.{name}.modeling_{name}"]


class Code:
    """The functions that the layers of one family run, as they are when this is made.

    Args:
        prefix: of the family's class names.

    Attributes:
        model_class: the class whose forward calls the layers.
    """

    def __init__(self, prefix: str) -> None:
        from transformers.integrations import sdpa_attention

        self._modeling = modeling_of(prefix)
        self.model_class = getattr(self._modeling, f"{prefix}Model")
        self._moe = sys.modules.get("transformers.integrations.moe")
        self._sdpa = sdpa_attention.sdpa_attention_forward
        self._has_sinks = prefix == "GptOss"
        self._functions = list(self._found(prefix))
        self._functions_around = list(self._found_around(prefix))

    def _found(self, prefix: str) -> Iterator[tuple[Any, str, Any, bool]]:
        """Yields the owner of each function, its name, the function, and whether it is the original one."""
        modeling = self._modeling
        for part in (*_PARTS, *MODULES.get(prefix, {}).values()):
            kind = getattr(modeling, f"{prefix}{part}")
            function = kind.forward
            original = function.__module__ == modeling.__name__ and function.__qualname__ == f"{kind.__name__}.forward"
            yield kind, "forward", function, original
        for name in (*_FUNCTIONS, "_apply_rotary_emb" if prefix == "GptOss" else "rotate_half"):
            function = getattr(modeling, name)
            yield modeling, name, function, function.__module__ == modeling.__name__
        sdpa = sys.modules[self._sdpa.__module__]
        yield sdpa, "sdpa_attention_forward", self._sdpa, sdpa.__name__ == "transformers.integrations.sdpa_attention"
        yield nn.Linear, "forward", nn.Linear.forward, nn.Linear.forward.__module__ == nn.Linear.__module__
        for name in _BUILT_IN:
            function = getattr(F, name)
            yield F, name, function, function is getattr(torch._C._nn, name)
        for name in _FUNCTIONAL:
            function = getattr(F, name)
            yield F, name, function, function.__module__ == F.__name__
        yield from adapters.functions()
        if prefix in MODULES:
            yield from self._found_for_experts(getattr(modeling, f"{prefix}Experts"))

    def _found_for_experts(self, kind: type) -> Iterator[tuple[Any, str, Any, bool]]:
        moe = self._moe
        gate = getattr(kind, "_apply_gate", None)
        own = gate is not None and gate.__qualname__ == f"{kind.__name__}._apply_gate"
        yield kind, "_apply_gate", gate, own or gate is getattr(moe, "_default_apply_gate", self)
        for name in _EXPERTS_FUNCTIONS:
            function = getattr(moe, name, None)
            yield moe, name, function, getattr(function, "__module__", None) == "transformers.integrations.moe"
        for name in _EXPERTS_FUNCTIONAL:
            function = getattr(F, name)
            yield F, name, function, function.__module__ == F.__name__

    def _found_around(self, prefix: str) -> Iterator[tuple[Any, str, Any, bool]]:
        """Likewise of what the model runs around its layers."""
        modeling = self._modeling
        for part in ("ForCausalLM", "RotaryEmbedding"):
            kind = getattr(modeling, f"{prefix}{part}")
            function = kind.forward
            yield kind, "forward", function, function.__qualname__ == f"{kind.__name__}.forward"
        yield nn.Embedding, "forward", nn.Embedding.forward, nn.Embedding.forward.__module__ == nn.Embedding.__module__
        masks = sys.modules["transformers.masking_utils"]
        for owner, name in ((modeling, _MASK), *((masks, name) for name in (_MASK, *_MASK_FUNCTIONS))):
            function = getattr(owner, name, None)  # other versions lack some
            yield owner, name, function, function is None or function.__module__ == masks.__name__
        losses = sys.modules["transformers.loss.loss_utils"]
        for name in ("ForCausalLMLoss", "fixed_cross_entropy"):
            function = getattr(losses, name)
            yield losses, name, function, function.__module__ == losses.__name__
        for name in ("cross_entropy", "embedding"):
            function = getattr(F, name)
            yield F, name, function, function.__module__ == F.__name__
        yield from adapters.functions_around()

    def is_own_loss(self, function: Any) -> bool:
        """Whether a function is transformers' loss of causal language models."""
        return function is sys.modules["transformers.loss.loss_utils"].ForCausalLMLoss

    def masks(self, config: Any) -> str | None:
        """The native name of the attention for which a model with this config makes masks now that native layers know:
        transformers' own for torch's, or the documents of packed rows; None for others."""
        made = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
        attention = self.attention(config)
        if attention == "packed":
            return attention if made is sys.modules["roundpipe.ops.packed_attention"].document_lengths else None
        own = getattr(made, "__module__", None) == "transformers.masking_utils"
        return attention if own and attention == "sdpa" else None

    def reason_against_around(self) -> str | None:
        """Why native parts around the layers would not do what this code does now; None if they would. Cheap."""
        return self.reason_against() or _replaced(self._functions_around)

    def reason_against(self) -> str | None:
        """Why native layers would not do what this code does now; None if they would. Cheap."""
        replaced = _replaced(self._functions)
        if replaced is not None:
            return replaced
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "hooks are registered for all modules"
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            return "backward hooks are registered for all modules"
        return None

    def attention(self, config: Any) -> str | None:
        """The native name of the attention that layers with this config use now; None if there is none."""
        eager = self._modeling.eager_attention_forward
        try:
            function = self._modeling.ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        except KeyError:
            return None
        packed = sys.modules.get("roundpipe.ops.packed_attention")
        if packed is not None and function is packed.packed_attention:
            return "packed"
        if function is self._sdpa:
            return None if self._has_sinks else "sdpa"  # which torch's attention does not know
        return "eager" if function is eager else None

    def experts(self, config: Any) -> str | None:
        """The native name of the way in which experts with this config compute now; None if there is none."""
        name = config._experts_implementation
        function = self._moe.ALL_EXPERTS_FUNCTIONS.get(name) if self._moe is not None else self
        if function is None:
            return "eager" if name in ("eager", None) else None
        return name if name in _EXPERTS and function is getattr(self._moe, _EXPERTS[name]) else None


def _replaced(functions: list[tuple[Any, str, Any, bool]]) -> str | None:
    for owner, name, function, original in functions:
        if not original or getattr(owner, name, None) is not function:
            return f"{owner.__name__}.{name} has been replaced"
    return None
