"""AdamW optimizers with torch's interface as contestants of bench/optimizer.py: with a cast before and one after.

As a program, the server that makes one step a request, in a process and with a package folder of its own:

    python adamw.py published|deepspeed|torchao|bitsandbytes FOLDER THREADS SIZE

Every line on stdin and stdout is a JSON value. It answers "refill" with null, "step" with Times, and
{"save": path} with null after writing the sample of the weights there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WEIGHT_SCALE = 0.02
SAMPLES = 1 << 20
CHUNK = 1 << 22


class Times(NamedTuple):
    """What one step took. `total_ns` is everything from bf16 gradient to bf16 weight."""

    total_ns: int
    optimizer_ns: int  # without the casts
    zeroing_ns: int  # of the bf16 gradient, afterwards; in the total, too


def fill(tensor: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
    """Normal values, the same in every process; in chunks, for it must not need memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    for part in tensor.split(CHUNK):
        part.copy_(torch.randn(part.numel(), generator=generator).mul_(scale))
    return tensor


def initial_weights(size: int) -> torch.Tensor:
    return fill(torch.empty(size), WEIGHT_SCALE, 1)


def sample(values: torch.Tensor) -> torch.Tensor:
    """About SAMPLES elements, spread evenly; the distance is odd, so that every lane of a vector is met."""
    return values[:: values.numel() // SAMPLES | 1].contiguous()


class Gradients:
    """Where a step's bf16 gradient comes from: another one for each step, the same for each contestant."""

    def __init__(self, size: int) -> None:
        self._source = fill(torch.empty(size, dtype=torch.bfloat16), 0.01, 2)

    def write(self, gradient: torch.Tensor, step: int) -> None:
        """The source, rotated."""
        cut = step * 7919 % self._source.numel()
        head = self._source.numel() - cut
        gradient[:head].copy_(self._source[cut:])
        gradient[head:].copy_(self._source[:cut])


class WithCasts:
    """An fp32 optimizer: bf16 gradient to fp32 gradient, step, fp32 parameter to bf16 weight, gradient zeroed."""

    def __init__(
        self, size: int, gradients: Gradients, make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
    ) -> None:
        self._parameter = torch.nn.Parameter(initial_weights(size))
        self._parameter.grad = torch.empty(size)
        self._weight = torch.empty(size, dtype=torch.bfloat16)
        self._gradient = torch.empty(size, dtype=torch.bfloat16)
        self._gradients = gradients
        self._optimizer = make([self._parameter])
        self._steps = 0

    def refill(self) -> None:
        self._gradients.write(self._gradient, self._steps)

    @torch.no_grad()
    def step(self) -> Times:
        assert self._parameter.grad is not None
        begin = time.perf_counter_ns()
        self._parameter.grad.copy_(self._gradient)
        arrived = time.perf_counter_ns()
        self._optimizer.step()
        stepped = time.perf_counter_ns()
        self._weight.copy_(self._parameter)
        written = time.perf_counter_ns()
        self._gradient.zero_()
        end = time.perf_counter_ns()
        self._steps += 1
        return Times(end - begin, stepped - arrived, end - written)

    def sample(self) -> torch.Tensor:
        """Of the fp32 parameter. Raises SystemExit when the bf16 weight is not its rounding."""
        if not torch.equal(self._weight, self._parameter.detach().bfloat16()):
            raise SystemExit("the bf16 weight is not the rounded parameter")
        return sample(self._parameter.detach())


def published(folder: Path) -> type[torch.optim.Optimizer]:
    """roundpipe 0.1.1's Adam. Loaded under another name: its package needs a GPU to be imported, and has ours."""
    source = folder / "roundpipe" / "optim"
    spec = importlib.util.spec_from_file_location(
        "published_optim", source / "__init__.py", submodule_search_locations=[str(source)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return cast(type[torch.optim.Optimizer], module.Adam)


def deepspeed(folder: Path) -> type[torch.optim.Optimizer]:
    """DeepSpeed's Adam on the host, which is AdamW unless told otherwise."""
    module = importlib.import_module("deepspeed.ops.adam")
    assert module.__file__ is not None and Path(module.__file__).is_relative_to(folder)
    return cast(type[torch.optim.Optimizer], module.DeepSpeedCPUAdam)


def torchao(folder: Path) -> type[torch.optim.Optimizer]:
    """torchao's AdamW with moments of 8 bits, which it compiles at its first step."""
    module = importlib.import_module("torchao.optim")
    assert module.__file__ is not None and Path(module.__file__).is_relative_to(folder)
    return cast(type[torch.optim.Optimizer], module.AdamW8bit)


def bitsandbytes(folder: Path) -> type[torch.optim.Optimizer]:
    """bitsandbytes' AdamW with moments of 8 bits."""
    module = importlib.import_module("bitsandbytes.optim")
    assert module.__file__ is not None and Path(module.__file__).is_relative_to(folder)
    return cast(type[torch.optim.Optimizer], module.AdamW8bit)


CONTESTANTS = {each.__name__: each for each in (published, deepspeed, torchao, bitsandbytes)}


def serve() -> None:
    name, folder, threads, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print must not be taken for an answer
    torch.set_num_threads(threads)

    def answer(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    package = "roundpipe" if name == "published" else name
    kind = CONTESTANTS[name](folder)
    options = HYPER | ({"decoupled_weight_decay": True} if name == "published" else {})
    contestant = WithCasts(size, Gradients(size), lambda parameters: kind(parameters, **options))
    answer(importlib.metadata.version(package))
    for line in sys.stdin:
        match json.loads(line):
            case "refill":
                contestant.refill()
                answer(None)
            case "step":
                answer(contestant.step())
            case {"save": path}:
                torch.save(contestant.sample(), path)
                answer(None)


if __name__ == "__main__":
    serve()
