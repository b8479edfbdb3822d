"""What models in the pipeline have in common with the model that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from roundpipe.layers.adapters import without_adapters
from roundpipe.model import forward as model_forward
from roundpipe.model.host_resident import HostResident
from roundpipe.model.published_attributes import COMMON, standing_for
from roundpipe.model.replacing import REPLACING, guarded, refuse_compiling
from roundpipe.step.optimizer_context import in_optimizer_context

if TYPE_CHECKING:
    from roundpipe.step.group import StepGroup


def facade_in(model: Any) -> ModelFacade | None:
    """The model in the pipeline that `model` is, or that peft has put adapters into; None if there is none."""
    inner = without_adapters(model)
    if not isinstance(inner, ModelFacade):
        return None
    inner._follow_changes()
    return inner


@contextmanager
def _values_in_place() -> Iterator[None]:
    """torch loads values into the parameters that are there, also where a program or a device's module has told it to
    swap them for others: the engine holds them, and torch does not swap what somebody holds."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _own_names(facade: type[ModelFacade]) -> frozenset[str]:
    """Names that `facade` and its bases below `nn.Module` define or declare, and those of a replaced forward."""
    names = set(model_forward.NAMES)
    for base in facade.__mro__[: facade.__mro__.index(nn.Module)]:
        names |= {*vars(base), *inspect.get_annotations(base)}
    return frozenset(name for name in names if not (name.startswith("__") and name.endswith("__")))


class ModelFacade(HostResident):
    """Stands for an original model: every attribute that is not in `_OWN` is read, written and deleted there.

    A subclass sets the attributes below without `nn.Module.__init__`, whose state is the original model's, and defines
    `synchronize` and `optim_parameters`.
    """

    # Names that are looked up here, see `_own_names`; all others belong to the original model.
    _OWN: ClassVar[frozenset[str]]

    # Names that are looked up in the original model first, and made here where it has none of them.
    _FALLBACK = COMMON

    _original_model: nn.Module
    _wrapped: nn.Module
    _name: str
    _optim_dtype: torch.dtype | None
    _step_group: StepGroup

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._OWN = _own_names(cls)

    def set_original_model(self, original_model: nn.Module) -> None:
        """Makes attributes read, written and deleted here those of `original_model`; what runs stays the same."""
        if not isinstance(original_model, nn.Module):
            raise ValueError(f"[set_original_model] got a {type(original_model).__name__}, expected an nn.Module")
        object.__getattribute__(self, "__dict__")["_original_model"] = original_model

    def synchronize(self) -> None:
        raise NotImplementedError

    def _may_replace(self) -> bool:
        """Whether parameters that are replaced now are taken over."""
        return False

    def _follow_changes(self) -> None:
        """Takes over that modules were put in or taken out, where that is possible."""

    def optim_parameters(self) -> Iterable[nn.Parameter]:
        raise NotImplementedError

    def __getattribute__(self, name: str) -> Any:
        if name == "forward":
            own = object.__getattribute__(self, "__dict__")
            return own[name] if name in own else model_forward.ModelForward(self, object.__getattribute__(self, name))
        if name in type(self)._OWN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        try:
            value = getattr(object.__getattribute__(self, "_original_model"), name)
        except AttributeError:
            if name not in type(self)._FALLBACK:
                raise
            value = type(self)._FALLBACK[name](self)
        if name in REPLACING:
            value = guarded(name, value, self._may_replace)
        elif name == "compile":
            return refuse_compiling
        elif name == torch._C._get_privateuse1_backend_name() and isinstance(value, MethodType):
            # Such as Module.npu, which a backend outside of torch adds beside Module.cuda.
            return lambda device=None: self._stay(name)
        if not name.startswith("_") and isinstance(value, (nn.Module, torch.Tensor, MethodType, list)):
            # From here the user may reach parameters.
            group = object.__getattribute__(self, "_step_group")
            group.show_weights()
            group.note_reach()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in model_forward.NAMES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._original_model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in model_forward.NAMES:
            object.__delattr__(self, name)
        else:
            delattr(self._original_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._original_model), *type(self)._OWN})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._original_model!r})"

    def train(self, mode: bool = True) -> Self:
        """Sets training mode of the original model."""
        for model in standing_for(self):
            model.train(mode)
        return self

    def eval(self) -> Self:
        """Sets evaluation mode of the original model."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets `requires_grad` of the original model's parameters."""
        for model in standing_for(self):
            model.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, after everything that runs is done."""
        self._step_group.synchronize()
        return self._original_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, after everything that runs is done; the next step goes on from the loaded values."""
        self._step_group.synchronize()
        with _values_in_place():
            return self._original_model.load_state_dict(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, for models of transformers and peft, after everything that runs is done."""
        self._step_group.synchronize()
        return self._original_model.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of `parameters()`; outside of `step_fn` also those that no step has consumed."""
        if in_optimizer_context():
            self._step_group.clear_copies(set_to_none)
            return
        if self._step_group.is_fused and set_to_none:
            self._step_group.zero_fused_gradients()
            return
        self._step_group.zero_gradients(set_to_none)
        self._original_model.zero_grad(set_to_none)


ModelFacade._OWN = _own_names(ModelFacade)
