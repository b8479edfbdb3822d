"""Round numbers for the axes of pictures."""

from __future__ import annotations

import math

_FACTORS = (1, 2, 5, 10)


def tick_step(span: float, most: int, whole: bool = False) -> float:
    """The smallest of 1, 2 and 5 times a power of ten with which a span above 0 has at most so many parts.

    Args:
        whole: at least 1.
    """
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in _FACTORS if factor * power * most >= span * (1 - 1e-9))
    return max(1.0, step) if whole else step


def ticks(low: float, high: float, step: float) -> list[float]:
    """The multiples of a step from `low` to `high`."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def around(low: float, high: float, step: float) -> tuple[float, float]:
    """The multiples of a step next to a range, outside of it."""
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def tick_label(value: float, step: float) -> str:
    """A tick's number: as many digits as its step has, or a power of ten where that is shorter."""
    if value == 0:
        return "0"
    if not 1e-4 <= step < 1e7:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
