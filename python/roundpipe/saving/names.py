"""The names of what a model's checkpoint holds, as `state_dict` has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.model.facade import ModelFacade
from roundpipe.model.published_attributes import source_of_names

_PREFIX = "base_model.model."  # of names in a folder of peft
# What peft leaves out of a name when it saves an adapter.
_ADAPTER = r"(\.modules_to_save)?\.{name}(?=\.|$)"


@dataclass
class ModelNames:
    """A model's parameters and persistent buffers by name. A tied parameter counts once, under its first name.

    Attributes:
        parameters: every parameter.
        buffers: every persistent buffer.
        outside: names of frozen parameters that a checkpoint leaves out, since they are those of another folder: the
            base under adapters, and parameters in mapped files.
        in_file: the names in weight files that differ from the model's, by the model's: those of adapters.
        adapter: the name of the adapter that is trained; None if the model has none.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    in_file: dict[str, str] = field(default_factory=dict)
    adapter: str | None = None

    def core(self) -> _core.ModelNames:
        """The same for the engine."""
        return _core.ModelNames(list(self.parameters.items()), list(self.buffers.items()), self.outside, self.in_file)

    def by_id(self) -> dict[int, str]:
        """The name of each parameter, by its id."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def file_name(self, name: str) -> str:
        """The name of a parameter or buffer in the weight files."""
        return self.in_file.get(name, name)


def names_of(model: ModelFacade) -> ModelNames:
    """Names the contents of a wrapped model. Reads no values and waits for nothing."""
    names = ModelNames()
    seen: set[int] = set()
    for name, parameter in model._step_group.models.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            names.parameters[name] = parameter
    source = source_of_names(model)
    for path, module in source.named_modules(remove_duplicate=False):
        for buffer_name, buffer in module._buffers.items():
            if buffer is None or buffer_name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            names.buffers[f"{path}.{buffer_name}" if path else buffer_name] = buffer
    names.adapter = _adapter_of(source)
    frozen = [(name, parameter) for name, parameter in names.parameters.items() if not parameter.requires_grad]
    names.outside = {name for name, parameter in frozen if names.adapter is not None or _core.is_mapped(parameter)}
    if names.adapter is not None:
        pattern = re.compile(_ADAPTER.format(name=re.escape(names.adapter)))
        for name in [*names.parameters, *names.buffers]:
            if name not in names.outside and (shorter := pattern.sub("", name)) != name:
                # Without it where peft has wrapped the model in the pipeline, not the other way round.
                names.in_file[name] = _PREFIX + shorter.removeprefix(_PREFIX)
        names.outside |= {name for name in names.buffers if name not in names.in_file}
    return names


def _adapter_of(source: Any) -> str | None:
    if not getattr(source, "peft_config", None):
        return None
    active = getattr(source, "active_adapter", None)
    if callable(active):
        active = active()
    return active if isinstance(active, str) else next(iter(source.peft_config))
