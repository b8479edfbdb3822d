"""A model whose last reference is held by its own loss function, and so by a thread of its devices."""

from __future__ import annotations

import gc
import threading
import weakref

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe


class Trainer:
    """Owns a model, and is owned by the loss function that it gives to the model."""

    def __init__(self, devices: int) -> None:
        roundpipe.devices(f"virtual:{devices}")
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.model = RoundPipe(layers, name="owned")

    def loss(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean()

    def call(self) -> None:
        batch = torch.randn(6, 8)
        self.model.forward_backward((batch,), label=batch, loss_fn=self.loss)


def test_a_device_may_drop_the_model_that_it_works_for() -> None:
    dropped = []
    for index in range(40):
        trainer = Trainer(1 + index % 3)
        trainer.call()
        gone = threading.Event()
        weakref.finalize(trainer, gone.set)
        dropped.append(gone)
        del trainer  # its backward may still be running, on a pool that the next one replaces
    roundpipe.devices("virtual:2")
    probe = Trainer(2)
    probe.model.forward_backward((torch.randn(6, 8),), loss_fn=lambda outputs, _: outputs.square().mean())
    probe.model.synchronize()
    gc.collect()
    assert all(gone.wait(60) for gone in dropped)
