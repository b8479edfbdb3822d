"""Reports whether a model fits a machine, and if not, the smallest change that would help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from roundpipe.memory.budget import HostPrediction
from roundpipe.planning.costs import CostSet
from roundpipe.planning.fit import ROW_STEP, Fit, longest_row


@dataclasses.dataclass(frozen=True)
class FitReport:
    """Predicted bytes beside the available memory.

    Attributes:
        host: with fp32 moments.
        host_8bit: with 8-bit moments.
        host_memory: the available memory; None: not given.
        unknown: what the prediction omits; empty: nothing.
        predict: maps tokens of a row to a prediction; None if the costs do not say how they grow.
        adapters: host memory if only adapters were trained; None: they are, or the costs do not say.
    """

    fit: Fit
    host: HostPrediction
    host_8bit: HostPrediction
    host_memory: int | None
    unknown: str = ""
    predict: Callable[[int], Fit] | None = None
    adapters: Callable[[], HostPrediction] | None = None

    @property
    def host_fits(self) -> bool:
        return self.host_memory is None or self.host.total <= self.host_memory

    def document(self) -> dict[str, Any]:
        """The report for JSON; sizes in bytes."""
        return {
            "predicted_host_bytes": {**_names(self.host.rows()), "together": self.host.total},
            "predicted_device_bytes": {**self.fit.device.rows(), "together": self.fit.device.total},
            "host_memory": self.host_memory,
            "device_memory": self.fit.memory or None,
            "recompute_grain": self.fit.grain,
            "fits": self.fit.fits and self.host_fits,
            "verdict": self.verdict(),
        }

    def lines(self) -> list[str]:
        """The lines of a table, the unknown parts, and the verdict."""
        # Most plans have no partial sums.
        sizes = {name: size for name, size in self.host.rows().items() if size or not name.startswith("partial")}
        host = [("host", sizes, self.host.total, self.host_memory)]
        device = [("fullest device", self.fit.device.rows(), self.fit.device.total, self.fit.memory or None)]
        lines = _table(host) + _table(device)
        if self.unknown:
            lines.append(f"not known: {self.unknown}")
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """One line that begins with "fits" or "does not fit"."""
        changes = []
        short = []
        if not self.host_fits:
            assert self.host_memory is not None
            short.append(f"the host needs {_gb(self.host.total)} of {_gb(self.host_memory)} GB")
            changes.append(self._host_change(self.host_memory))
        if not self.fit.fits:
            short.append(f"a device needs {_gb(self.fit.device.total)} of {_gb(self.fit.memory)} GB")
            changes.append(self._device_change())
        if short:
            return f"does not fit (predicted): {'; '.join(short)}; smallest change that would: {'; '.join(changes)}"
        asked = []
        if not self.fit.memory:
            asked.append("--memory")
        if self.host_memory is None:
            asked.append("--host-memory")
        if len(asked) == 2:
            return "not compared: give --memory and --host-memory"
        of_host = "" if self.host_memory is None else f" of {_gb(self.host_memory)}"
        of_device = f" of {_gb(self.fit.memory)}" if self.fit.memory else ""
        line = f"fits (predicted): {_gb(self.fit.device.total)}{of_device} GB on a device, "
        line += f"{_gb(self.host.total)}{of_host} GB on the host"
        return f"{line}; not compared: {asked[0]}" if asked else line

    def _host_change(self, there: int) -> str:
        if self.host_8bit.total <= there:
            return 'moments="8bit" in the optimizer'
        if self.adapters is not None and self.adapters().total <= there:
            return f"--train lora (the weights take {_gb(self.host.weights)} GB)"
        return f"--host-memory {_enough(self.host.total)}"

    def _device_change(self) -> str:
        memory = f"--memory {_enough(self.fit.device.total)}"
        if len(set(self.fit.memory_of_each)) > 1:
            memory = f"{_enough(self.fit.device.total)} on a device of {_gb(self.fit.memory)} GB"
        if self.predict is None:
            return memory
        tokens, _ = longest_row(self.predict, limit=1 << 20)
        return f"--tokens {tokens}" if tokens >= ROW_STEP else memory


def host_of_costs(costs: CostSet, values: int, moments_bytes: int) -> HostPrediction:
    """Host memory of a cost file's weights, assumed to be 16-bit.

    Args:
        moments_bytes: bytes of one parameter's two moments.
    """
    weights = sum(cost.weight_bytes for cost in costs.layers)
    gradients = sum(cost.gradient_bytes for cost in costs.layers)
    return HostPrediction(weights, gradients, gradients, gradients // 2 * moments_bytes, values)


def _names(rows: dict[str, int]) -> dict[str, int]:
    return {name.replace(" ", "_"): size for name, size in rows.items()}


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _enough(size: int) -> str:
    return f"{math.ceil(size / 1e7) / 100:g}GB"


def _table(rows: list[tuple[str, dict[str, int], int, int | None]]) -> list[str]:
    lines = []
    for title, sizes, total, there in rows:
        names = [*sizes, "together", "of"]
        cells = [*map(_gb, sizes.values()), _gb(total), "-" if there is None else _gb(there)]
        widths = [max(len(name), len(cell)) for name, cell in zip(names, cells, strict=True)]
        lines.append(f"{'predicted, GB':16}" + "".join(f"  {n:>{w}}" for n, w in zip(names, widths, strict=True)))
        lines.append(f"  {title:14}" + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths, strict=True)))
    return lines
