"""Logits that are not computed yet, in the form in which a loss can compute them in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from roundpipe.ops.functional import LogitStep

_NAMES: dict[Any, str] = {
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "multiply"),
    **dict.fromkeys((torch.div, torch.Tensor.div, torch.Tensor.__truediv__), "divide"),
    **dict.fromkeys((torch.tanh, torch.Tensor.tanh, F.tanh), "tanh"),
    **dict.fromkeys((torch.Tensor.float, torch.Tensor.to, torch.Tensor.type), "cast"),
}
# Of the form alone, and of the place, which is that of the hidden states. Attributes and methods.
_OF_FORM = {"shape", "dtype", "ndim", "size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex"}
_OF_PLACE = {"device", "get_device", "layout", "is_meta", "is_cpu", "is_cuda", "is_xpu", "is_sparse", "is_quantized"}


class LazyLogits(torch.Tensor):
    """Stands for `steps(hidden @ weight.T + bias)`.

    Element-wise steps are recorded, and give others like it. Any other use computes the logits, once: from then on this
    is that tensor, for readers and for writers.

    Attributes:
        hidden: [..., width].
        weight: [vocabulary, width].
        bias: [vocabulary] or None.
        steps: the model's operations on the logits so far, in order.
        computed: the logits, since somebody used them; None before.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[LogitStep, ...]
    computed: torch.Tensor | None
    _versions: list[int]

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
        made.hidden, made.weight, made.bias, made.steps, made.computed = hidden, weight, bias, steps, None
        made._versions = made._versions_now()
        return made

    def check_sources(self) -> None:
        """Raises ValueError if what the logits are made from was changed in place since the head was called."""
        if self._versions != self._versions_now():
            raise ValueError(
                "[loss] the hidden states were changed in place after the head had read them, expected them unchanged, "
                "as logits in chunks are made from them later; wrap the model with loss_chunk_tokens=None"
            )

    def compute(self) -> torch.Tensor:
        """The logits, computed at the first call."""
        if self.computed is None:
            self.check_sources()
            logits = F.linear(self.hidden, self.weight, self.bias)
            for step in self.steps:
                if step == "tanh":
                    logits = torch.tanh(logits)
                elif step == "float32":
                    logits = logits.float()
                else:
                    logits = logits * step[1] if step[0] == "multiply" else logits / step[1]
            self.computed = logits
        return self.computed

    def sources(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose gradients the logits' gradient reaches."""
        return (self.hidden, self.weight) if self.computed is None else (self.computed,)

    def _versions_now(self) -> list[int]:
        sources = (self.hidden, self.weight, self.bias)
        return [tensor._version for tensor in sources if tensor is not None and not tensor.is_inference()]

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
        first = next((value for value in args if isinstance(value, LazyLogits)), None)
        if first is not None and first.computed is None:
            name = _name(func)
            if name in _OF_FORM:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in _OF_PLACE:
                return func(first.hidden, *args[1:], **kwargs)
            step = _step(func, args, kwargs)
            if step == "float32" and first.dtype == torch.float32:
                return first  # as torch does: not a copy
            if step is not None:
                return LazyLogits.make(first.hidden, first.weight, first.bias, (*first.steps, step))
            if func is torch.Tensor.__getitem__ and _takes_all(args[1]):
                return first
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.compute, (args, kwargs))
        return func(*args, **kwargs)


def _name(func: Callable[..., Any]) -> str:
    """The name of a method, or of the attribute that a getter reads."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def _step(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitStep | None:
    """The step that a call performs, or None."""
    name = _NAMES.get(func)
    if name in ("multiply", "divide"):
        other = [value for value in args if not isinstance(value, LazyLogits)]
        plain = len(args) == 2 and not kwargs and len(other) == 1 and type(other[0]) in (int, float)
        if not plain or (name == "divide" and not isinstance(args[0], LazyLogits)):
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
