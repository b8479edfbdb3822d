"""Layers written in Python, as the engine sees them.

The user's module is never touched while it trains: every device has a shell of it, a second tree of modules that
shares the code and the plain attributes but has parameters and buffers of its own, which the engine points at the
weights it has uploaded.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.recompute import LayerContext, layer_context
from roundpipe.values import Structure, split

_STATE = ("_parameters", "_buffers", "_modules")
_DEEPEST_ATTRIBUTE = 6


class PythonLayer:
    """One layer of a model: a module, which the engine runs through shells of it.

    Args:
        module: the user's module; any `nn.Module`.
        name: for messages.
        is_last: what it returns goes to no other layer.

    Raises:
        ValueError: the module, or one inside it, is a TorchScript module.
    """

    def __init__(self, module: nn.Module, name: str, is_last: bool = False) -> None:
        self.name = name
        self._is_last = is_last
        self._module = module
        self._modules = list(module.modules())
        for inner in self._modules:
            if isinstance(inner, torch.jit.ScriptModule):
                raise ValueError(
                    f"[RoundPipe] layer {name} holds a TorchScript module ({type(inner).__name__}), expected Python "
                    "modules; wrap the module it was scripted from"
                )
        self._contents = [self._content(inner) for inner in self._modules]

    @staticmethod
    def _content(module: nn.Module) -> tuple[Any, ...]:
        return (*module._parameters.values(), *module._buffers.values(), *module._modules.values())

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Distinct parameters by name."""
        return list(self._module.named_parameters())

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Distinct buffers by name."""
        return list(self._module.named_buffers())

    def mode_key(self) -> int:
        """Changes with the training flags of the modules inside.

        Raises:
            ValueError: a parameter, buffer or submodule was added, removed or replaced since the model was wrapped.
        """
        for module, content in zip(self._modules, self._contents, strict=True):
            now = self._content(module)
            if len(now) != len(content) or not all(map(operator.is_, now, content)):
                raise ValueError(
                    f"[RoundPipe] the parameters, buffers or submodules of {type(module).__name__} in layer "
                    f"{self.name} were added, removed or replaced after the model was wrapped; change the model "
                    "first, then wrap it (values may be changed at any time, in place)"
                )
        return hash(tuple([module.training for module in self._modules])) & 0x7FFF_FFFF_FFFF_FFFF

    def make_shell(self, device: str) -> DeviceShell:
        """A shell for the device that calls this."""
        return DeviceShell(self._module, torch.device(device), self._is_last)


class DeviceShell:
    """A layer on one device. `parameters` and `buffers` are empty tensors that the engine points at its memory."""

    def __init__(self, module: nn.Module, device: torch.device, is_last: bool) -> None:
        self._shadow = _Shadow(module, device)
        self._is_last = is_last
        self._module = self._shadow.root
        self.parameters = self._shadow.parameters
        self.buffers = self._shadow.buffers

    def refresh(self) -> None:
        """Takes over attributes of the user's modules that have changed."""
        self._shadow.refresh()

    def run(
        self, tensors: list[torch.Tensor], structure: Structure, context: LayerContext
    ) -> tuple[list[torch.Tensor], Structure]:
        """Calls the module and takes its result apart."""
        value = structure.join(tensors)
        with layer_context(context):
            output = self._module(*value[0], **value[1]) if structure.is_call else self._module(value)
        self._shadow.bring_back_buffers()
        parts = split(output)
        if not self._is_last:
            parts[1].check_open("forward")
        return parts


