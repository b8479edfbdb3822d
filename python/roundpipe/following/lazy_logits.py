"""Logits that are not computed yet, in the form in which a loss can compute them in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from roundpipe.following.placeholder import device_of

if TYPE_CHECKING:
    from roundpipe.ops.functional import LogitStep

_NAMES: dict[Any, str] = {
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "multiply"),
    **dict.fromkeys((torch.div, torch.Tensor.div, torch.Tensor.__truediv__), "divide"),
    **dict.fromkeys((torch.tanh, torch.Tensor.tanh, F.tanh), "tanh"),
    **dict.fromkeys((torch.Tensor.float, torch.Tensor.to, torch.Tensor.type), "cast"),
}


class LazyLogits(torch.Tensor):
    """Stands for `steps(hidden @ weight.T + bias)`. Element-wise steps are recorded; any other use computes it.

    Attributes:
        hidden: [..., width].
        weight: [vocabulary, width].
        bias: [vocabulary] or None.
        steps: the model's operations on the logits so far, in order.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[LogitStep, ...]

    @staticmethod
    def make(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, steps: tuple[LogitStep, ...] = ()
    ) -> LazyLogits:
        """Makes logits without computing them."""
        dtype = hidden.dtype
        if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        if "float32" in steps:
            dtype = torch.float32
        # One element, expanded: code that counts the bytes of tensors without data must not count these.
        meta = torch.empty((), dtype=dtype, device="meta").expand(*hidden.shape[:-1], weight.shape[0])
        made: LazyLogits = torch.Tensor._make_subclass(LazyLogits, meta, False)
        made.hidden, made.weight, made.bias, made.steps = hidden, weight, bias, steps
        return made

    def compute(self) -> torch.Tensor:
        """Computes the logits."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        for step in self.steps:
            if step == "tanh":
                logits = torch.tanh(logits)
            elif step == "float32":
                logits = logits.float()
            else:
                logits = logits * step[1] if step[0] == "multiply" else logits / step[1]
        return logits

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyLogits({tuple(self.shape)}, {self.steps})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == device_of:
            return args[0].hidden.device
        first = next((value for value in args if isinstance(value, LazyLogits)), None)
        if first is not None:
            if getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "__len__", "is_floating_point"):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            step = _step(func, args, kwargs)
            if step is not None:
                return LazyLogits.make(first.hidden, first.weight, first.bias, (*first.steps, step))
            if func is torch.Tensor.__getitem__ and _takes_all(args[1]):
                return first
        args = tuple(value.compute() if isinstance(value, LazyLogits) else value for value in args)
        kwargs = {key: value.compute() if isinstance(value, LazyLogits) else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _step(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitStep | None:
    """The step that a call performs, or None."""
    name = _NAMES.get(func)
    if name in ("multiply", "divide"):
        other = [value for value in args if not isinstance(value, LazyLogits)]
        plain = len(args) == 2 and not kwargs and len(other) == 1 and type(other[0]) in (int, float)
        if not plain:
            return None
        return ("multiply", float(other[0])) if name == "multiply" else ("divide", float(other[0]))
    if name == "tanh":
        return "tanh" if len(args) == 1 and not kwargs else None
    if name == "cast":
        asked = [torch.float32] if func is torch.Tensor.float else [*args[1:], *kwargs.values()]
        return "float32" if asked == [torch.float32] and args[0].dtype != torch.float64 else None
    return None


def _takes_all(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or part == slice(None) or part == slice(0, None) for part in parts)
