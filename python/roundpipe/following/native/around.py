"""The parts of a followed model around its layers, as the engine can run them: the embedding, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.following.layers.adapters import without_adapters
from roundpipe.following.layers.values import Structure
from roundpipe.following.native import adapters
from roundpipe.following.native.code import Code, modeling_of
from roundpipe.following.native.decoder import HOOKS, instance_reason
from roundpipe.following.parts import Part
from roundpipe.following.skeleton import FollowedModel
from roundpipe.ops.functional import Arithmetic

# Kinds of rotary positions whose frequencies never change.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
_FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")


class Around:
    """The modules around a model's layers: a causal language model of a family that native layers stand for.

    Args:
        prefix: of the family's class names.

    Attributes:
        causal: the whole model, without what PEFT puts around it.
        base: the model in it that calls the layers.
        outer: what PEFT puts around it.
    """

    def __init__(self, followed: FollowedModel, prefix: str) -> None:
        self.causal: Any = without_adapters(followed.model)
        self.outer = adapters.around(followed.model)
        self.base: Any = getattr(self.causal, "model", None)
        self.followed = followed
        self.prefix = prefix
        self.modeling = modeling_of(prefix)

    def reason_against(self) -> str | None:
        """Why the family's own forward would not run around the layers now; None if it would."""
        for module, name in ((self.causal, "ForCausalLM"), (self.base, "Model")):
            expected = getattr(self.modeling, self.prefix + name)
            if type(module) is not expected:
                return f"the model is {type(module).__name__}, not {expected.__name__}"
            reason = instance_reason(module, set(), set())
            if reason is not None:
                return f"{expected.__name__} {reason}"
        for module in self.outer:
            reason = instance_reason(module, set(), set())
            if reason is not None:
                return f"{type(module).__name__} {reason}"
        reason = adapters.reason_against_around(self.outer)
        if reason is not None:
            return reason
        config = self.base.config
        if self.causal.config is not config or getattr(config, "return_dict", True) is not True:
            return "the model's config is another one, or return_dict is off"
        for flag in _FLAGS:
            if getattr(config, flag, False):
                return f"{flag} is on"
        if list(self.base.layers) != self.followed.layers or config.num_hidden_layers != len(self.followed.layers):
            return "not all of its layers are called"
        if self.followed.order != list(range(len(self.followed.layers))):
            return "its layers are not called one after the other"
        return None


class _NativePart:
    """A part of the model that the engine can run natively.

    Attributes:
        kind: what it is, for the engine.
        reason: why its latest look found that it cannot run natively; None if it can.
    """

    kind: str

    def __init__(self, around: Around, code: Code, modules: Sequence[nn.Module]) -> None:
        self.around = around
        self.reason: str | None = None
        self._code = code
        self._modules = [*around.outer, around.causal, around.base, *modules]
        self._snapshots: list[tuple[Any, ...]] = []
        self._config: Any = None

    def config(self) -> Any:
        """The configuration for a call that is made now; None if Python has to run the part. Cheap if nothing has
        changed; then it is the same object."""
        if not self._snapshots or not _core.modules_unchanged(self._modules, self._snapshots):
            config = vars(self.around.base.config)
            self._snapshots = [
                (
                    *(dict(vars(module)), config, dict(config)),
                    *(part for name in HOOKS for part in (vars(module)[name], dict(vars(module)[name]))),
                )
                for module in self._modules
            ]
            self.reason = self.around.reason_against() or self._reason_against()
            self._config = self._made(self.around.followed.arithmetic) if self.reason is None else None
        return self._config

    def exact_config(self) -> Any:
        """Likewise, in exact arithmetic."""
        return None if self.config() is None else self._made("exact")

    def reason_now(self) -> str | None:
        """Why it would not run natively in a call that is made now; None if it would."""
        self.config()
        return self.reason or self._code.reason_against_around()

    def _reason_against(self) -> str | None:
        raise NotImplementedError

    def _made(self, arithmetic: Arithmetic) -> Any:
        raise NotImplementedError


def _place(tensors: Sequence[Any], wanted: Any) -> int | None:
    return next((place for place, each in enumerate(tensors) if each is wanted), None)


