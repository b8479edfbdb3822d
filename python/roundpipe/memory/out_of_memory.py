"""Messages about a device without memory for a call: the error, and the warning when a retry took longer."""

from __future__ import annotations

import inspect
import traceback
import warnings
import weakref
from dataclasses import dataclass, replace

import torch

from roundpipe.call.request import CallRequest, Microbatch
from roundpipe.layers.values import Structure
from roundpipe.memory.step import StepMemory, StepShape, largest_of, rows_of, step_shape

# Values that decide what a layer does: tokens, positions, masks. Of other tensors, only shapes count.
_CHOOSING = frozenset({torch.bool, torch.int16, torch.int32, torch.int64})


def warn(notice: str) -> None:
    """Warns, at the line outside this package and torch that made the engine warn."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("roundpipe", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(notice, RuntimeWarning, stacklevel=level)


def release(error: BaseException) -> None:
    """Drops the tensors in the traceback frames of an error that ended on another thread."""
    traceback.clear_frames(error.__traceback__)


def said(error: BaseException, *parts: str) -> torch.OutOfMemoryError:
    """Makes the error for a device without memory, with `parts` as further lines. Its cause is `error`."""
    release(error)
    first = str(error).rstrip() or "[RoundPipe] out of memory"
    told = torch.OutOfMemoryError("\n".join([first, *parts]))
    told.__cause__ = error
    return told


@dataclass(frozen=True)
class _Shape:
    """A tensor without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def zeros(self) -> torch.Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        values = torch.zeros(span if self.size.numel() else 0, dtype=self.dtype)
        return values.as_strided(self.size, self.stride).requires_grad_(self.requires_grad)


Noted = tuple[list[torch.Tensor | _Shape], Structure]


def _note(part: Microbatch) -> Noted:
    tensors, structure = part
    return [
        tensor.detach().clone()
        if tensor.dtype in _CHOOSING
        else _Shape(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for tensor in tensors
    ], structure


def _revive(noted: Noted, rows: int, most: int) -> Microbatch:
    """Makes the first `rows` of the noted microbatch's `most` rows."""
    tensors = [entry.zeros() if isinstance(entry, _Shape) else entry for entry in noted[0]]
    cut = [
        t.detach()[:rows].requires_grad_(t.requires_grad) if rows < most and t.dim() and t.shape[0] == most else t
        for t in tensors
    ]
    return cut, noted[1]


class StepNote:
    """Describes a call, to explain later why it did not fit. It does not keep the values of the batch.

    The engine calls it with an error if a device had no memory for the call and nothing else helped, and raises the
    result. Memory is predicted only then.
    """

    def __init__(self, memory: StepMemory, request: CallRequest) -> None:
        batch, labels = request.batch, request.labels
        largest = largest_of(batch)
        self._memory = weakref.ref(memory)  # which ends with the model
        self._request = request.without_values()
        self._most_rows = rows_of(batch[largest])
        self._total_rows = sum(map(rows_of, batch))
        self._count = len(batch)
        self._batch = _note(batch[largest])
        self._labels = [_note(labels[largest])] if labels else []

    def __call__(self, error: BaseException, where: str, cap: int) -> torch.OutOfMemoryError:
        """Makes the error to raise.

        Args:
            error: the original error of the allocation.
            where: a sentence: the device, its cap, layer and phase.
            cap: the device's cap in bytes; 0: unknown.
        """
        release(error)
        memory = self._memory()
        if memory is None:
            return said(error, where)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                told = memory.explain(self._shape, self._most_rows, cap)
        except Exception as failed:
            told = memory.describe_layers() + (
                f"\nwhat the step needs could not be predicted ({type(failed).__name__}: {failed}); "
                "what may help: more microbatches, shorter rows, or more memory for each device"
            )
        return said(error, where, told)

    def _shape(self, rows: int) -> StepShape:
        """The step with `rows` rows in its largest microbatch."""
        batch = _revive(self._batch, rows, self._most_rows)
        labels = [_revive(label, rows, self._most_rows) for label in self._labels]
        request = replace(self._request, batch=[batch], labels=labels)
        return step_shape(request, count=self._count, total_rows=self._total_rows)
