"""Gradients that are used as they land: the same bits, and clipping by the last step's norm or in two passes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import script_environment
from roundpipe import RoundPipe, RoundPipeRunConfig

WIDTH, LAYERS = 16, 5


class Training:
    def __init__(self, devices: str, dtype: torch.dtype = torch.float32, rule: Any = None, **formats: Any) -> None:
        roundpipe.devices(devices)
        torch.manual_seed(0)
        made = nn.Sequential(*(self.layer(dtype) for _ in range(LAYERS)))
        self.dtype = dtype
        self.model = RoundPipe(made, name="at_once", model_run_config=RoundPipeRunConfig(num_microbatch=3))
        rule = roundpipe.optim.AdamW if rule is None else rule
        self.optimizer = rule(self.model, lr=0.05, **formats)
        self.steps = 0

    @staticmethod
    def layer(dtype: torch.dtype) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def batch(self) -> torch.Tensor:
        self.steps += 1
        return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(self.steps)).to(self.dtype)

    def step(self, **options: Any) -> Any:
        self.losses = [self.call(self.batch())]
        return self.model.step(self.optimizer, is_async=False, **options)

    def call(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.forward_backward((batch,), loss_fn=lambda o, _: (o.float() - 1).square().sum())
        return found

    def step_in_two_passes(self, max_grad_norm: float) -> Any:
        batch = self.batch()
        first = self.call(batch)
        norm = self.model.measure_gradients(self.optimizer)
        self.losses = [first, self.call(batch)]
        step = self.model.step(self.optimizer, is_async=False, max_grad_norm=max_grad_norm, clip_by="measured_norm")
        assert step.grad_norm == norm
        return step

    def weights(self) -> list[torch.Tensor]:
        self.model.synchronize()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def same(a: Training, b: Training) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights(), strict=True))


@pytest.mark.parametrize("devices", ["virtual:1", "virtual:2", "virtual:3", "virtual:4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_gradients_that_wait(devices: str, dtype: torch.dtype) -> None:
    formats = {} if dtype == torch.float32 else {"masters": "24bit", "moments": "8bit"}
    plain, at_once = Training(devices, dtype, **formats), Training(devices, dtype, gradients="at_once", **formats)
    for _ in range(4):
        norms = [float(training.step(max_grad_norm=math.inf)) for training in (plain, at_once)]
        assert norms[0] == norms[1] > 0
    assert same(plain, at_once)


class WithDraws(Training):
    """Some of its layers draw random numbers, and some have buffers that each call changes."""

    @staticmethod
    def layer(dtype: torch.dtype) -> nn.Module:
        drawing = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.BatchNorm1d(WIDTH, dtype=dtype))
        return drawing.append(nn.Dropout(0.25))

    def weights(self) -> list[torch.Tensor]:
        return [*super().weights(), *(buffer.clone() for buffer in self.model.buffers())]


@pytest.mark.filterwarnings("ignore:.* has BatchNorm1d")
@pytest.mark.parametrize(
    ("devices", "disk"), [("virtual:1", False), ("virtual:2", True), ("virtual:3", False), ("virtual:4", False)]
)
def test_two_passes_clip_as_gradients_that_wait(devices: str, disk: bool, tmp_path: Path) -> None:
    formats: dict[str, Any] = {"masters": "24bit"} | ({"disk": tmp_path} if disk else {"moments": "8bit"})
    plain = WithDraws(devices, torch.bfloat16, **(formats | {"disk": None}))
    passes = WithDraws(devices, torch.bfloat16, gradients="at_once", **formats)
    for _ in range(3):
        norm = float(plain.step(max_grad_norm=0.5))
        assert float(passes.step_in_two_passes(0.5)) == norm > 0.5
        assert all(torch.equal(plain.losses[0], loss) for loss in passes.losses)
    assert same(plain, passes)
    assert passes.model.calls == plain.model.calls


def test_with_a_disk(tmp_path: Path) -> None:
    plain = Training("virtual:2", torch.bfloat16)
    both = Training("virtual:2", torch.bfloat16, gradients="at_once", disk=tmp_path)
    for training in (plain, both):
        for _ in range(4):
            training.step()
    assert same(plain, both)


def test_clips_by_the_norm_of_the_step_before() -> None:
    training = Training("virtual:2", rule=roundpipe.optim.SGD, gradients="at_once")
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    plain.load_state_dict(dict(zip(plain.state_dict(), training.weights(), strict=True)))
    optimizer, last = torch.optim.SGD(plain.parameters(), lr=0.05), None
    for _ in range(4):
        norm = float(training.step(max_grad_norm=0.5, clip_by="last_norm"))
        training.steps -= 1  # the same batch
        for part in training.batch().chunk(3):
            (plain(part) - 1).square().sum().backward()
        own = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]))
        assert norm == pytest.approx(float(own), rel=1e-5)
        for parameter in plain.parameters():
            if last is not None and parameter.grad is not None:
                parameter.grad *= min(1.0, 0.5 / (last + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        last = norm
    # Sums of microbatches are rounded in another order.
    for ours, theirs in zip(training.weights(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def by_last_norm(training: Training) -> None:
    training.step(max_grad_norm=0.5, clip_by="last_norm")


def in_two_passes(training: Training) -> None:
    training.step_in_two_passes(0.5)


@pytest.mark.parametrize("step", [by_last_norm, in_two_passes])
@pytest.mark.parametrize("way", ["checkpoint", "state_dict"])
def test_a_resumed_run_clips_by_the_same_norm(way: str, step: Callable[[Training], None], tmp_path: Path) -> None:
    whole = Training("virtual:2", gradients="at_once")
    for _ in range(4):
        step(whole)
    first = Training("virtual:2", gradients="at_once")
    for _ in range(2):
        step(first)
    resumed = Training("virtual:3", gradients="at_once")
    if way == "checkpoint":
        roundpipe.save_checkpoint(tmp_path, first.model, first.optimizer, wait=True)
        roundpipe.load_checkpoint(tmp_path, resumed.model, resumed.optimizer)
    else:
        state = first.optimizer.state_dict()
        with torch.no_grad():
            for target, weights in zip(resumed.model.parameters(), first.weights(), strict=True):
                target.copy_(weights)
        resumed.optimizer.load_state_dict(state)
    resumed.steps = first.steps
    for _ in range(2):
        step(resumed)
    assert same(whole, resumed)


def test_a_checkpoint_between_the_passes_asks_for_the_first_again(tmp_path: Path) -> None:
    first, resumed = (Training("virtual:2", gradients="at_once") for _ in range(2))
    first.call(first.batch())
    first.model.measure_gradients(first.optimizer)
    roundpipe.save_checkpoint(tmp_path, first.model, first.optimizer, wait=True)
    roundpipe.load_checkpoint(tmp_path, first.model, first.optimizer)
    roundpipe.load_checkpoint(tmp_path, resumed.model, resumed.optimizer)
    for training in (first, resumed):
        with pytest.raises(ValueError, match="no norm has been measured since the last step"):
            training.step(max_grad_norm=0.5, clip_by="measured_norm")
    assert first.model.calls == resumed.model.calls == 1


def test_a_scaler_needs_all_gradients() -> None:
    at_once, scaler = Training("virtual:1", gradients="at_once"), roundpipe.GradScaler()
    at_once.model.forward_backward((at_once.batch(),), loss_fn=lambda o, _: scaler.scale(o.square().sum()))
    with pytest.raises(ValueError, match="a scaler needs all"):
        at_once.model.step(at_once.optimizer, is_async=False, scaler=scaler)


def test_exit_before_the_step() -> None:
    program = """
