"""The modules and parameters that stay on the host in a model whose parts are in the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from roundpipe.model.facade import ModelFacade


def host_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields each module that runs on the host once: all modules except `RoundPipe`s and their contents."""
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
    """A value that changes when a parameter or module on the host is added, removed or replaced."""
    found: list[int] = []
    for module in host_modules(model):
        found.extend(map(id, module._parameters.values()))
        found.extend(map(id, module._modules.values()))
    return found
