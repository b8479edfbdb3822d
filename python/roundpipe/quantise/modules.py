"""What is encoded in a model."""

from __future__ import annotations

import math

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
    encodings, parameters = encodings_of(model), dict(model.named_parameters())
    parts = {name: [parameters.pop(name + suffix) for suffix in each.suffixes] for name, each in encodings.items()}
    return [*parameters.items(), *((name, each.values(parts[name])) for name, each in encodings.items())]


def count_parameters(model: nn.Module) -> int:
    """How many numbers the parameters of a model are; those of encoded ones count, not their codes."""
    parameters, count = dict(model.named_parameters()), 0
    for name, encoding in encodings_of(model).items():
        parts = [parameters.pop(name + suffix) for suffix in encoding.suffixes]
        count += math.prod(encoding.sizes(parts))
    return count + sum(parameter.numel() for parameter in parameters.values())


def encodings_of(model: nn.Module) -> dict[str, _core.Encoding]:
    """By name, the encoded parameters of a model; the name is that without an encoding."""
    found: dict[str, _core.Encoding] = {}
    for path, module in model.named_modules():
        before = f"{path}." if path else ""
        if isinstance(module, EncodedModule):
            found |= {before + name: encoding for name, encoding in module.encodings.items()}
    return found
