"""Hooks registered on a model in the pipeline: they run around its calls, with whole batches, on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from roundpipe.model.facade import ModelFacade


"""The methods of `HasCallHooks`."""

_Hooks = OrderedDict[int, tuple[Callable[..., Any], bool, bool]]  # hook, with_kwargs, always_call


class HasCallHooks(nn.Module):
    """A model with hooks of its own, separate from the hooks of the modules that devices have shadows of."""

    _pre_hooks: _Hooks
    _after_hooks: _Hooks

    def register_forward_pre_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """As for any module: `hook` runs before each `model(...)` and may return other arguments."""
        return _register(self._pre_hooks, (hook, with_kwargs, False), prepend)

    def register_forward_hook(
        self,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """As for any module: `hook` runs after each `model(...)` with its merged outputs and may return others."""
        return _register(self._after_hooks, (hook, with_kwargs, always_call), prepend)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the backward runs in stages, on several devices."""
        _refuse("register_full_backward_hook")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see `register_full_backward_hook`."""
        _refuse("register_full_backward_pre_hook")

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see `register_full_backward_hook`."""
        _refuse("register_backward_hook")

    def call_with_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `self.forward(*args, **kwargs)` with the hooks around it."""
        if not self._pre_hooks and not self._after_hooks:
            return self.forward(*args, **kwargs)
        for hook, with_kwargs, _ in list(self._pre_hooks.values()):
            if with_kwargs:
                changed = hook(self, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else changed
            else:
                changed = hook(self, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        try:
            outputs = self.forward(*args, **kwargs)
        except BaseException:
            for hook, with_kwargs, always_call in list(self._after_hooks.values()):
                if always_call:
                    _ = hook(self, args, kwargs, None) if with_kwargs else hook(self, args, None)
            raise
        for hook, with_kwargs, _ in list(self._after_hooks.values()):
            changed = hook(self, args, kwargs, outputs) if with_kwargs else hook(self, args, outputs)
            outputs = outputs if changed is None else changed
        return outputs


def refuse_hooked(model: ModelFacade, where: str) -> None:
    """Raises ValueError if hooks are registered around calls: `where` never has whole outputs for them."""
    own = model.__dict__
    if own.get("_pre_hooks") or own.get("_after_hooks"):
        raise ValueError(
            f"[{where}] hooks are registered on the model, and {where} would not run them; expected model(...) and "
            "loss.backward(), hooks on modules inside the model, which run for each microbatch, or none"
        )


def refuse_hooks_of(module: nn.Module, what: str) -> None:
    """Raises ValueError if a module that the pipeline takes apart has its own hooks."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ValueError(
            f"[RoundPipe] {what} has hooks, which nothing would run, as the pipeline takes it apart; register them on "
            "the wrapped model, or on modules inside"
        )


def _register(hooks: _Hooks, entry: tuple[Callable[..., Any], bool, bool], prepend: bool) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = entry
    if prepend:
        hooks.move_to_end(handle.id, last=False)
    return handle


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"[RoundPipe] {name}: the backward of the whole model runs in stages, so nothing could call the hook; expected "
        "one on a module inside the model, or register_hook of an output"
    )
