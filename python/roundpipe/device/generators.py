"""torch's default random number generators, one set for each thread.

Layers draw from generators that belong to their worker. The engine redirects operators to them; this module redirects
the functions that ask for a default generator by name. `torch.manual_seed`, `torch.get_rng_state`,
`torch.random.fork_rng` and, because it uses these, `torch.utils.checkpoint` act on the worker's generator when a layer
calls them, and on the process's generator elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundpipe import _core

# Methods of a generator that those functions call.
_METHODS = (
    "get_state",
    "set_state",
    "graphsafe_get_state",
    "graphsafe_set_state",
    "clone_state",
    "manual_seed",
    "seed",
    "initial_seed",
    "get_offset",
    "set_offset",
)


def _on_own(name: str) -> Callable[..., Any]:
    plain = getattr(torch.Generator, name)

    def method(self: torch.Generator, *args: Any) -> Any:
        own = _core.own_generator(self.device)
        return plain(self if own is None else own, *args)

    return method


class DefaultGenerator(torch.Generator):
    """A default generator of torch. On a worker, it stands for the worker's own generator of that device."""


for _name in _METHODS:
    if hasattr(torch.Generator, _name):
        setattr(DefaultGenerator, _name, _on_own(_name))


def _standing_for(standard: torch.Generator) -> torch.Generator:
    if isinstance(standard, DefaultGenerator):
        return standard
    made = DefaultGenerator(device=standard.device)
    _core.make_stand_in(made, standard)
    return made


def _lead_to_own(module: Any, kind: str) -> None:
    """Redirects a device module that exposes no generators: its functions act on the worker's own generator."""

    def own(device: Any = kind) -> torch.Generator | None:
        place = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        return _core.own_generator(place if place.index is not None else torch.device(kind, module.current_device()))

    def led(name: str, instead: Callable[..., Any]) -> None:
        plain = getattr(module, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):

            @functools.wraps(plain)
            def function(*args: Any, **kwargs: Any) -> Any:
                return plain(*args, **kwargs) if own() is None else instead(*args, **kwargs)

            setattr(module, name, function)

    def seed_own(seed: int) -> None:
        generator = own()
        assert generator is not None
        generator.manual_seed(seed)

    led("get_rng_state", lambda device=kind: own(device).get_state())  # type: ignore[union-attr]
    led("set_rng_state", lambda new_state, device=kind: own(device).set_state(new_state))  # type: ignore[union-attr]
    led("manual_seed", seed_own)
    led("manual_seed_all", seed_own)


def stand_in(torch_devices: Sequence[str]) -> None:
    """Replaces torch's default generators, for the host and for the kind of these devices, by `DefaultGenerator`s."""
    torch.default_generator = _standing_for(torch.default_generator)
    torch.random.__dict__["default_generator"] = torch.default_generator
    for kind in {torch.device(device).type for device in torch_devices} - {"cpu"}:
        module = torch.get_device_module(kind)
        if generators := getattr(module, "default_generators", ()):
            module.default_generators = tuple(map(_standing_for, generators))
        else:
            _lead_to_own(module, kind)
