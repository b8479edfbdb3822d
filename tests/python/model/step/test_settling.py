"""What lets calls read the weights of an asynchronous step at once, and what leaves them one step behind: the lists of
docs/training-loop.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from sweeps import mostly_long

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def loss_of(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.square().sum()


class Training:
    """A model that is stepped asynchronously, by an optimizer of ours or one of torch's."""

    def __init__(self, fused: bool) -> None:
        roundpipe.devices("virtual:2")
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.model = RoundPipe(layers, name="settling", model_run_config=RoundPipeRunConfig(num_microbatch=2))
        self.fused = fused
        self.optimizer: Any
        if fused:
            self.optimizer = roundpipe.optim.AdamW(self.model, lr=0.05)
        else:
            self.optimizer = torch.optim.AdamW(self.model.optim_parameters(), lr=0.05)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> float:
        loss = float(self.model.forward_backward((BATCH,), loss_fn=loss_of))
        self.model.step(self.optimizer if self.fused else self.update, is_async=True)
        return loss


Between = Callable[[Training, Path], Any]
LOOKS: dict[str, Between] = {
    "predict_memory": lambda own, _: own.model.predict_memory((BATCH,), loss_fn=loss_of),
    "printing": lambda own, _: print(own.model, own.optimizer, own.model[0], own.model[0].weight),
    "parameters": lambda own, _: [float(parameter.sum()) for parameter in own.model.parameters()],
    "timeline": lambda own, _: (own.model.timeline(2), own.model.last_records(), own.model.last_plan()),
    "costs": lambda own, _: (own.model.costs(), own.model.busy_share(), own.model.host_bytes()),
    "save_checkpoint": lambda own, folder: roundpipe.save_checkpoint(folder, own.model, own.optimizer, wait=True),
    "a call": lambda own, _: own.model(BATCH),
}
SETTLING: dict[str, Between] = {
    "synchronize": lambda own, _: own.model.synchronize(),
    "state_dict": lambda own, _: own.model.state_dict(),
    "load_state_dict": lambda own, _: own.model.load_state_dict(own.model.state_dict()),
    "apply": lambda own, _: own.model.apply(lambda module: None),
}


def losses_with(between: Between, fused: bool, folder: Path) -> list[float]:
    training = Training(fused)
    losses = []
    for step in range(6):
        losses.append(training.step())
        if step == 2:
            between(training, folder)
    return losses


@pytest.mark.parametrize("fused", mostly_long([True, False], True))
@pytest.mark.filterwarnings("ignore:.*outside of step_fn")
def test_looks_leave_the_losses_as_they_are(fused: bool, tmp_path: Path) -> None:
    expected = losses_with(lambda own, folder: None, fused, tmp_path)
    for name, look in LOOKS.items():
        assert losses_with(look, fused, tmp_path / name) == expected, name


@pytest.mark.parametrize("fused", [True, False])
def test_what_settles_does_it_in_the_same_way(fused: bool, tmp_path: Path) -> None:
    plain = losses_with(lambda own, folder: None, fused, tmp_path)
    expected = losses_with(SETTLING["synchronize"], fused, tmp_path)
    assert expected[:3] == plain[:3] and expected[3] != plain[3]
    for name, settling in SETTLING.items():
        assert losses_with(settling, fused, tmp_path) == expected, name


def test_the_optimizer_s_state_dict_settles(tmp_path: Path) -> None:
    expected = losses_with(SETTLING["synchronize"], True, tmp_path)
    assert losses_with(lambda own, _: own.optimizer.state_dict(), True, tmp_path) == expected
