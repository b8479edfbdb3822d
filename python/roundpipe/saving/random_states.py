"""The states of the process's random number generators: torch's, its devices', Python's and NumPy's."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if hasattr(module, "get_rng_state_all") else None


def random_states() -> dict[str, Any]:
    """Returns the states, as `Encoder.encode` takes them. NumPy's only if the process uses NumPy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    module = _device_module()
    if module is not None:
        states["devices"] = module.get_rng_state_all()
    return states


def check_random_states(states: dict[str, Any]) -> None:
    """Raises whatever generators raise that cannot take these states. No generator in use is changed."""
    torch.Generator().set_state(states["torch"])
    if "python" in states:
        random.Random().setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.RandomState().set_state(states["numpy"])
    for state in states.get("devices", []):
        if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
            raise TypeError("random.devices holds something that is no state of a generator")


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores what `random_states` has returned. Devices that are not there now are left out, and so are generators
    that a program in C++ did not have."""
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    module = _device_module()
    if module is not None and "devices" in states:
        for index, state in enumerate(states["devices"][: module.device_count()]):
            module.set_rng_state(state, index)


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