class NativeHead(_NativePart):
    """The last norm, the head and the loss.

    Attributes:
        norm: the place of the norm's weight among the part's parameters; likewise `weight` and `bias` of the head.
        structures: of the model's outputs, by whether they have a loss and whether they have logits.
    """

    kind = "head"

    def __init__(self, around: Around, code: Code, part: Part) -> None:
        self._norm: Any = around.base.norm
        self._head: Any = around.causal.get_output_embeddings()
        super().__init__(around, code, [self._norm, self._head])
        self.structures: dict[tuple[bool, bool], Structure] = {}
        parameters = [parameter for _, parameter in part.named_parameters()]
        self.norm = _place(parameters, self._norm.weight)
        self.weight = _place(parameters, self._head.weight)
        self.bias = None if self._head.bias is None else _place(parameters, self._head.bias)
        self._is_whole = None not in (self.norm, self.weight) and (self._head.bias is None or self.bias is not None)

    def _reason_against(self) -> str | None:
        around = self.around
        expected = ((self._norm, getattr(around.modeling, f"{around.prefix}RMSNorm")), (self._head, nn.Linear))
        for module, kind in expected:
            if type(module) is not kind:
                return f"it has a {type(module).__name__}, not a {kind.__name__}"
            reason = instance_reason(module, {"weight", "bias"}, set())
            if reason is not None:
                return f"its {kind.__name__} {reason}"
        if around.base.norm is not self._norm or around.causal.get_output_embeddings() is not self._head:
            return "its modules have been replaced"
        if not self._is_whole:
            return "its parameters are used elsewhere as well"
        if "_loss_function" in vars(around.causal) or not self._code.is_own_loss(around.causal.loss_function):
            return "the model has another loss function"
        sizes = {around.causal.config.vocab_size, around.causal.vocab_size, self._head.out_features}
        return None if len(sizes) == 1 else "the vocabulary's size is not that of the head"

    def tensors_now(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]:
        """The weight of the norm, and the weight and bias of the head."""
        return self._norm.weight, self._head.weight, self._head.bias

    def _made(self, arithmetic: Arithmetic) -> _core.HeadConfig:
        eps, in_float = self._norm.variance_epsilon, self.around.prefix == "GptOss"
        return _core.HeadConfig(norm_eps=eps, scales_norm_in_float=in_float, arithmetic=arithmetic)


class NativeEmbedding(_NativePart):
    """The embedding, the masks and the positions.

    Attributes:
        weight: the place of the embedding's weight among the part's parameters.
        frequencies: the place of the rotary frequencies among its buffers.
        windows: of each layer's packed attention, 0 for none; known once its documents have been compared.
    """

    kind = "embedding"

    def __init__(self, around: Around, code: Code, part: Part) -> None:
        self._embedding: Any = around.base.embed_tokens
        self._rotary: Any = around.base.rotary_emb
        super().__init__(around, code, [self._embedding, self._rotary])
        self.weight = _place([parameter for _, parameter in part.named_parameters()], self._embedding.weight)
        self.frequencies = _place([buffer for _, buffer in part.named_buffers()], self._rotary.inv_freq)
        self.windows: tuple[int, ...] = ()
        self._compared: tuple[Any, ...] | None = None

    def _reason_against(self) -> str | None:
        around, embedding, rotary = self.around, self._embedding, self._rotary
        expected = ((embedding, nn.Embedding), (rotary, getattr(around.modeling, f"{around.prefix}RotaryEmbedding")))
        for module, kind in expected:
            if type(module) is not kind:
                return f"it has a {type(module).__name__}, not a {kind.__name__}"
            buffers = {"inv_freq", "original_inv_freq"} if module is rotary else set()
            reason = instance_reason(module, {"weight"}, buffers)
            if reason is not None:
                return f"its {kind.__name__} {reason}"
        if around.base.embed_tokens is not embedding or around.base.rotary_emb is not rotary:
            return "its modules have been replaced"
        if self.weight is None or self.frequencies is None:
            return "its parameters are used elsewhere as well"
        if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
            return "its embedding has max_norm, scale_grad_by_freq or sparse"
        if rotary.rope_type not in _FIXED_ROPES:
            return f"rotary positions of the kind {rotary.rope_type!r} depend on the batch"
        return None

    @property
    def masks(self) -> str | None:
        """The native name of the attention for which it would make masks now; None if it cannot."""
        return self._code.masks(self.around.base.config)

    def reason_now(self) -> str | None:
        """Likewise, also for its masks."""
        config = self.around.base.config
        attention, window, kinds = self._masks_now()
        if attention is None:
            return f"masks for the attention {config._attn_implementation!r} have no native form"
        if attention == "sdpa" and (window is not None or set(kinds) - {"full_attention"}):
            return "layers have a sliding window"
        if self._compared not in (None, (attention, window, kinds)):
            return "its masks are others than when the model was wrapped"
        return super().reason_now()

    def note_compared(self, windows: tuple[int, ...]) -> None:
        """Its masks, as they are now, have been compared with the model's own, which have these windows."""
        self.windows, self._compared = windows, self._masks_now()

    def _masks_now(self) -> tuple[str | None, int | None, tuple[str, ...]]:
        config = self.around.base.config
        kinds = tuple(getattr(config, "layer_types", None) or ())
        return self.masks, getattr(config, "sliding_window", None), kinds

    def tensors_now(self) -> tuple[nn.Parameter, torch.Tensor]:
        """The embedding's weight and the rotary frequencies."""
        return self._embedding.weight, self._rotary.inv_freq

    def _made(self, arithmetic: Arithmetic) -> _core.EmbeddingConfig:
        padding = self._embedding.padding_idx
        return _core.EmbeddingConfig(
            padding_index=-1 if padding is None else padding,
            rotary_scaling=self._rotary.attention_scaling,
            rotary_halves=self.around.prefix == "GptOss",
            arithmetic=arithmetic,
        )
