"""Puts encoded parameters into a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.choice import Choice, choose
from roundpipe.quantise.linear import EncodedLinear
from roundpipe.quantise.stacked import encode_stack


def place_encoded(model: nn.Module, name: str, encoding: _core.Encoding, parts: Sequence[torch.Tensor]) -> None:
    """Replaces a parameter by an encoded one.

    Args:
        model: the weight's linear layer, or the module with the stack, is changed in place.
        name: of the parameter.
        encoding: its format and dtype.
        parts: what holds it, see `_core.encode`.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear):
        encode_stack(module, leaf, encoding, parts)
        return
    layer = EncodedLinear(encoding, parts, module.bias)
    layer.train(module.training)
    outer, _, last = path.rpartition(".")
    setattr(model.get_submodule(outer), last, layer)


def encode_weights(model: nn.Module, format: str, keep: Iterable[str] = ()) -> Choice:
    """Encodes the weights of a model in memory, in place, one after the other, and freezes all others.

    Args:
        model: not wrapped yet, such as transformers' `from_pretrained` returns it; on the host.
        format: "nf4", "nf4-double", "mxfp4" or "int8", see `roundpipe.from_pretrained`.
        keep: modules whose weights stay as they are.

    Returns:
        What was encoded, and why the rest was not.

    Raises:
        ValueError: the format or a name in `keep` is unknown, nothing is left to be encoded, or a weight has inf or
            NaN; weights before it are encoded then.
    """
    choice = choose(model, format, keep)
    for name in sorted(choice.encoded):
        weight = model.get_parameter(name).detach()
        try:
            parts = _core.encode(format, weight)
        except ValueError as error:
            raise ValueError(f"[quantise] {name}: {error}") from error
        place_encoded(model, name, _core.Encoding(format, weight.dtype), parts)
    model.requires_grad_(False)
    return choice
