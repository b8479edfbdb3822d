"""What stays on the host of a model whose parts are in the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from roundpipe.model.facade import ModelFacade


def host_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that run on the host, each once: all but what is inside a `RoundPipe`, and these themselves."""
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen or isinstance(module, ModelFacade):
            continue
        seen.add(id(module))
        yield module
        waiting.extend(child for child in module._modules.values() if child is not None)


def contents_of(model: nn.Module) -> list[int]:
    """Changes when a parameter or module on the host is put in, taken out or replaced."""
    found: list[int] = []
    for module in host_modules(model):
        found.extend(map(id, module._parameters.values()))
        found.extend(map(id, module._modules.values()))
    return found
