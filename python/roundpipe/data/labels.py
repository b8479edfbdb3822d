"""The names of arguments that are labels."""

from __future__ import annotations

_NAMES = ("start_positions", "end_positions")  # of answers in a text
_ENDINGS = ("labels", "label")


def names_label(name: str) -> bool:
    """Whether a model's argument is a label by its name, as transformers names them: a loss is computed from it."""
    return name in _NAMES or name.endswith(_ENDINGS)
