"""Small trainings that can be saved, built anew, and resumed; their losses and final state can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig

WIDTH = 16


class NormedLayer(nn.Module):
    """Draws random numbers, and has buffers that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)))


@dataclass
class Recipe:
    """How a training is made.

    Attributes:
        optimizer: "fused" or "torch".
        dtype: of the weights.
        scaled: losses are scaled by a `GradScaler`, of which some overflow.
        calls: batches summed for each step.
        options: of the fused optimizer.
        frozen: layers whose parameters do not train.
    """

    optimizer: str = "fused"
    kind: str = "AdamW"
    dtype: torch.dtype = torch.float32
    is_async: bool = True
    scaled: bool = False
    clip: float | None = None
    calls: int = 1
    normed: bool = True
    frozen: tuple[int, ...] = ()
    num_microbatch: int | None = 3
    options: dict[str, Any] = field(default_factory=dict)


class Resumable:
    """A training that is saved with values of its own.

    Attributes:
        model: in the pipeline.
        optimizer: of it.
        scheduler: of the optimizer.
        scaler: of the losses; None if they are not scaled.
        calls: batches summed for each step.
    """

    model: RoundPipe
    optimizer: Any
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: GradScaler | None
    calls: int

    def call(self) -> None:
        """One batch forward and backward."""
        raise NotImplementedError

    def step(self) -> None:
        """One step of the optimizer."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Any]:
        """The values that are saved beside the rest."""
        raise NotImplementedError

    def take(self, state: dict[str, Any]) -> None:
        """Goes on with values of `own_state`."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """Trains for a number of steps."""
        for _ in range(steps):
            for _ in range(self.calls):
                self.call()
            self.step()

    def save(self, folder: Path | str, **options: Any) -> roundpipe.Save:
        """Saves a checkpoint of the present state."""
        return roundpipe.save_checkpoint(
            folder,
            self.model,
            self.optimizer,
            lr_scheduler=self.scheduler,
            scaler=self.scaler,
            state=self.own_state(),
            **options,
        )

    def load(self, folder: Path | str, **options: Any) -> roundpipe.Loaded:
        """Loads the newest checkpoint."""
        loaded = roundpipe.load_checkpoint(
            folder, self.model, self.optimizer, lr_scheduler=self.scheduler, scaler=self.scaler, **options
        )
        self.take(loaded.state)
        return loaded


class Training(Resumable):
    """A model, its optimizer, scheduler and scaler, and the batches, which depend on torch's generator."""

    def __init__(self, recipe: Recipe, devices: int) -> None:
        roundpipe.devices(f"virtual:{devices}")
        self.recipe, self.calls = recipe, recipe.calls
        torch.manual_seed(5)
        layer: Callable[[], nn.Module] = NormedLayer if recipe.normed else lambda: nn.Linear(WIDTH, WIDTH)
        layers = nn.Sequential(*(layer() for _ in range(4)), nn.Linear(WIDTH, WIDTH)).to(recipe.dtype)
        for index in recipe.frozen:
            layers[index].requires_grad_(False)
        self.layers = layers
        dtype = torch.float32 if recipe.optimizer == "torch" else None
        config = RoundPipeRunConfig(num_microbatch=recipe.num_microbatch)
        self.model = RoundPipe(layers, optim_dtype=dtype, name="resumed", model_run_config=config)
        self.scaler = GradScaler("cpu", init_scale=512.0, growth_interval=3) if recipe.scaled else None
        if recipe.optimizer == "fused":
            self.optimizer = getattr(roundpipe.optim, recipe.kind)(self.model, lr=0.01, **recipe.options)
        else:
            self.optimizer = getattr(torch.optim, recipe.kind)(self.model.optim_parameters(), lr=0.01, **recipe.options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        torch.manual_seed(11)
        self.losses: list[torch.Tensor] = []

    def loss(self, outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """The squared error, scaled if there is a scaler."""
        loss = (outputs - label).float().square().mean()
        if len(self.losses) % 7 == 4 and self.scaler is not None:
            loss = loss * float("inf")
        return loss if self.scaler is None else self.scaler.scale(loss)

    def call(self) -> None:
        """One batch forward and backward."""
        batch, label = torch.randn(2, 6, WIDTH).to(self.recipe.dtype)
        loss = self.model.forward_backward((batch,), label=label, loss_fn=self.loss)
        self.losses.append(loss)

    def step(self) -> None:
        """One step of the optimizer."""
        if self.recipe.optimizer == "fused":
            self.model.step(
                self.optimizer,
                is_async=self.recipe.is_async,
                max_grad_norm=self.recipe.clip,
                scaler=self.scaler,
                lr_scheduler=self.scheduler,
            )
        else:
            self.model.step(self.update, self.recipe.is_async)

    def update(self) -> None:
        """The step function of a torch optimizer."""
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def own_state(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def take(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]

    def final(self) -> dict[str, torch.Tensor]:
        """Weights, buffers, moments and losses, once all work is done."""
        self.model.synchronize()
        tensors = {f"weights.{name}": value.clone() for name, value in self.layers.state_dict().items()}
        for key, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value).clone()
        tensors["losses"] = torch.stack(self.losses)
        tensors["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        if self.scaler is not None:
            tensors["scale"] = torch.tensor(self.scaler.get_scale())
        tensors["drawn"] = torch.rand(4)
        return tensors


def assert_same_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Fails unless both have the same names and bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value.nan_to_num(), theirs[name].nan_to_num()), name
