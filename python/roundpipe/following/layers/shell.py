"""Layers written in Python, in the form that the engine runs.

Training never touches the user's module. Every device has a shell of it: a second tree of modules that shares the code
and the plain attributes but has its own parameters and buffers, which the engine points at uploaded weights.
"""

from __future__ import annotations

import operator
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import nn

from roundpipe import _core
from roundpipe.following.layers.recompute import LayerContext, layer_context, may_save
from roundpipe.following.layers.shadow import Attributes, ShadowTree, attributes_of, seeing
from roundpipe.following.layers.values import Structure, split

# torch.nn.utils.parametrize.cached() has one cache for all threads, which nobody clears while any of them is inside.
# torch.compile traces with flags of the whole process, which code of other threads must not see meanwhile.
_one_at_a_time = threading.Lock()


def _describes(key: str, value: object) -> bool:
    # A layer knows its place in the model, but its computation does not depend on it.
    return key != "layer_idx" and type(value) in (bool, int, float, str, type(None))


def _uses_parametrize_cache(module: nn.Module) -> bool:
    # peft parametrizes the weights of experts again in each forward.
    return hasattr(module, "parametrizations") or type(module).__name__ == "ParamWrapper"


class _Compiling:
    """Whether any layer of this process is compiled; once one is, layers run one at a time."""

    met = False


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


@contextmanager
def holding_nothing() -> Iterator[None]:
    """Drops the tensors in the traceback frames of an error from a full device.

    The error is kept until the caller has seen it, and would otherwise keep these tensors as well.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise


class NativeForm(Protocol):
    """How the engine can run a layer without Python, as a passage says. What else it reads depends on the kind."""

    kind: str

    def config(self) -> Any:
        """For a call that is made now; None if Python has to run the layer."""


PassageMaker = Callable[[Any], _core.Passage | None]
"""Makes the passage of a layer's result through the native layers after it; None if there is none."""


class PythonLayer:
    """One layer of a model: a module that the engine runs in shells.

    Args:
        module: the user's module; any `nn.Module`.
        name: the layer's name in messages.
        is_last: whether this is the model's last layer, so that no other layer takes its result.
        native: the layer's native form, if it has one; this one then runs only what that cannot.
        passages: for a layer that native ones follow.

    Raises:
        ValueError: the module, or one inside it, is a TorchScript module.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        is_last: bool = False,
        native: NativeForm | None = None,
        passages: PassageMaker | None = None,
    ) -> None:
        self.name = name
        self.native = native
        self._passages = passages
        self._is_last = is_last
        self._module = module
        # A layer may follow modules that it does not own: their flags and parts count as well.
        self._modules = [*module.modules(), *getattr(module, "followed_modules", ())]
        for inner in self._modules:
            if isinstance(inner, torch.jit.ScriptModule):
                raise ValueError(
                    f"[RoundPipe] layer {name} holds a TorchScript module ({type(inner).__name__}), expected Python "
                    "modules; wrap the module it was scripted from"
                )
        # The engine recomputes a layer with buffers once its forward has finished, not as soon as its inputs arrive.
        self._order = [("recomputed after its forward", torch.zeros(1))] if may_save(module) else []
        self._contents = [self._content(inner) for inner in self._modules]
        self._attributes: Attributes = {}
        self._mode_key = 0
        self._snapshots: list[tuple[Any, ...]] = []

    @staticmethod
    def _content(module: nn.Module) -> tuple[Any, ...]:
        return (*module._parameters.values(), *module._buffers.values(), *module._modules.values())

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Distinct parameters by name."""
        return list(self._module.named_parameters())

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Distinct buffers by name."""
        return [*self._module.named_buffers(), *self._order]

    def kind(self) -> str:
        """Equal for layers that differ only in their weights: by classes, shapes and plain attributes."""
        shapes = [(name, p.shape, p.dtype, p.requires_grad) for name, p in (*self.parameters(), *self.buffers())]
        parts = [
            (type(module), *((key, value) for key, value in vars(module).items() if _describes(key, value)))
            for module in self._modules
        ]
        return str(hash((*shapes, *parts)))

    def mode_key(self) -> int:
        """A value that changes with the training flags of the modules inside.

        Raises:
            ValueError: a parameter, buffer or submodule was added, removed or replaced since the model was wrapped.
        """
        self._look()
        return self._mode_key

    def attributes(self) -> Attributes:
        """The attributes that shells use for a call that is made now."""
        self._look()
        return self._attributes

    def _look(self) -> None:
        """Records the modules' current state. Cheap if nothing has changed."""
        if self._snapshots and _core.modules_unchanged(self._modules, self._snapshots):
            return
        self._snapshots = []
        for module, content in zip(self._modules, self._contents, strict=True):
            now = self._content(module)
            if len(now) != len(content) or not all(map(operator.is_, now, content)):
                raise ValueError(
                    f"[RoundPipe] the parameters, buffers or submodules of {type(module).__name__} in layer "
                    f"{self.name} were added, removed or replaced after the model was wrapped; change the model "
                    "first, then wrap it (values may be changed at any time, in place)"
                )
        self._mode_key = hash(tuple([module.training for module in self._modules])) & 0x7FFF_FFFF_FFFF_FFFF
        before, self._attributes = self._attributes, attributes_of(self._modules, self._attributes)
        if self._attributes is not before:
            _Compiling.met |= any(map(_is_compiled, self._modules))
        self._snapshots = [
            (
                self._attributes[id(module)],
                *(module._parameters, dict(module._parameters)),
                *(module._buffers, dict(module._buffers)),
                *(module._modules, dict(module._modules)),
            )
            for module in self._modules
        ]

    def make_shell(self, device: str) -> DeviceShell:
        """Makes a shell for the device that calls this."""
        with seeing(self._attributes):
            return DeviceShell(self._module, torch.device(device), self._is_last, len(self._order), self._passages)


