"""torch's module of the devices "card", which is `torch.card` once torch has loaded it.

A card computes on the host, later, on the threads of its streams; docs/extending.md says what that shows. Beside what
such a module has for any kind of device, the functions at the end let a test say when things happen.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import _fake_card
import torch

_Device = torch.device | str | int | None


def _index(device: _Device = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def is_available() -> bool:
    return device_count() > 0


_initialized = True  # torch.utils.checkpoint asks, and saves no random state else


def is_initialized() -> bool:
    return _initialized


def init() -> None:
    """Nothing is left to do once torch has loaded this module."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return os.getpid() != _process


def device_count() -> int:
    return int(_fake_card.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: _Device) -> None:
    torch.accelerator.set_device_index(_index(device))


def get_device_name(device: _Device = None) -> str:
    return f"test card {_index(device)}"


class device:  # noqa: N801 - torch's name
    """Makes a card current inside a `with`."""

    def __init__(self, device: _Device) -> None:
        self._index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


class device_of(device):  # noqa: N801 - torch's name
    """Makes the card of a tensor current inside a `with`; nothing for other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "card" else None)


def synchronize(device: _Device = None) -> None:
    torch.accelerator.synchronize(_index(device))


def Stream(device: _Device = None, priority: int = 0) -> torch.Stream:  # noqa: N802 - torch's name
    return torch.Stream(torch.device("card", _index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802 - torch's name
    return torch.Event("card", enable_timing=enable_timing)


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    kind = current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


# --- Memory

empty_cache = torch.accelerator.empty_cache
_MIB = 1 << 20


def memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: _Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def memory_stats(device: _Device = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    _fake_card.limit_memory(_index(device), int(fraction * mem_get_info(device)[1]))


# --- Random numbers

default_generators: tuple[torch.Generator, ...] = ()


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    default_generators[_index(device)].set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


# --- Autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- For tests: when things happen


def host_reads() -> int:
    """How often the host has waited for values of any card: by a copy that blocks, or for a number."""
    return int(_fake_card.host_reads())


def _stream(stream: torch.Stream | None) -> tuple[int, int]:
    stream = current_stream() if stream is None else stream
    return stream.device_index, stream.stream_id


@contextlib.contextmanager
def hold(stream: torch.Stream | None = None) -> Iterator[None]:
    """What is queued on the stream inside does not begin before the end."""
    place = _stream(stream)
    _fake_card.hold(*place)
    try:
        yield
    finally:
        _fake_card.release(*place)


@contextlib.contextmanager
def delays(seed: int) -> Iterator[None]:
    """Tasks begin late, by times that follow from `seed`, the stream and the task's number; slow streams besides."""
    _fake_card.set_delays(seed)
    try:
        yield
    finally:
        _fake_card.set_delays(int(os.environ.get("CARD_DELAYS", "0")))


@contextlib.contextmanager
def slow(ms_per_task: float, stream: torch.Stream | None = None) -> Iterator[None]:
    """Every task of the stream takes so much longer."""
    place = _stream(stream)
    _fake_card.slow_down(*place, ms_per_task)
    try:
        yield
    finally:
        _fake_card.slow_down(*place, 0)


def occupy(ms: float) -> None:
    """The current stream is busy for so long."""
    _fake_card.occupy(ms)


@contextlib.contextmanager
def fault(device: _Device = None, why: str = "planted") -> Iterator[None]:
    """Every call on the card fails; afterwards it is as a new process would find it."""
    _fake_card.set_fault(_index(device), why)
    try:
        yield
    finally:
        _fake_card.clear_fault(_index(device))


def forget_fault(device: _Device = None) -> None:
    """As a new process would find the card, after a kernel of its own has failed."""
    _fake_card.clear_fault(_index(device))


@contextlib.contextmanager
def without_kernels(why: str) -> Iterator[None]:
    """Cards run none of the engine's fused kernels, for this reason."""
    _fake_card.set_kernels_missing(why)
    try:
        yield
    finally:
        _fake_card.set_kernels_missing("")


def launched() -> dict[str, int]:
    """How often each of the engine's fused kernels was launched."""
    return dict(_fake_card.launched())


def has_context(device: _Device = None) -> bool:
    """Whether the process has used the card."""
    return bool(_fake_card.has_context(_index(device)))


# --- Registration


def register() -> None:
    """Called by torch, which finds it by its entry point when the folder is on the path."""


def _register() -> None:
    global default_generators
    torch.utils.rename_privateuse1_backend("card")
    torch._register_device_module("card", sys.modules[__name__])
    # Else module.to("card") would make a tensor of each use of a tied one.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    default_generators = tuple(_fake_card.default_generator(i) for i in range(device_count()))


_process = os.getpid()
_register()
