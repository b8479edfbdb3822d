"""Host memory of models and their fused optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from roundpipe import _core


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host, by use; `print` shows them as a table.

    Attributes:
        parameters: number of parameters that the optimizer trains.
        weights_and_gradients: the buffers that weights and gradients take turns in.
        masters: what fp32 masters of 16-bit weights take beyond the weights.
        moments: the optimizer's moments once every parameter has had a step.
        moments_on_disk: those that are on a disk beyond that; not in `total`.
        masters_on_disk: likewise.
    """

    parameters: int
    weights_and_gradients: int
    masters: int
    moments: int
    moments_on_disk: int = 0
    masters_on_disk: int = 0

    @property
    def on_disk(self) -> int:
        """Bytes on a disk alone, which a step reads and writes."""
        return self.moments_on_disk + self.masters_on_disk

    @property
    def total(self) -> int:
        """The sum of all entries, in bytes."""
        return self.weights_and_gradients + self.masters + self.moments

    def __str__(self) -> str:
        rows = {
            "weights and gradients": self.weights_and_gradients,
            "fp32 masters": self.masters,
            "moments": self.moments,
            "together": self.total,
        }
        if self.on_disk:
            rows["beside, on the disk"] = self.on_disk
        count = max(self.parameters, 1)
        lines = [f"host memory of {self.parameters / 1e6:.2f} M trained parameters:"]
        lines += [
            f"  {name:22} {size / 2**20:10.1f} MiB {size / count:6.2f} B/parameter" for name, size in rows.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class HostArena:
    """Memory that all models in this process, and their steps, have taken from the system; `print` shows it.

    Weights, gradients and the state of fused optimizers are held as long as the models. Inputs, activations between
    stages and their gradients, losses and buffers come and go with every step; their memory is kept for the next step.

    Attributes:
        asked_bytes: memory in use now, including buffers that wait for their next use.
        reserved_bytes: memory taken from the system for it.
        locked_bytes: the page-locked part of it; 0 if all devices are virtual.
        pieces: number of buffers.
    """

    asked_bytes: int
    reserved_bytes: int
    locked_bytes: int
    pieces: int

    @property
    def waste(self) -> float:
        """The share of the reserved bytes that is not asked for, from 0 to 1."""
        return 1 - self.asked_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __str__(self) -> str:
        return (
            f"host arena: {self.pieces} pieces of {self.asked_bytes / 2**20:.1f} MiB together, "
            f"{self.reserved_bytes / 2**20:.1f} MiB reserved ({self.waste:.2%} waste), "
            f"{self.locked_bytes / 2**20:.1f} MiB page-locked"
        )


def host_arena() -> HostArena:
    """The current host memory of all models in this process, see `HostArena`. A model's memory returns to the system
    when nothing uses it any more; memory of steps returns when a model is gone or memory runs short."""
    stats = _core.host_arena()
    return HostArena(stats.asked_bytes, stats.reserved_bytes, stats.locked_bytes, stats.pieces)


def free_host_bytes() -> int:
    """The memory that new allocations can have without swapping, as Linux estimates it; elsewhere, unused memory."""
    return _core.free_host_bytes()
