"""Trains with moments, or masters, on a disk, in a process of its own. Run by tests, with a folder, what it holds, a
run and what to do.

train STEPS: from the newest checkpoint on, saving each step; prints a line for each, and the weights' checksum at the
end. lives COUNT: so many processes train in turn, each of which is killed after a step or a few, and a last one makes
one more step. full: makes the disk refuse writes after two steps, saves, and goes on when it takes them again.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.model.step.fused_optimizer import DiskHolds, Masters

WIDTH, LAYERS = 32, 6


class Training:
    def __init__(
        self,
        disk: str | None,
        holds: DiskHolds = "moments",
        devices: str = "virtual:2",
        masters: Masters = "float32",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        roundpipe.devices(devices)
        torch.manual_seed(0)
        made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)))
        self.model = RoundPipe(made, name="disk", model_run_config=RoundPipeRunConfig(num_microbatch=2))
        kept = {} if disk is None else {"disk": disk, "disk_memory": 24576, "disk_holds": holds}
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-2, masters=masters, **kept)
        self.dtype = dtype
        self.steps = 0

    def resume(self, run: Path) -> None:
        if roundpipe.latest(run) is not None:
            self.steps = roundpipe.load_checkpoint(run, self.model, self.optimizer).step

    def step(self, is_async: bool) -> None:
        values = torch.Generator().manual_seed(self.steps)
        batch = torch.randn(4, WIDTH, generator=values).to(self.dtype)
        self.model.forward_backward((batch,), loss_fn=lambda outputs, _: (outputs.float() - 1).square().mean())
        self.model.step(self.optimizer, is_async=is_async)
        self.steps += 1

    def checksum(self) -> str:
        self.model.synchronize()
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
        return digest.hexdigest()


def train(training: Training, run: Path, steps: int) -> None:
    training.resume(run)
    while training.steps < steps:
        training.step(is_async=True)
        roundpipe.save_checkpoint(run, training.model, training.optimizer, wait=True, keep_last=2)
        print("step", training.steps, flush=True)
    print("weights", training.checksum(), flush=True)


def lives(disk: str, holds: DiskHolds, run: Path, count: int) -> None:
    """Nothing of the engine has begun here, so that children may be made by fork()."""
    for life in range(count):
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(tells, 1)
            train(Training(disk, holds), run, steps=1_000_000)
        os.close(tells)
        with os.fdopen(told) as lines:
            for _ in range(1 + life % 3):
                lines.readline()
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert os.listdir(disk) == []
    training = Training(disk, holds)
    training.resume(run)
    print("reached", training.steps, flush=True)
    train(training, run, training.steps + 1)


def full(training: Training, run: Path) -> None:
    for _ in range(2):
        training.step(is_async=False)
    training.model.synchronize()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))  # Python has SIGXFSZ ignored: writes fail
    told = ""
    try:
        training.step(is_async=False)
    except RuntimeError as error:  # of a write behind the step before, if it was late: this step has not begun
        told = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        training.model.step(training.optimizer, is_async=False)
        training.steps += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
    for _ in range(2):  # in the end, all that is in memory has failed
        try:
            training.model.synchronize()
        except RuntimeError as error:
            told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    roundpipe.save_checkpoint(run, training.model, training.optimizer, wait=True)
    training.step(is_async=False)
    print("told", told)
    print("weights", training.checksum(), flush=True)


def main() -> None:
    disk, run, what = sys.argv[1], Path(sys.argv[3]), sys.argv[4]
    holds: DiskHolds = "masters" if sys.argv[2] == "masters" else "moments"
    if what == "lives":
        lives(disk, holds, run, int(sys.argv[5]))
    elif what == "train":
        train(Training(disk or None), run, int(sys.argv[5]))
    else:
        full(Training(disk, holds), run)


if __name__ == "__main__":
    main()
