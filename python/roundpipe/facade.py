"""What models in the pipeline have in common with the model that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from roundpipe.optimizer_context import in_optimizer_context

if TYPE_CHECKING:
    from roundpipe.stepping import StepGroup


def facade_in(model: Any) -> ModelFacade | None:
    """The model in the pipeline that `model` is, or that peft has put adapters into; None if there is none."""
    inner = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    if not isinstance(inner, ModelFacade):
        return None
    inner._follow_changes()
    return inner


class ModelFacade(nn.Module):
    """Stands for an original model: every attribute that is not in `_OWN` is read, written and deleted there.

    A subclass sets `_original_model` and `_step_group` without `nn.Module.__init__`, whose state is the original
    model's, and defines `synchronize` and `optim_parameters`.
    """

    # Names that are looked up here; all others belong to the original model.
    _OWN = frozenset(
        {
            "synchronize",
            "optim_parameters",
            "train",
            "eval",
            "requires_grad_",
            "state_dict",
            "load_state_dict",
            "zero_grad",
            "save_pretrained",
            "_original_model",
            "_step_group",
            "_follow_changes",
        }
    )

    _original_model: nn.Module
    _step_group: StepGroup

    def synchronize(self) -> None:
        raise NotImplementedError

    def _follow_changes(self) -> None:
        """Takes over that modules were put in or taken out, where that is possible."""

    def optim_parameters(self) -> Iterable[nn.Parameter]:
        raise NotImplementedError

    def __getattribute__(self, name: str) -> Any:
        if name in type(self)._OWN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        value = getattr(object.__getattribute__(self, "_original_model"), name)
        if not name.startswith("_") and isinstance(value, (nn.Module, torch.Tensor, MethodType)):
            # From here the user may reach parameters.
            object.__getattribute__(self, "_step_group").show_weights()
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._original_model), *type(self)._OWN})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._original_model!r})"

    def train(self, mode: bool = True) -> Self:
        """Sets training mode of the original model."""
        self._original_model.train(mode)
        return self

    def eval(self) -> Self:
        """Sets evaluation mode of the original model."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets `requires_grad` of the original model's parameters."""
        self._original_model.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, after everything that runs is done."""
        self.synchronize()
        return self._original_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, after everything that runs is done; the next step goes on from the loaded values."""
        self.synchronize()
        return self._original_model.load_state_dict(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's, for models of transformers and peft, after everything that runs is done."""
        self.synchronize()
        return self._original_model.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of `parameters()`; outside of `step_fn` also those that no step has consumed."""
        if in_optimizer_context():
            for parameter in self.optim_parameters():
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()
            return
        if self._step_group.is_fused and set_to_none:
            self._step_group.zero_fused_gradients()
            return
        self.synchronize()
        self._original_model.zero_grad(set_to_none)
