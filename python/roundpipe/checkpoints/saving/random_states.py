"""The states of Python's and NumPy's random number generators, which the engine keeps beside torch's."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def random_states_of_python() -> dict[str, Any]:
    """Returns the states, NumPy's only if the process uses NumPy."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Raises whatever generators raise that cannot take these states. No generator in use is changed."""
    if "python" in states:
        random.Random().setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.RandomState().set_state(states["numpy"])


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores the states. Generators that a program in C++ did not have are left out."""
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def derived_seed(of: bytes, rank: int) -> int:
    """A seed of 63 bits for a rank, from what rank 0 has: the first eight bytes of their SHA-256."""
    digest = hashlib.sha256(of + rank.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def derive_random_states(states: dict[str, Any], rank: int) -> None:
    """Seeds all generators of a rank that has no states of its own, from rank 0's states."""
    seed = derived_seed(states["torch"].numpy().tobytes(), rank)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
