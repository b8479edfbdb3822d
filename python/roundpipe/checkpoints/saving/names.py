"""The names of what a model's checkpoint holds, as `state_dict` has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.model.facade import ModelFacade
from roundpipe.model.published_attributes import source_of_names

_PREFIX = "base_model.model."  # of names in a folder of peft
# What peft leaves out of a name when it saves an adapter.
_ADAPTER = r"(\.modules_to_save)?\.{name}(?=\.|$)"


def names_of(model: ModelFacade) -> _core.ModelNames:
    """Names the contents of a wrapped model. Reads no values and waits for nothing."""
    source = source_of_names(model)
    parameters = model._step_group.models.named_parameters()
    buffers = list(_persistent_buffers(source))
    adapter = adapter_of(source)
    in_file: dict[str, str] | None = None
    if adapter is not None:
        pattern = re.compile(_ADAPTER.format(name=re.escape(adapter)))
        shorter = {name: pattern.sub("", name) for name, _ in [*parameters, *buffers]}
        # Without it where peft has wrapped the model in the pipeline, not the other way round.
        in_file = {name: _PREFIX + cut.removeprefix(_PREFIX) for name, cut in shorter.items() if cut != name}
    return _core.ModelNames(parameters, buffers, in_file)


def _persistent_buffers(source: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in source.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def adapter_of(source: Any) -> str | None:
    """The name of the adapter that is trained; None if the model has none."""
    if not getattr(source, "peft_config", None):
        return None
    active = getattr(source, "active_adapter", None)
    if callable(active):
        active = active()
    return active if isinstance(active, str) else next(iter(source.peft_config))
