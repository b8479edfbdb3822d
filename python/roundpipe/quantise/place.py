"""Puts encoded parameters into a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.choice import Choice, choose
from roundpipe.quantise.encoded_module import EncodedModule
from roundpipe.quantise.linear import EncodedLinear
from roundpipe.quantise.stacked import class_for


def place_encoded(
    model: nn.Module, name: str, encoding: _core.Encoding, parts: Sequence[torch.Tensor]
) -> EncodedModule:
    """Replaces a parameter by an encoded one. The module stays the same object, whoever else uses it.

    Args:
        model: is changed in place.
        name: of the parameter.
        encoding: its format and dtype.
        parts: what holds it, see `_core.encode`.

    Returns:
        The module that has the parameter.
    """
    path, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if not isinstance(module, EncodedModule):
        module.encodings = {}
        module.__class__ = EncodedLinear if type(module) is nn.Linear else class_for(type(module))
    module.encodings = {**module.encodings, leaf: encoding}
    del module._parameters[leaf]
    for suffix, part in zip(encoding.suffixes, parts, strict=True):
        module._parameters[leaf + suffix] = nn.Parameter(part, requires_grad=False)
    encoded: EncodedModule = module
    return encoded


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
