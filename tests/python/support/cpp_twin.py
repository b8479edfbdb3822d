"""The training of tests/cpp/programs/checkpointed_training.cpp, in Python, and that program."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, load_checkpoint, save_checkpoint

PROGRAM = Path(__file__).resolve().parents[3] / "build" / "release" / "tests" / "cpp" / "checkpointed_training"
FUSED, GROUP, TORCH, COPIES = "fused", "group", "torch", "copies"


def in_cpp(folder: Path, kind: str, dtype: torch.dtype, devices: str, steps: int, *mode: str) -> list[str]:
    """The lines that the program prints; losses in hexadecimal."""
    name = str(dtype).removeprefix("torch.")
    command = [str(PROGRAM), str(folder), kind, name, devices, str(steps), *mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def tried_in_cpp(folders: Iterable[Path], kind: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What the program says of each folder that it loads: see there."""
    command = [str(PROGRAM), "-", kind, str(dtype).removeprefix("torch."), "virtual:2", "0", "try"]
    lines = "".join(f"{folder}\n" for folder in folders)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


class Whole(nn.Module):
    """Two models in the pipeline, and a layer on the host between them."""

    def __init__(self) -> None:
        super().__init__()
        config = RoundPipeRunConfig(num_microbatch=3)
        encoder = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.2))
        self.encoder = RoundPipe(encoder, name="encoder", model_run_config=config)
        self.bridge = nn.Linear(9, 9)
        self.decoder = RoundPipe(nn.Sequential(nn.Linear(9, 3)), name="decoder", model_run_config=config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.bridge(self.encoder(x)))
        return out


class Training:
    """The program's twin."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        torch.manual_seed(7)
        layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3)).to(dtype)
        self.kind, self.dtype = kind, dtype
        wider = torch.float32 if kind == COPIES else None
        self.model: Any = RoundPipe(layers, optim_dtype=wider, model_run_config=RoundPipeRunConfig(num_microbatch=3))
        if kind == GROUP:
            torch.manual_seed(7)
            self.model = AutoRoundPipe(Whole())
        self.optimizer: Any
        self.scheduler: Any = None
        if kind in (FUSED, GROUP):
            self.optimizer = roundpipe.optim.AdamW(self.model, lr=0.02, weight_decay=0.01)
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.25 * step))
        else:
            self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=0.02, momentum=0.9)

    def loss(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (outputs - label).float().square().sum()

    def calls(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            batch, labels = torch.randn(8, 5), torch.randn(8, 3)
            if self.kind == GROUP:
                loss = self.loss(self.model(batch), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
                continue
            result = self.model.forward_backward(
                input_args=(batch.to(self.dtype),), label=labels, loss_fn=self.loss, return_outputs=False
            )
            losses.append(float(result if isinstance(result, torch.Tensor) else result[0]))
        return losses

    def steps(self, count: int) -> list[str]:
        losses = []
        for _ in range(count):
            losses += self.calls(1)
            if self.kind in (FUSED, GROUP):
                self.model.step(self.optimizer, lr_scheduler=self.scheduler)
            else:

                def update() -> None:
                    self.optimizer.step()
                    self.optimizer.zero_grad()

                self.model.step(update, is_async=self.kind == COPIES)
        return [same_form(loss) for loss in losses]

    def save(self, folder: Path) -> None:
        state = {"note": "from Python", "array": np.arange(5)}
        save_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.scheduler, state=state, wait=True)

    def load(self, folder: Path) -> roundpipe.Loaded:
        return load_checkpoint(folder, self.model, self.optimizer, lr_scheduler=self.scheduler)


def same_form(loss: float | str) -> str:
    return (float.fromhex(loss) if isinstance(loss, str) else loss).hex()
