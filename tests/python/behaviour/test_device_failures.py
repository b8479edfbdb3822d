"""What a user sees when devices fail, hang and come back: the same bits, or an error that says what to do."""

from __future__ import annotations

import re
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn

import roundpipe
from reference_loops import plan_of
from robustness import faulty_model, squared_error
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH = 6
ROWS = 12


def pipe_of(*, tolerant: bool = True, fused: bool = True, verify_every: int = 0) -> RoundPipe:
    """Of given stages: how many microbatches a device computes must not depend on measured times."""
    model = faulty_model(WIDTH, 6)[0]
    plan = plan_of(len(model), [2, 4], [2, 4], fused)
    config = RoundPipeRunConfig(num_microbatch=3, fault_tolerant=tolerant, verify_every=verify_every, execute_plan=plan)
    return RoundPipe(model, model_run_config=config)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def called(pipe: RoundPipe, number: int) -> torch.Tensor:
    value, label = batch(number)
    return pipe.forward_backward((value,), label=label, loss_fn=squared_error)


def test_without_fault_tolerance_the_error_says_what_to_do() -> None:
    pool = roundpipe.devices("virtual:2,fail=1:error@4")
    pipe = pipe_of(tolerant=False)
    with pytest.raises(RoundPipeError, match=r"\[virtual:1\] the device failed.*1 of 2 are left") as raised:
        for number in range(4):
            called(pipe, number)
            pipe.synchronize()
    assert "with the option fault_tolerant" in str(raised.value)
    assert list(pool.failed) == ["virtual:1"]
    called(pipe, 9)
    pipe.synchronize()


class WaitsInBackward(nn.Linear):
    """A linear layer whose backward waits until it is let go."""

    control: ClassVar[dict[str, threading.Event]] = {}

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(value)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.let_go())
        return outputs

    def let_go(self) -> None:
        assert self.control["let go"].wait(20)


def test_the_error_says_which_layers_a_step_had_updated() -> None:
    def trained(devices: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights before and after a step, or a part of it."""
        torch.manual_seed(5)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
        layers[3] = WaitsInBackward(WIDTH, WIDTH, bias=False)
        let_go = WaitsInBackward.control["let go"] = threading.Event()
        before = [layer.weight.detach().clone() for layer in layers]
        plan = roundpipe.ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = [range(5)], [range(5, 6), range(2, 5), range(2)]
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
        roundpipe.devices(devices)
        pipe = RoundPipe(nn.Sequential(*layers), model_run_config=config)
        optimizer = roundpipe.optim.SGD(pipe, lr=1e-2)
        value, label = batch(0)
        pipe.submit((value,), label=label, loss_fn=squared_error)
        step = pipe.step(optimizer)
        for _ in range(20_000):  # until the last layer is updated; the backward waits
            if step._run.updated_blocks or threading.Event().wait(1e-3):
                break
        let_go.set()
        try:
            pipe.synchronize()
        except RoundPipeError as error:
            messages.append(str(error))
        pipe.synchronize()
        return before, [layer.weight.detach().clone() for layer in layers]

    messages: list[str] = []
    _, whole = trained("virtual:1")
    assert not messages
    before, after = trained("virtual:1,fail=error@4")  # the backward of the first two layers
    listed = re.search(r"had already updated layers ([\d, ]+) of 6 and leaves the others", messages[0])
    assert listed is not None, messages[0]
    updated = {int(layer) for layer in listed[1].split(", ")}
    assert {5} <= updated <= {2, 3, 4, 5}
    for layer in range(6):
        assert torch.equal(after[layer], whole[layer] if layer in updated else before[layer]), layer


def test_all_devices_fail_and_come_back() -> None:
    pool = roundpipe.devices("virtual:2,fail=error@3")
    pipe = pipe_of()
    with pytest.raises(RoundPipeError, match="the device failed"):
        for number in range(4):
            called(pipe, number)
            pipe.synchronize()
    with pytest.raises(RoundPipeError, match=r"every device of the pool has failed.*restore\(\)"):
        called(pipe, 0)
    assert pool.restore() == ["virtual:0", "virtual:1"]
    assert not pool.failed
    assert pool.restore() == []
    called(pipe, 0)
    pipe.synchronize()


def test_bad_faults() -> None:
    pool = roundpipe.devices("virtual:2")
    with pytest.raises(ValueError, match="'virtual:7' is not in the pool, expected one of virtual:0, virtual:1"):
        pool.inject_fault("virtual:7", "error@1")
    with pytest.raises(ValueError, match="'fire@1' is not a fault"):
        pool.inject_fault("virtual:1", "fire@1")
    with pytest.raises(ValueError, match="fault_tolerant is 'yes'"):
        RoundPipeRunConfig(fault_tolerant="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify_every is -1, expected an integer of at least 0"):
        RoundPipeRunConfig(verify_every=-1)
