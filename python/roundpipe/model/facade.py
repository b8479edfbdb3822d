"""The common base of models in the pipeline: each stands for an original model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from roundpipe import _core
from roundpipe.distributed.joint_training import JointTraining, join
from roundpipe.following.layers.adapters import without_adapters
from roundpipe.model import forward as model_forward
from roundpipe.model.host_resident import HostResident
from roundpipe.model.own_storages import with_own_storages
from roundpipe.model.published_attributes import COMMON, source_of_names, standing_for
from roundpipe.model.replacing import REPLACING, guarded, refuse_compiling
from roundpipe.model.step.optimizer_context import in_optimizer_context

if TYPE_CHECKING:
    from roundpipe.model.step.fused_optimizer import BoundOptimizer, Formats
    from roundpipe.model.step.fused_steps import FusedSteps
    from roundpipe.model.step.torch_steps import TorchSteps


def facade_in(model: Any) -> ModelFacade | None:
    """Returns `model` if it is a model in the pipeline, or the one inside it if peft wrapped that one; else None."""
    inner = without_adapters(model)
    if not isinstance(inner, ModelFacade):
        return None
    inner._follow_changes()
    return inner


@contextmanager
def _values_in_place() -> Iterator[None]:
    """Makes torch load values into the existing parameters, even if a program or a device's module has told it to swap
    parameters: the engine holds them, and torch does not swap tensors that are held elsewhere."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _own_names(facade: type[ModelFacade]) -> frozenset[str]:
    """Names that `facade` and its bases below `nn.Module` define or declare, and the names of a replaced forward."""
    names = set(model_forward.NAMES)
    for base in facade.__mro__[: facade.__mro__.index(nn.Module)]:
        names |= {*vars(base), *inspect.get_annotations(base)}
    return frozenset(name for name in names if not (name.startswith("__") and name.endswith("__")))


class ModelFacade(HostResident):
    """Stands for an original model: every attribute that is not in `_OWN` is read, written and deleted there.

    A subclass sets the attributes below without `nn.Module.__init__`, whose state is the original model's, and defines
    `synchronize` and `optim_parameters`.
    """

    # Names that are looked up here, see `_own_names`. All others belong to the original model.
    _OWN: ClassVar[frozenset[str]]

    # Names that are looked up in the original model first; if it does not have them, they are made here.
    _FALLBACK = COMMON

    _original_model: nn.Module
    _wrapped: nn.Module
    _name: str
    _optim_dtype: torch.dtype | None
    _step_group: TorchSteps | FusedSteps
    _joint: JointTraining | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._OWN = _own_names(cls)

    def set_original_model(self, original_model: nn.Module) -> None:
        """Makes attributes read, written and deleted here those of `original_model`; the pipeline stays the same."""
        if not isinstance(original_model, nn.Module):
            raise ValueError(f"[set_original_model] got a {type(original_model).__name__}, expected an nn.Module")
        object.__getattribute__(self, "__dict__")["_original_model"] = original_model

    def _bind_optimizer(self, optimizer: BoundOptimizer, formats: Formats) -> FusedSteps:
        """Makes `optimizer` update the model in place from now on; see `FusedSteps`."""
        self._claim_steps()
        steps = self._step_group.bind(optimizer, formats)
        own = object.__getattribute__(self, "__dict__")
        own["_step_group"] = steps
        if steps.models.host_pipeline is not None and "_host_front" not in own:
            own["_host_front"] = _core.Front(steps.models.host_pipeline)
        return steps

    def _claim_steps(self) -> None:
        """Makes this the model by which its parameters are stepped.

        Raises:
            ValueError: another model that lives steps one of them, for example a larger one that this one is part of.
        """
        own = object.__getattribute__(self, "__dict__")
        if "_step_claim" not in own:
            own["_step_claim"] = _core.StepClaim(self._name, self._step_group.models.named_parameters())

    def _join_nodes(self, process_group: Any, layers: int | None) -> None:
        """Joins the nodes that train the model, if there are several; see `RoundPipe`."""
        kind = type(self._original_model).__name__
        joint = join(process_group, self._name, kind, layers, source_of_names(self))
        self._take_joint(joint)

    def _take_joint(self, joint: JointTraining | None) -> None:
        """Trains the model jointly from now on, unless it is so already."""
        if self._joint is None:
            object.__getattribute__(self, "__dict__")["_joint"] = self._step_group.joint = joint

    def synchronize(self) -> None:
        raise NotImplementedError

    def _may_replace(self) -> bool:
        """Whether the pipeline can still take over replaced parameters."""
        return False

    def _follow_changes(self) -> None:
        """Takes over modules that were added or removed, if that is possible."""

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
            # For example Module.npu, which a backend outside torch adds beside Module.cuda.
            return lambda device=None: self._stay(name)
        if not name.startswith("_") and isinstance(value, (nn.Module, torch.Tensor, MethodType, list)):
            # From here on, the user may hold parameters.
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
        """Sets the original model to training mode."""
        for model in standing_for(self):
            model.train(mode)
        return self

    def eval(self) -> Self:
        """Sets the original model to evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets `requires_grad` on the original model's parameters."""
        for model in standing_for(self):
            model.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's state dict, after all running work has finished. Each tensor is in the memory of its
        parameter and, for code that takes tensors of one storage for one tensor, in a storage of its own."""
        self._step_group.synchronize()
        return with_own_storages(self._original_model.state_dict(*args, **kwargs))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads into the original model after all running work has finished; the next step starts from these values."""
        self._step_group.synchronize()
        with _values_in_place():
            return self._original_model.load_state_dict(*args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the original model's method (transformers and peft) after all running work has finished."""
        self._step_group.synchronize()
        return self._original_model.save_pretrained(*args, **kwargs)  # type: ignore[operator]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of `parameters()`; outside `step_fn`, also the gradients that no step has consumed."""
        if in_optimizer_context():
            self._step_group.clear_copies(set_to_none)
            return
        self._step_group.zero_gradients(self._original_model, set_to_none)


ModelFacade._OWN = _own_names(ModelFacade)
