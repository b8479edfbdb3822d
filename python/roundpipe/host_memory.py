"""What a model and its fused optimizer take on the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the host, by use; `print` shows them as a table.

    Attributes:
        parameters: how many the optimizer trains.
        weights_and_gradients: the buffers that weights and gradients take turns in.
        masters: what fp32 masters of 16-bit weights have beyond them.
        moments: the optimizer's, as they are once every parameter has had a step.
    """

    parameters: int
    weights_and_gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.weights_and_gradients + self.masters + self.moments

    def __str__(self) -> str:
        rows = {
            "weights and gradients": self.weights_and_gradients,
            "fp32 masters": self.masters,
            "moments": self.moments,
            "together": self.total,
        }
        count = max(self.parameters, 1)
        lines = [f"host memory of {self.parameters / 1e6:.2f} M trained parameters:"]
        lines += [
            f"  {name:22} {size / 2**20:10.1f} MiB {size / count:6.2f} B/parameter" for name, size in rows.items()
        ]
        return "\n".join(lines)
