"""Programs of a user's habits on a model in the pipeline and on plain PyTorch: assigned weights, reads by every way,
losses of other kinds, saves and loads, what settles a delayed step and what does not. Every statement has the numbers
of plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import pipe_of

WIDTH = 4
LR, MOMENTUM = 0.05, 0.9
TOLERANCE = 1e-4  # sums of microbatches may be rounded otherwise than a batch's

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "sum": lambda outputs, label: (outputs - label).square().sum(),
    "mean": lambda outputs, label: nn.functional.mse_loss(outputs, label),
    "root": lambda outputs, label: (outputs - label).square().sum().sqrt(),
    "rows": lambda outputs, label: (outputs - label).abs().sum() / len(label),
}

# Ways to the weight of a chain's first layer, which settle nothing: the first row of the table in docs/optimizers.md.
READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "model[0].weight": lambda model: model[0].weight,
    "model[:2]": lambda model: model[:2][0].weight,
    "iteration": lambda model: next(iter(model)).weight,
    "parameters()": lambda model: next(iter(model.parameters())),
    "named_parameters()": lambda model: dict(model.named_parameters())["0.weight"],
    "get_parameter": lambda model: model.get_parameter("0.weight"),
    "get_submodule": lambda model: model.get_submodule("0").weight,
    "modules()": lambda model: next(module for module in model.modules() if isinstance(module, nn.Linear)).weight,
    "named_modules()": lambda model: dict(model.named_modules())["0"].weight,
    "children()": lambda model: next(iter(model.children())).weight,
}


def chain(layers: int) -> nn.Sequential:
    torch.manual_seed(1)
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(layers - 1):
        parts += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH))


class SilentProgram:
    """Both sides, and the statements as methods, which draw what they need from `chance`.

    `kind`: "loop": torch's optimizer over `parameters()`, as in plain PyTorch; "function": the same in a step function;
    "fused": an optimizer of the model. With the last two, steps may be asynchronous: a call reads the weights of the
    step before the last, until something settles that.
    """

    def __init__(self, folder: Path, kind: str, devices: int, layers: int, microbatches: int, seed: int) -> None:
        roundpipe.devices(f"virtual:{devices},debug")
        self.folder, self.kind, self.microbatches = folder, kind, microbatches
        self.chance = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.plain = chain(layers)
        self.model: Any = pipe_of(copy.deepcopy(self.plain), microbatches)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.plain.parameters()]
        self.plain_optimizer = torch.optim.SGD(self.masters, lr=LR, momentum=MOMENTUM)
        self.read = [m.detach().clone() for m in self.masters]  # by calls
        self.states: list[dict[str, torch.Tensor]] = []
        self.saved: list[tuple[Path, Any]] = []
        self.optimizer: Any
        if kind == "fused":
            self.optimizer = roundpipe.optim.SGD(self.model, lr=LR, momentum=MOMENTUM)
        else:
            parameters = self.model.parameters() if kind == "loop" else self.model.optim_parameters()
            self.optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)

    # -- statements -------------------------------------------------------------------------------------------------

    def call(self) -> None:
        value, label = self.batch()
        name = self.chance.choice(list(LOSSES))
        expected = self.expect(value, label, LOSSES[name])
        loss = self.model.forward_backward((value,), label=label, loss_fn=LOSSES[name])
        self.check(loss, expected, f"loss {name}")

    def call_with_a_loss_outside(self) -> None:
        value, label = self.batch()
        expected = self.expect(value, label, lambda outputs, part: (outputs * part).sum())
        loss = (self.model(value) * label).sum()
        loss.backward()
        self.check(loss.detach(), expected, "loss outside")

    def call_with_labels_of_other_rows(self) -> None:
        value, label = self.batch()
        other = label[:-1] if self.chance.random() < 0.5 else torch.cat([label, label[:1]])
        with pytest.raises(ValueError, match="label"):
            self.model.forward_backward((value,), label=other, loss_fn=LOSSES["rows"])

    def evaluate(self) -> None:
        value, _ = self.batch()
        with torch.no_grad():
            expected = self.with_read_weights()(value)
            self.check(self.model(value), expected, "outputs")

    def step(self) -> None:
        is_async = self.kind != "loop" and self.chance.random() < 0.6
        before = [m.detach().clone() for m in self.masters]
        self.make_step(is_async)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        self.read = before if is_async else [m.detach().clone() for m in self.masters]

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain_optimizer.zero_grad()
        if self.kind == "function":
            self.settle()

    def assign(self) -> None:
        """`parameter.data = value`, which calls and steps go on from."""
        index = self.chance.randrange(len(self.masters))
        parameter = list(self.model.parameters())[index]
        value = torch.randn(parameter.shape, generator=self.numbers)
        parameter.data = value
        with torch.no_grad():
            self.masters[index].copy_(value)
        self.read[index] = self.masters[index].detach().clone()

    def write(self) -> None:
        """In place, when nothing is under way."""
        if self.pending:
            self.synchronize()
        index, factor = self.chance.randrange(len(self.masters)), self.chance.choice([0.5, -1.0, 1.25])
        with torch.no_grad():
            list(self.model.parameters())[index].mul_(factor)
            self.masters[index].mul_(factor)
        self.read[index] = self.masters[index].detach().clone()

    def read_by_any_way(self) -> None:
        name = self.chance.choice(list(READS))
        shown = READS[name](self.model).detach()
        newest = self.kind != "function"  # the others are in optim_parameters()
        self.check(shown, self.masters[0].detach() if newest else self.read[0], name)

    def synchronize(self) -> None:
        self.model.synchronize()
        self.settle()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            self.check(parameter.detach(), master.detach(), "weights")
            self.check_gradient(parameter.grad, master.grad)

    def take_a_state(self) -> None:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.settle()
        for value, master in zip(state.values(), self.masters, strict=True):
            self.check(value, master.detach(), "state")
        self.states.append(state)

    def load_a_state(self) -> None:
        if not self.states:
            return
        state = self.chance.choice(self.states)
        self.model.load_state_dict(state)
        with torch.no_grad():
            for master, value in zip(self.masters, state.values(), strict=True):
                master.copy_(value)
        self.settle()

    def look(self) -> None:
        """What settles nothing."""
        value, label = self.batch()
        self.chance.choice(
            [
                lambda: repr(self.model),
                lambda: self.model.predict_memory((value,), label=label, loss_fn=LOSSES["sum"]),
                lambda: sum(p.numel() for p in self.model.parameters()),
                lambda: self.model.memory_prediction,
            ]
        )()

    def save(self) -> None:
        folder = self.folder / f"save-{len(self.saved)}"
        roundpipe.save_checkpoint(folder, self.model, self.optimizer, step=1, wait=True)
        kept = copy.deepcopy(
            (
                [m.detach() for m in self.masters],
                [m.grad for m in self.masters],
                self.read,
                self.plain_optimizer.state_dict(),
            )
        )
        self.saved.append((folder, kept))

    def load(self) -> None:
        if not self.saved:
            return
        folder, (masters, gradients, read, optimizer) = self.chance.choice(self.saved)
        roundpipe.load_checkpoint(folder, self.model, self.optimizer)
        with torch.no_grad():
            for master, value, gradient in zip(self.masters, masters, gradients, strict=True):
                master.copy_(value)
                master.grad = copy.deepcopy(gradient)
        self.plain_optimizer.load_state_dict(copy.deepcopy(optimizer))
        self.read = copy.deepcopy(read)

    # -- both sides -------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return any(not torch.equal(m, r) for m, r in zip(self.masters, self.read, strict=True))

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.microbatches + self.chance.randrange(4)
        value, label = torch.randn(2, rows, WIDTH, generator=self.numbers)
        return value, label

    def with_read_weights(self) -> nn.Sequential:
        with torch.no_grad():
            for parameter, value in zip(self.plain.parameters(), self.read, strict=True):
                parameter.copy_(value)
        return self.plain

    def expect(self, value: torch.Tensor, label: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
        """The sum of the microbatches' losses; their gradients go to the masters."""
        plain = self.with_read_weights()
        for parameter, master in zip(plain.parameters(), self.masters, strict=True):
            parameter.grad = None if master.grad is None else master.grad.clone()
        losses = []
        parts = value.tensor_split(self.microbatches), label.tensor_split(self.microbatches)
        for part, labels in zip(*parts, strict=True):
            losses.append(loss_fn(plain(part), labels))
            losses[-1].backward()
        for parameter, master in zip(plain.parameters(), self.masters, strict=True):
            master.grad = parameter.grad
        return torch.stack(losses).sum().detach()

    def make_step(self, is_async: bool) -> None:
        def update() -> None:
            self.optimizer.step()
            self.optimizer.zero_grad()

        if self.kind == "loop":
            update()
        else:
            self.model.step(self.optimizer if self.kind == "fused" else update, is_async)

    def settle(self) -> None:
        self.read = [m.detach().clone() for m in self.masters]

    def check(self, ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            ours, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda message: f"{what}: {message}"
        )

    def check_gradient(self, ours: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        if ours is None or expected is None:
            assert ours is expected, (ours, expected)
        else:
            self.check(ours, expected, "gradient")
