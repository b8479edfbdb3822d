"""What the robustness tests share: small models, and faults that can be switched on."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

PACKAGE_PARENT = Path(roundpipe.__file__).resolve().parents[1]


def give_free_memory_back() -> None:
    """From malloc to the system, so that the process's memory is what is in use, whatever ran before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


Loss = Callable[[Any, Any], Any]


def squared_error(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (outputs - label).square().sum()


class Faulty(nn.Module):
    """A linear layer that misbehaves when told to. Use `fault()` to tell it.

    Args:
        width: of input and output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.heal()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        where = self.control["where"]
        recompute = roundpipe.doing_recompute()
        if where == "forward" or (where == "recompute" and recompute):
            self.raise_error()
        value = self.inner(value)
        if where == "backward hook":
            value.register_hook(lambda gradient: self.raise_error())
        if where == "autograd function":
            value = _FailingBackward.apply(value, self)
        if where == "out of memory":
            torch.empty(1 << 40)
        if where == "nan":
            value = value * float("nan")
        return value

    def raise_error(self) -> None:
        if self.control["microbatches_before"] > 0:
            self.control["microbatches_before"] -= 1
            return
        raise self.control["error"]  # the line of the fault

    def fault(self, where: str, error: BaseException | None = None, microbatches_before: int = 0) -> None:
        # Another object each time: calls that are under way keep the one that they were made with.
        self.control = {"where": where, "error": error, "microbatches_before": microbatches_before}

    def heal(self) -> None:
        self.control = {"where": None, "error": None, "microbatches_before": 0}


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layer: Faulty) -> torch.Tensor:
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.raise_error()
        return gradients[0], None


def faulty_model(width: int = 6, layers: int = 4) -> tuple[nn.Sequential, Faulty]:
    """Linear, batch norm, dropout and a layer that can fail in the middle; everything that keeps state."""
    torch.manual_seed(7)
    faulty = Faulty(width)
    front = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)), nn.Dropout(0.3)]
    back = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers - 3)]
    return nn.Sequential(*front, faulty, *back, nn.BatchNorm1d(width)), faulty


def state_of(pipe: Any) -> dict[str, torch.Tensor]:
    """Parameters, gradients and buffers, after everything is done."""
    pipe.synchronize()
    state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for name, parameter in pipe._original_model.named_parameters():
        if parameter.grad is not None:
            state[f"{name}.grad"] = parameter.grad.clone()
    return state


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    different = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
    assert not different, f"not the same bits: {different}"


def sgd_step(model: Any, rate: float = 0.05) -> Callable[[], None]:
    """A step function over the optimizer's parameters that needs no state."""

    @torch.no_grad()
    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=rate)
                parameter.grad = None

    return step


def script_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(PACKAGE_PARENT), environment.get("PYTHONPATH")) if part
    )
    environment["OMP_NUM_THREADS"] = "1"
    return environment


def pipe_of(model: nn.Module, microbatches: int | None = None, **options: Any) -> RoundPipe:
    """A RoundPipe with a fixed name, so that its random numbers depend on nothing else."""
    return RoundPipe(model, name="tested", model_run_config=RoundPipeRunConfig(num_microbatch=microbatches, **options))
