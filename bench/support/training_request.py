"""What a training run is asked for, and what it answers; light, so that whoever starts runs need not import a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Recompute = Literal["layers", "offloaded", "none"]


@dataclass(frozen=True)
class Request:
    """What to train, and how.

    Attributes:
        way: how the model is given to RoundPipe; or another system, which takes the model as it is.
        peer: the library is another release: it has no `devices`, and its own chunked loss.
        shape: of `language_models.SHAPES`.
        device: a spec of our `devices`; the peer takes every card that it sees, other systems the first.
        layers: decoder layers, where not all of the shape's.
        lora_rank: adapters of this rank on the attention's projections are trained, and nothing else; 0: all weights.
        shared_base: all decoder layers share the frozen weights of the first, so that the host holds them once.
        moments: of our optimizer.
        arithmetic: of ours; followed models only.
        memory_bytes: what the process may take of the first card; 0: all.
        modes: "sync" or "async" steps, one timed part after the other.
        steps: of each part, after `warm_up` others.
    """

    way: Literal["followed", "chain", "plain", "fsdp2", "zero3", "trainstream"]
    peer: bool
    shape: str
    device: str
    tokens: int
    rows: int
    microbatches: int
    grain: Literal["stage", "layer"]
    layers: int = 0
    lora_rank: int = 0
    shared_base: bool = False
    moments: Literal["float32", "8bit"] = "float32"
    arithmetic: Literal["exact", "fast"] = "exact"
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
    """What a process that goes on training is asked for next: `steps` timed steps after `warm_up` others.

    Attributes:
        recompute: of systems that take the model as it is: which activations are made again in the backward.
        learning_rate: from now on.
        profiled: the timed steps run under torch's profiler.
    """

    rows: int
    tokens: int
    microbatches: int
    mode: Literal["sync", "async"]
    warm_up: int
    steps: int
    recompute: Recompute = "layers"
    learning_rate: float = 1e-5
    profiled: bool = False


@dataclass(frozen=True)
class Ready:
    """A process is set up.

    Attributes:
        parameters: how many numbers the model has; shared ones count once.
        step_flops: of a step with one row of one token, and of its attention for each token before; see flops.py.
        expected_loss: of the plain model on the card, for one row of `Request.tokens`; None: not asked for.
    """

    parameters: int
    seconds: float
    flops_per_token: float
    flops_per_token_and_position: float
    expected_loss: float | None = None


@dataclass(frozen=True)
class LapResult:
    """What a lap took, and the losses of all its steps. Without `seconds` the device's memory did not hold it.

    Attributes:
        step_seconds: of each step, warm-up included, where the system says it.
        uploaded_bytes: from the host to the devices in the timed steps, where the system says it.
    """

    seconds: float | None
    losses: list[float]
    device_peak_bytes: int = 0
    host_memory_bytes: int = 0
    step_seconds: list[float] = field(default_factory=list)
    uploaded_bytes: int = 0
    profile: dict[str, Any] | None = None
