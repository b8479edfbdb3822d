"""What is encoded in a model."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import nn

from roundpipe import _core
from roundpipe.quantise.encoded_module import EncodedModule


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, or that of the module whose weights were encoded."""
    return module.plain_class if isinstance(module, EncodedModule) else type(module)


def part_names(module: nn.Module) -> set[str]:
    """The parameters of a module, not of those inside, that hold encoded ones."""
    return set(module.part_names()) if isinstance(module, EncodedModule) else set()


def decoded_parameters(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a model by name, encoded ones as their numbers, behind the others."""
    plain, encoded = split_parameters(model)
    return [*plain.items(), *((name, encoding.values(parts)) for name, (encoding, parts) in encoded.items())]


def count_parameters(model: nn.Module) -> int:
    """How many numbers the parameters of a model are; those of encoded ones count, not their codes."""
    plain, encoded = split_parameters(model)
    count = sum(math.prod(encoding.sizes(parts)) for encoding, parts in encoded.values())
    return count + sum(parameter.numel() for parameter in plain.values())


Encoded: TypeAlias = tuple[_core.Encoding, list[torch.Tensor]]
"""How a parameter is encoded, and its parts."""


def split_parameters(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Encoded]]:
    """The plain parameters of a model, and its encoded ones, by their names."""
    plain: dict[str, torch.Tensor] = dict(model.named_parameters())
    encoded = {
        name: (encoding, [plain.pop(name + suffix) for suffix in encoding.suffixes])
        for name, encoding in encodings_of(model).items()
    }
    return plain, encoded


def encodings_of(model: nn.Module) -> dict[str, _core.Encoding]:
    """By name, the encoded parameters of a model; the name is that without an encoding."""
    found: dict[str, _core.Encoding] = {}
    for path, module in model.named_modules():
        before = f"{path}." if path else ""
        if isinstance(module, EncodedModule):
            found |= {before + name: encoding for name, encoding in module.encodings.items()}
    return found
