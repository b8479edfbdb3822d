"""The device memory of layers, measured by running each kind of layer once, outside the pipeline.

Only shapes count, so the weights may be random or not loaded yet.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roundpipe import _core
from roundpipe.layers.recompute import forget_saved
from roundpipe.layers.shell import DeviceShell, PythonLayer
from roundpipe.layers.values import Structure

Loss = Callable[[Any], list[torch.Tensor]]

# Call number for executions that belong to no call of the engine, which numbers its calls from 1.
_TRIAL = 0


class _AcceleratorMeter:
    """The counterpart of `_core.MemoryMeter` for an accelerator, based on torch's statistics.

    Nothing else may run on that accelerator meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> _AcceleratorMeter:
        torch.accelerator.synchronize(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        torch.accelerator.synchronize(self._device)

    @property
    def current_bytes(self) -> int:
        return int(torch.accelerator.memory_allocated(self._device))

    @property
    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


Meter = _core.MemoryMeter | _AcceleratorMeter


def measure(
    layers: Sequence[PythonLayer],
    batch: tuple[list[torch.Tensor], Structure],
    loss: Loss | None,
    device: torch.device,
    trains: bool,
) -> list[_core.LayerFootprint]:
    """Runs one microbatch forward and, if it `trains`, backward through the layers, each kind of layer once.

    Args:
        batch: the first layer's inputs, on the host.
        loss: takes the last layer's output; None = gradients of the outputs, if any, come from elsewhere.
        device: where to run; the CPU stands for a virtual device.

    Raises:
        ValueError: a layer writes its parameters in its forward.
        Exception: whatever a layer raises; torch.OutOfMemoryError if a single layer does not fit.
    """
    meter: Meter = _core.MemoryMeter() if device.type == "cpu" else _AcceleratorMeter(device)
    known: dict[Any, tuple[_core.LayerFootprint, list[torch.Tensor], Structure]] = {}
    footprints = []
    tensors, structure = batch
    with _core.DrawsApart(seed=0, device=device), torch.enable_grad(), _forgetting(), _no_collection():
        for index, layer in enumerate(layers):
            ending = loss if index == len(layers) - 1 else None
            kind = (layer.kind(), ending is None, *((t.shape, t.dtype, t.requires_grad) for t in tensors))
            if kind not in known:
                known[kind] = _measure_layer(layer, index, tensors, structure, trains, ending, device, meter)
            footprint, tensors, structure = known[kind]
            footprints.append(footprint)
    return footprints


def _measure_layer(
    layer: PythonLayer,
    index: int,
    tensors: list[torch.Tensor],
    structure: Structure,
    trains: bool,
    loss: Loss | None,
    device: torch.device,
    meter: Meter,
) -> tuple[_core.LayerFootprint, list[torch.Tensor], Structure]:
    with meter:
        shell = layer.make_shell(str(device))
        _fill(shell, layer, device, trains)
        leaves = [_core.crossed_copy(t, str(device)).requires_grad_(t.requires_grad) for t in tensors]
        # A layer may write to its inputs in place, which autograd forbids for leaves.
        inputs = _core.cross_boundary(leaves)
        watch = _core.ParameterWatch(shell.parameters)
        base = meter.current_bytes
        meter.reset_peak()
        outputs, output_structure, _ = shell.run(inputs, structure, (_TRIAL, index, 0, False))
        handed_through = [any(o is i for i in inputs) for o in outputs]
        outputs = _core.cross_boundary(outputs)
        if loss is not None:
            roots = [value for value in loss(output_structure.join(outputs)) if value.requires_grad]
        else:
            roots = [output for output in outputs if output.requires_grad]
        forward, saved = meter.peak_bytes - base, meter.current_bytes - base
        watch.require_kept(f"layer {index} ({layer.name})", [name for name, _ in layer.parameters()])
        gradients = [torch.ones_like(root) for root in roots]
        given = sum(gradient.nbytes for gradient in gradients)
        handed_on = [_core.crossed_copy(o, "cpu").requires_grad_(o.requires_grad) for o in outputs]
        size = sum(_core.settled_bytes(o) for o, through in zip(outputs, handed_through, strict=True) if not through)
        held = meter.current_bytes
        outputs = []
        meter.reset_peak()
        if roots and trains:
            torch.autograd.backward(roots, gradients)
        backward = saved + meter.peak_bytes - held
        del roots, gradients
    taken = sum(map(_core.settled_bytes, tensors))
    footprint = _core.LayerFootprint(taken, size, given, forward, saved, max(backward, saved))
    return footprint, handed_on, output_structure


def _fill(shell: DeviceShell, layer: PythonLayer, device: torch.device, trains: bool) -> None:
    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None  # the engine sums a gradient elsewhere as soon as it is complete

    with torch.no_grad():
        for mine, (_, parameter) in zip(shell.parameters, layer.parameters(), strict=True):
            mine.data = parameter.detach().to(device, copy=True)
        for buffer, (_, source) in zip(shell.buffers, layer.buffers(), strict=True):
            buffer.data = source.detach().to(device, copy=True)
    for mine, (_, parameter) in zip(shell.parameters, layer.parameters(), strict=True):
        mine.requires_grad_(trains and parameter.requires_grad)
        if mine.requires_grad:
            mine.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Older garbage that is collected between two looks at the memory would be taken for a layer's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _forgetting() -> Iterator[None]:
    try:
        yield
    finally:
        forget_saved(_TRIAL)
