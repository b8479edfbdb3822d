"""Runs code on tensors without data (torch's meta device), and counts the memory and operations that it would take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def _attention_flops(query: torch.Tensor, key: torch.Tensor, backward: bool) -> int:
    *batch, tokens, width = query.shape
    # Two products in the forward and five in the backward; a causal mask halves them.
    return (5 if backward else 2) * torch.Size(batch).numel() * tokens * key.shape[-2] * width


def _attention_forward(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    return _attention_flops(query, key, backward=False)


def _attention_backward(_: Any, query: torch.Tensor, key: torch.Tensor, *__: Any, **___: Any) -> int:
    return _attention_flops(query, key, backward=True)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, *_: Any, out_val: torch.Tensor, **__: Any) -> int:
    # Each row of `left` meets one of the groups or, in a weight's gradient, is summed over.
    return 2 * left.numel() * (right.shape[-1] if left.dim() == 2 or right.dim() == 2 else out_val.shape[-1])


_OWN: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._grouped_mm: _grouped_product,
}


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


class ShapeMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, within its block, operations and the current and peak bytes of live tensors made there.

    It does not see memory that a kernel allocates while it runs (workspaces, copies in another layout).

    Args:
        known: tensors from before the block; they do not count, even if operations return views of them.

    Attributes:
        current_bytes: of the live tensors.
        peak_bytes: the peak since `reset_peak`.
        flops: floating-point operations of matrix products and attention.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._sizes: dict[int, int] = {}
        for tensor in known:
            self._note(tensor, counts=False)

    def reset_peak(self) -> None:
        """Restarts the peak from the bytes that are live now."""
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        # There is nothing to compute, and torch takes milliseconds to find that out.
        result = kwargs["out"] if packet in _PRODUCTS and "out" in kwargs else func(*args, **kwargs)
        count = _OWN.get(packet) or flop_registry.get(packet)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value, counts=True)
        return result

    def _note(self, tensor: torch.Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counts else 0
        self.current_bytes += self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.current_bytes -= self._sizes.pop(key)
