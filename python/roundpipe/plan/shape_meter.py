"""Runs code on tensors without data (torch's meta device), and counts the memory and the work that it would take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from roundpipe import _core


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


_META, _CPU = torch.device("meta"), torch.device("cpu")
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
_ATTENTION = "scaled_dot_product"  # in the names of fused attention
# Neither views, by their schema, nor kernels.
_FREE = (
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
    *(torch.ops.aten._unsafe_view, torch.ops.aten.lift_fresh, torch.ops.aten.is_same_size),
)
# Read as much of their first tensor as they write.
_LOOKUPS = (*(torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather),)


class ShapeMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, within its block, the work, and the current and peak bytes of live tensors made there.

    It does not see memory that a kernel allocates while it runs (workspaces, copies in another layout).

    Args:
        known: tensors from before the block; they do not count, even if operations return views of them.

    Attributes:
        current_bytes: of the live tensors.
        peak_bytes: the peak since `reset_peak`.
        work: of the kernels: operations of matrix products and of attention, and the bytes that all others read and
            write, as if nothing stayed in a cache.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.work = _core.LayerWork()
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
            operations = int(count(*args, **kwargs, out_val=result))
            if _ATTENTION in str(packet):
                self.work += _core.LayerWork(attention_operations=operations, attentions=1)
            else:
                self.work += _core.LayerWork(product_operations=operations, products=1)
        elif packet not in _FREE and not _is_view(func):
            self.work += _core.LayerWork(element_bytes=_touched(packet, args, kwargs, result), element_kernels=1)
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


def _is_view(func: Any) -> bool:
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _touched(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes that a kernel reads and writes."""
    written = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
    read = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    if packet in _LOOKUPS:
        read = [*written, *read[1:]]
    return sum(_size(tensor) for tensor in [*read, *written])


def _size(tensor: torch.Tensor) -> int:
    # An expanded tensor is smaller than it looks.
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class NumbersWithValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within its block, whole numbers on the CPU stay there and have values, and may be used together with tensors on
    torch's meta device, whose results have none. So a model can look at its tokens and at the sizes of its pictures."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(leaf.is_meta for leaf in given):
            return _of_numbers(func, args, kwargs, given)
        if func._overloadpacket is torch.ops.aten.index:
            args = (args[0], _places(args[1]), *args[2:])
        if func._overloadpacket is torch.ops.aten.copy_ and not args[0].is_meta:
            return args[0]  # whose values nobody knows any more
        args, kwargs = pytree.tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        if kwargs.get("device") == _CPU:
            kwargs["device"] = _META
        return func(*args, **kwargs)


def _of_numbers(func: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
    """The result of a function of numbers alone; numbers that are made on the meta device are made on the CPU."""
    device = kwargs.get("device")
    if device is None or torch.device(device) != _META:
        return func(*args, **kwargs)
    here = func(*args, **{**kwargs, "device": _CPU}) if not _floats(kwargs, given) else None
    return func(*args, **kwargs) if here is None or here.is_floating_point() else here


def _floats(kwargs: dict[str, Any], given: list[torch.Tensor]) -> bool:
    dtype = kwargs.get("dtype")
    return (dtype is not None and dtype.is_floating_point) or any(leaf.is_floating_point() for leaf in given)


def _places(indices: Any) -> list[Any]:
    """Indices with masks as places, so that their number is known."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.is_meta
        found += index.nonzero().unbind(1) if is_mask else [index]
    return found


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device=_META)
