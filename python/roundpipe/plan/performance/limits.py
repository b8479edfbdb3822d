"""What limits a step: computed from steps without one limit each. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

# A resource limits the step if the step is shorter by this share without its limit.
_SMALL = 0.005


def limit_of(step_ms: float, compute_ms: float, unlimited_ms: Mapping[str, float]) -> str:
    """What shortens the step most if it has no limit.

    Args:
        compute_ms: the step if all devices computed without a pause.
        unlimited_ms: the step if one resource had no limit, by the resource's name.

    Returns:
        "compute" if there is hardly a pause; "" if no resource matters, so that the shape of the plan limits the step.
    """
    if step_ms - compute_ms < _SMALL * step_ms:
        return "compute"
    name, best = min(unlimited_ms.items(), key=lambda item: item[1], default=("", step_ms))
    return name if best < (1 - _SMALL) * step_ms else ""


def shape_limit(asynchronous: bool) -> str:
    """What limits a step that no resource limits."""
    return "dependencies" if asynchronous else "fill and drain"