import torch, roundpipe
model = roundpipe.RoundPipe(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6))), name="exit")
optimizer = roundpipe.optim.AdamW(model, gradients="at_once")
model.forward_backward((torch.ones(6, 16),), loss_fn=lambda outputs, _: outputs.square().sum())
print("over")
"""
    environment = script_environment() | {"ROUNDPIPE_DEVICES": "virtual:2"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0 and ended.stdout == "over\n", ended.stderr


def test_what_needs_all_gradients_is_refused_by_name() -> None:
    at_once = Training("virtual:1", gradients="at_once")
    at_once.model.forward_backward((at_once.batch(),), loss_fn=lambda o, _: o.square().sum())
    with pytest.raises(ValueError, match="expected a synchronous one"):
        at_once.model.step(at_once.optimizer)
    with pytest.raises(ValueError, match=r"clip_by='last_norm'.*clip_by='measured_norm'"):
        at_once.model.step(at_once.optimizer, is_async=False, max_grad_norm=1.0)
    for clip_by in ("last_norm", "measured_norm"):
        with pytest.raises(ValueError, match=f"clip_by='{clip_by}' is given without max_grad_norm"):
            at_once.model.step(at_once.optimizer, is_async=False, clip_by=clip_by)
    with pytest.raises(ValueError, match="no norm has been measured since the last step"):
        at_once.model.step(at_once.optimizer, is_async=False, max_grad_norm=1.0, clip_by="measured_norm")
    with pytest.raises(ValueError, match="expected a step after each forward_backward"):
        at_once.model.forward_backward((at_once.batch(),), loss_fn=lambda o, _: o.square().sum())
    at_once.model.step(at_once.optimizer, is_async=False)
    with pytest.raises(ValueError, match=r"\[measure_gradients\] there are no gradients"):
        at_once.model.measure_gradients(at_once.optimizer)
    plain = Training("virtual:1")
    for clip_by in ("last_norm", "measured_norm"):
        with pytest.raises(ValueError, match="expected it with an optimizer that uses gradients at once"):
            plain.step(max_grad_norm=1.0, clip_by=clip_by)
    with pytest.raises(ValueError, match="expected one that uses them at once"):
        plain.model.measure_gradients(plain.optimizer)
    with pytest.raises(ValueError, match="was not made for this model"):
        plain.model.measure_gradients(at_once.optimizer)
    with pytest.raises(ValueError, match="clip_by is 'mean', expected"):
        plain.step(max_grad_norm=1.0, clip_by="mean")
    loss = at_once.model(at_once.batch()).sum()
    with pytest.raises(RuntimeError, match=r"\[backward\] this backward ends before a step can begin"):
        loss.backward()
