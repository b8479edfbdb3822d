"""What goes wrong in a user's code reaches the caller as it was raised, and the next good step is right."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundpipe
from robustness import Faulty, assert_same, faulty_model, pipe_of, sgd_step, squared_error, state_of
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH = 6
BATCH = 8


class OwnError(Exception):
    """An exception whose constructor cannot be called with a message alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


# Where a fault happens -> what the caller gets.
FAULTS: dict[str, BaseException] = {
    "forward": KeyError("in the forward"),
    "recompute": FileNotFoundError("in the recomputation"),
    "backward hook": OwnError(3, "in a hook"),
    "autograd function": AssertionError("in a custom function"),
    "out of memory": torch.OutOfMemoryError("whose cap is 64.00 MiB"),
}


def plan(*, fused: bool) -> ModelExecutePlan:
    """The layer that may fail is a stage of its own."""
    stages = ModelExecutePlan()
    stages.fwd_plan = [range(2), range(2, 3)] if fused else [range(2), range(2, 3), range(3, 5)]
    stages.bwd_plan = [range(3, 5), range(2, 3), range(2)]
    return stages


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def fused_call(pipe: RoundPipe, number: int) -> None:
    value, label = batch(number)
    config = RoundPipeRunConfig(execute_plan=plan(fused=True))
    pipe.forward_backward((value,), label=label, loss_fn=squared_error, run_config=config)


def two_part_call(pipe: RoundPipe, number: int) -> None:
    value, label = batch(number)
    config = RoundPipeRunConfig(execute_plan=plan(fused=False))
    squared_error(pipe(value, roundpipe_run_config=config), label).backward()


Call = Callable[[RoundPipe, int], None]
CALLS = {"forward_backward": fused_call, "forward and backward": two_part_call}


def make(devices: int, microbatches: int = 3) -> tuple[RoundPipe, Faulty]:
    roundpipe.devices(f"virtual:{devices},memory=64MiB,debug")
    model, faulty = faulty_model(WIDTH, 4)
    return pipe_of(model, microbatches), faulty


def train_with(pipe: RoundPipe, call: Call, go_wrong: Callable[[], None] | None) -> dict[str, torch.Tensor]:
    """Two calls a step, with something going wrong before, between and after them."""
    for step in range(2):
        for part in range(2):
            if go_wrong is not None:
                go_wrong()
            call(pipe, 10 * step + part)
        if go_wrong is not None:
            go_wrong()
        pipe.step(sgd_step(pipe))
    call(pipe, 99)
    return state_of(pipe)


def expect_error(attempt: Callable[[], Any], error: BaseException, line: str) -> None:
    with pytest.raises(type(error)) as raised:
        attempt()
    assert raised.value is error or str(error) in str(raised.value)
    assert line in "".join(traceback.format_exception(raised.value)), "the traceback does not show the failing line"


@sweep("where, devices, style", FAULTS, [1, 2, 3, 4], CALLS)
def test_error_in_a_layer(where: str, devices: int, style: str) -> None:
    call = CALLS[style]
    error = FAULTS[where]
    pipe, faulty = make(devices)

    def go_wrong() -> None:
        faulty.fault(where, error, microbatches_before=devices % 2)

        def attempt() -> None:
            call(pipe, 1000)
            pipe.synchronize()

        line = "torch.empty(1 << 40)" if where == "out of memory" else "# the line of the fault"
        expect_error(attempt, error, line)
        faulty.heal()

    assert_same(train_with(pipe, call, go_wrong), train_with(make(devices)[0], call, None))


def test_a_backward_that_failed_may_be_tried_again() -> None:
    pipe, faulty = make(2)
    value, label = batch(0)
    for _ in range(3):
        faulty.fault("backward hook", ValueError("once"))
        loss = squared_error(pipe(value), label)
        with pytest.raises(ValueError, match="once"):
            loss.backward(retain_graph=True)
            pipe.synchronize()
        faulty.heal()
        with pytest.raises((ValueError, RuntimeError)):
            loss.backward()
            pipe.synchronize()
    assert_same(train_with(pipe, two_part_call, None), train_with(make(2)[0], two_part_call, None))


# --- the optimizer's thread ---


def test_step_of_a_call_that_fails_does_nothing() -> None:
    pipe, faulty = make(2)
    faulty.fault("backward hook", ValueError("late"))
    stepped: list[bool] = []
    with pytest.raises(ValueError, match="late"):
        fused_call(pipe, 0)
        pipe.step(lambda: stepped.append(True))
        pipe.synchronize()
    faulty.heal()
    pipe.synchronize()
    assert not stepped
    assert_same(train_with(pipe, fused_call, None), train_with(make(2)[0], fused_call, None))


# --- interplay ---