class _Shadow:
    """Builds a module tree over other tensors and keeps its attributes like the original's."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._originals = {id(module): module for module in root.modules()}
        self._modules: dict[int, nn.Module] = {}
        self._seen: dict[int, tuple[Any, ...]] = {}
        for parameter in dict(root.named_parameters()).values():
            leaf = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
            leaf.__dict__.update(parameter.__dict__)
            self.parameters.append(leaf)
            self._tensors[id(parameter)] = leaf
        for buffer in dict(root.named_buffers()).values():
            mine = torch.empty(0, dtype=buffer.dtype, device=device)
            self.buffers.append(mine)
            self._tensors[id(buffer)] = mine
        self.root = self._module(root)
        self._owned_buffers = [
            (module, name, buffer)
            for module in self._modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _module(self, original: nn.Module) -> nn.Module:
        """The shadow of a module of the tree, made when first asked for."""
        existing = self._modules.get(id(original))
        if existing is not None:
            return existing
        shadow: nn.Module = type(original).__new__(type(original))
        self._modules[id(original)] = shadow
        state = shadow.__dict__
        state["_parameters"] = self._mapped(original._parameters)
        state["_buffers"] = self._mapped(original._buffers)
        state["_modules"] = {}
        for name, child in original._modules.items():
            state["_modules"][name] = None if child is None else self._module(child)
        self._copy_attributes(original, shadow)
        return shadow

    def _mapped(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: None if tensor is None else self._tensors[id(tensor)] for name, tensor in tensors.items()}

    def _copy_attributes(self, original: nn.Module, shadow: nn.Module) -> None:
        attributes = {name: value for name, value in original.__dict__.items() if name not in _STATE}
        previous = {name for name in shadow.__dict__ if name not in _STATE}
        for name, value in attributes.items():
            if name == "_compiled_call_impl" and value is not None:
                # Compiled for the original; compile the same code for this tree.
                value = torch.compile(shadow._call_impl)
            shadow.__dict__[name] = self._remapped(value, 0)
        for name in previous - attributes.keys():
            if id(original) in self._seen:
                shadow.__dict__.pop(name)
        self._seen[id(original)] = tuple(original.__dict__.values())
        compiled = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and nothing is compiled without it
        if compiled is not None and isinstance(original, compiled.OptimizedModule):
            shadow._initialize()  # type: ignore[operator]

    def _remapped(self, value: Any, depth: int) -> Any:
        """`value` with modules and tensors of the tree replaced by their shadows; the same object if it has none."""
        if isinstance(value, nn.Module):
            return self._module(value) if id(value) in self._originals else value
        if isinstance(value, torch.Tensor):
            return self._tensors.get(id(value), value)
        if depth >= _DEEPEST_ATTRIBUTE:
            return value
        if isinstance(value, types.MethodType):
            target = self._remapped(value.__self__, depth + 1)
            return value if target is value.__self__ else types.MethodType(value.__func__, target)
        if type(value) is functools.partial:
            parts = [value.func, list(value.args), dict(value.keywords)]
            mapped = self._remapped(parts, depth + 1)
            return value if mapped is parts else functools.partial(mapped[0], *mapped[1], **mapped[2])
        if type(value) in (list, tuple, set):
            items = list(value)
            new_items = [self._remapped(item, depth + 1) for item in items]
            return value if all(map(operator.is_, items, new_items)) else type(value)(new_items)
        if type(value) is dict:
            new_values = {key: self._remapped(item, depth + 1) for key, item in value.items()}
            return value if all(map(operator.is_, value.values(), new_values.values())) else new_values
        return value

    def refresh(self) -> None:
        for key, original in self._originals.items():
            seen = self._seen[key]
            now = tuple(original.__dict__.values())
            if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                self._copy_attributes(original, self._modules[key])

    def bring_back_buffers(self) -> None:
        """Copies buffers that a forward has replaced by new tensors into the ones that the engine knows."""
        for module, name, buffer in self._owned_buffers:
            current = module._buffers.get(name)
            if current is buffer:
                continue
            if current is None or current.shape != buffer.shape or current.dtype != buffer.dtype:
                raise ValueError(
                    f"[forward] buffer '{name}' of {type(module).__name__} became "
                    f"{None if current is None else (tuple(current.shape), current.dtype)}, expected "
                    f"{(tuple(buffer.shape), buffer.dtype)} as when the model was wrapped; keep its shape and dtype"
                )
            with torch.no_grad():
                buffer.copy_(current)
            module._buffers[name] = buffer


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model: the children of a plain `nn.Sequential`, else the module itself."""
    if (
        isinstance(model, nn.Sequential)
        and type(model).forward is nn.Sequential.forward
        and "forward" not in vars(model)
    ):
        yield from ((name, module) for name, module in model._modules.items() if module is not None)
    else:
        yield type(model).__name__, model
