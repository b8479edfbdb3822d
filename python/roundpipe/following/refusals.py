"""Refuses, before a model is followed or cut, code and weights that cannot be moved to devices."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from roundpipe.quantise.adapters import refuse_adapters

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def refuse_compiled(model: nn.Module, layers: Iterable[nn.Module] = ()) -> None:
    """Raises ValueError if a model, or a module around its layers, is compiled as a whole.

    Args:
        layers: modules that may be compiled, one by one.
    """
    frame = sys.modules.get("torch._dynamo.eval_frame")  # slow to import; without it, nothing is compiled
    kind = () if frame is None else frame.OptimizedModule
    inner = {id(layer) for layer in layers}
    around = [
        module
        for module in model.modules()
        if isinstance(module, kind)
        and (module is model or any(id(m) in inner for m in module.modules() if m is not module))
    ]
    around = [module for module in around if id(module) not in inner]
    if around or model._compiled_call_impl is not None:
        name = next((name for name, module in model.named_modules() if around and module is around[0]), "")
        raise ValueError(
            f"[wrap_model_to_roundpipe] {f'its module {name}' if name else 'the model'} is compiled as a whole, "
            "expected a plain one, since its layers run on different devices; compile each layer before wrapping: "
            "for layer in layers: layer.compile()"
        )


def left_out_at_random(model: nn.Module) -> str | None:
    """The name and value of the setting that makes a model skip layers at random; None if there is none."""
    built_in = [vars(module)["layerdrop"] for module in model.modules() if "layerdrop" in vars(module)]
    if built_in:
        return f"layerdrop = {max(built_in)}" if max(built_in) > 0 else None
    options = vars(getattr(model, "config", model))
    used = {name: value for name, value in options.items() if name.endswith("layerdrop") and value}
    return next((f"{name} = {value}" for name, value in used.items()), None)


LEAST_BYTES = 1 << 20
"""A smaller model becomes a single layer without a warning."""


def warn_single_layer(model: nn.Module) -> None:
    """Warns if a model that holds lists of layers is about to become a single layer."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    lists = [
        m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1 and any(True for _ in m.parameters())
    ]
    if lists and size >= LEAST_BYTES:
        warnings.warn(
            f"[RoundPipe] {type(model).__name__} becomes a single layer of {size} bytes: each device has to hold all "
            "of its weights, gradients and activations at once, and devices share nothing but the batch; "
            "wrap_model_to_roundpipe makes each layer inside it a layer of the pipeline",
            stacklevel=4,
        )


def warn_batch_norm(name: str, parts: Iterable[nn.Module]) -> None:
    """Warns if a module that runs several microbatches normalises over the batch's rows."""
    # A part of a followed model has its code, such as that of a tower, but not its modules.
    inside = (m for part in parts for each in part.modules() for m in (each, *getattr(each, "followed_modules", ())))
    norms = (m for m in inside if isinstance(m, nn.modules.batchnorm._BatchNorm))
    kind = min((type(norm).__name__ for norm in norms), default=None)
    if kind is not None:
        warnings.warn(
            f"[RoundPipe] {name} has {kind}, which in training mode normalises over the rows of a microbatch, not of "
            "the batch; set num_microbatch=1 in model_run_config to compute what the plain model does",
            stacklevel=4,
        )


def refuse_weights(model: nn.Module) -> None:
    """Raises ValueError if a parameter or buffer is not a plain tensor, as in torchao and bitsandbytes.

    A layer's weights move as one flat block of plain numbers, which would lose the meaning of such a tensor.
    """
    refuse_adapters(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        kinds = type(tensor), type(tensor.data)
        odd = next((kind for kind in kinds if kind not in _PLAIN), None)
        if odd is not None or hasattr(tensor, "quant_state"):
            kind = odd or type(tensor)
            raise ValueError(
                f"[wrap_model_to_roundpipe] '{name}' is a {kind.__module__}.{kind.__name__}, expected a plain tensor: "
                "weights of torchao, bitsandbytes or torch.distributed cannot be cut into blocks and moved; load the "
                "model without quantization_config, in bfloat16"
            )