class DeviceShell:
    """A layer on one device. `parameters` and `buffers` are empty tensors that the engine points at its memory.

    Args:
        further_buffers: number of buffers that the layer has beside the module's.
        passages: makes the passage that begins with the layer's result.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        is_last: bool,
        further_buffers: int = 0,
        passages: PassageMaker | None = None,
    ) -> None:
        self._is_last = is_last
        self._passages = passages
        self._device = device
        self.parameters: list[nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        tensors: dict[int, torch.Tensor] = {}
        for parameter in module.parameters():
            leaf = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
            leaf.__dict__.update(parameter.__dict__)
            self.parameters.append(leaf)
            tensors[id(parameter)] = leaf
        for buffer in module.buffers():
            mine = torch.empty(0, dtype=buffer.dtype, device=device)
            self.buffers.append(mine)
            tensors[id(buffer)] = mine
        self.buffers.extend(torch.empty(0, device=device) for _ in range(further_buffers))
        self._alone = any(map(_uses_parametrize_cache, module.modules()))
        self._shadow = ShadowTree(module, tensors)
        self._module = self._shadow.root
        self._attributes: Attributes = {}

    def refresh(self, attributes: Attributes) -> None:
        """Takes over changed attributes of the user's modules."""
        self._attributes = attributes
        with seeing(attributes):
            self._shadow.refresh()

    def run(
        self, tensors: list[torch.Tensor], structure: Structure, context: LayerContext
    ) -> tuple[list[torch.Tensor], Structure, _core.Passage | Literal[False] | None]:
        """Calls the module and splits its result into tensors and structure, with the passage that it begins: False if
        it begins none this time, None if it never does."""
        value = structure.join(tensors)
        alone: AbstractContextManager[Any] = _one_at_a_time if self._alone or _Compiling.met else nullcontext()
        with seeing(self._attributes), layer_context(context, self._device), alone, holding_nothing():
            output = self._module(*value[0], **value[1]) if structure.is_call else self._module(value)
        self._shadow.bring_back_buffers()
        tensors, made = split(output)
        if not self._is_last:
            made.check_open("forward")
        return tensors, made, None if self._passages is None else self._passages(output) or False


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
