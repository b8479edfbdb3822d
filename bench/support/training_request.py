"""What a training run is asked for, and what it answers; light, so that whoever starts runs need not import a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Request:
    """What to train, and how.

    Attributes:
        way: how the model is given to RoundPipe; or another system, which takes the model as it is.
        peer: the library is another release: it has no `devices`, and its own chunked loss.
        shape: of `language_models.SHAPES`.
        device: a spec of our `devices`; the peer takes every card that it sees, other systems the first.
        memory_bytes: what the process may take of the first card; 0: all.
        modes: "sync" or "async" steps, one timed part after the other.
        steps: of each part, after `warm_up` others.
    """

    way: Literal["followed", "chain", "fsdp2", "zero3"]
    peer: bool
    shape: str
    device: str
    tokens: int
    rows: int
    microbatches: int
    grain: Literal["stage", "layer"]
    memory_bytes: int = 0
    modes: tuple[str, ...] = ("async", "sync")
    steps: int = 4
    warm_up: int = 2


@dataclass
class Result:
    """Figures of a run. Bytes of the host are what the process takes of the machine's memory, page-locked included."""

    parameters: int = 0
    tokens_per_s: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    device_peak_bytes: int = 0
    resident_bytes: int = 0
    machine_bytes: int = 0
    host_memory_bytes: int = 0  # of our arena and optimizer, by their own account


@dataclass(frozen=True)
class Lap:
    """What a process that goes on training is asked for next: `steps` timed steps after `warm_up` others."""

    rows: int
    tokens: int
    microbatches: int
    mode: Literal["sync", "async"]
    warm_up: int
    steps: int


@dataclass(frozen=True)
class LapResult:
    """What a lap took, and the losses of all its steps. Without `seconds` the device's memory did not hold it."""

    seconds: float | None
    losses: list[float]
