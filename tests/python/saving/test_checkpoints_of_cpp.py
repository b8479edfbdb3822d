"""A training that is saved in one language goes on in the other, with the same bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, load_checkpoint, save_checkpoint

PROGRAM = Path(__file__).resolve().parents[3] / "build" / "release" / "tests" / "cpp" / "checkpointed_training"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the C++ tests were not built in build/release")
FUSED, TORCH = "fused", "torch"


def in_cpp(folder: Path, kind: str, dtype: torch.dtype, devices: str, steps: int, *mode: str) -> list[str]:
    """The lines that the program prints; losses in hexadecimal."""
    name = str(dtype).removeprefix("torch.")
    command = [str(PROGRAM), str(folder), kind, name, devices, str(steps), *mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Training:
    """The program's twin."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(7)
        layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3)).to(dtype)
        self.kind, self.dtype = kind, dtype
        self.model = RoundPipe(layers, model_run_config=RoundPipeRunConfig(num_microbatch=3))
        self.optimizer: Any
        self.scheduler: Any = None
        if kind == FUSED:
            self.optimizer = roundpipe.optim.AdamW(self.model, lr=0.02, weight_decay=0.01)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.25 * step))
        else:
            self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=0.02, momentum=0.9)

    def loss(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (outputs - label).float().square().sum()

    def steps(self, count: int) -> list[str]:
        losses = []
        for _ in range(count):
            batch, labels = torch.randn(8, 5), torch.randn(8, 3)
            result = self.model.forward_backward(
                input_args=(batch.to(self.dtype),), label=labels, loss_fn=self.loss, return_outputs=False
            )
            losses.append(float(result if isinstance(result, torch.Tensor) else result[0]))
            if self.kind == FUSED:
                self.model.step(self.optimizer, lr_scheduler=self.scheduler)
            else:

                def update() -> None:
                    self.optimizer.step()
                    self.optimizer.zero_grad()

                self.model.step(update, is_async=False)
        return [same_form(loss) for loss in losses]

    def save(self, folder: Path) -> None:
        state = {"note": "from Python", "array": np.arange(5)}
        save_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.scheduler, state=state, wait=True)

    def load(self, folder: Path) -> roundpipe.Loaded:
        return load_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.scheduler)


def same_form(loss: float | str) -> str:
    return (float.fromhex(loss) if isinstance(loss, str) else loss).hex()


CASES = [(FUSED, torch.float32), (FUSED, torch.bfloat16), (TORCH, torch.float32)]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_python_goes_on_with_a_training_of_cpp(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    whole = in_cpp(tmp_path / "whole", kind, dtype, "virtual:2", 6)
    first = in_cpp(tmp_path / "run", kind, dtype, "virtual:3", 3)
    assert first == whole[:3]
    roundpipe.devices("virtual:2")
    training = Training(kind, dtype)
    torch.manual_seed(0)
    loaded = training.load(tmp_path / "run")
    assert loaded.step == 3
    if kind == FUSED:
        assert loaded.state["note"] == "from C++" and loaded.state["array"].tolist() == [0, 1, 2, 3]
    assert training.steps(3) == [same_form(line) for line in whole[3:]]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_cpp_goes_on_with_a_training_of_python(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    roundpipe.devices("virtual:2")
    training = Training(kind, dtype)
    training.steps(3)
    training.save(tmp_path / "python")
    expected = training.steps(3)
    shutil.copytree(tmp_path / "python", tmp_path / "cpp")  # one writer for each folder
    lines = in_cpp(tmp_path / "cpp", kind, dtype, "virtual:1", 3, "resume")
    if kind == FUSED:
        assert lines.pop(0) == "from Python 10"
    assert [same_form(line) for line in lines] == expected


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_both_languages_train_with_the_same_bits(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    roundpipe.devices("virtual:2")
    lines = in_cpp(tmp_path, kind, dtype, "virtual:2", 4)
    assert Training(kind, dtype).steps(4) == [same_form(line) for line in lines]
