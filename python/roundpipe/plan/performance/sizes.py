"""Sizes as `roundpipe plan` prints them: in the decimal units of its options, and of small models more than zeros."""

from __future__ import annotations

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def unit_of(size: int) -> tuple[float, str]:
    """The bytes of the unit in which a size has at least one digit before its last, and the unit's name."""
    return next(((each, name) for each, name in _UNITS if abs(size) >= each / 10), _UNITS[-1])


def sized(size: int) -> str:
    """A size with its unit, such as 1.50 GB."""
    unit, name = unit_of(size)
    return f"{size / unit:.2f} {name}"


def sized_of(size: int, there: int) -> str:
    """A size beside what there is: 8.22 of 24.00 GB, or 1.20 MB of 24.00 GB."""
    unit, name = unit_of(size)
    whole = sized(there)
    return f"{size / unit:.2f} of {whole}" if whole.endswith(f" {name}") else f"{sized(size)} of {whole}"
