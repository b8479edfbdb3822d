"""What a call was given is what it uses, whatever the caller does with it afterwards."""

from __future__ import annotations

import copy
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

SLOW_LINK = "virtual:2,link=1MB/s"  # so that little has moved when a call returns


def model_of(microbatches: int = 4, layers: int = 4, width: int = 8) -> RoundPipe:
    torch.manual_seed(2)
    chain = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    return RoundPipe(chain, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))


def squared(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (outputs - label).square().sum()


def gradients_of(model: RoundPipe) -> list[torch.Tensor]:
    model.synchronize()
    return [parameter.grad.clone() for parameter in model._original_model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("entry", ["submit", "forward_backward"])
@pytest.mark.parametrize("kind", ["whole", "split by hand", "in a dict", "broadcast", "array", "object"])
def test_labels_may_be_reused_at_once(entry: str, kind: str) -> None:
    roundpipe.devices(SLOW_LINK)
    losses = []
    for reused in (False, True):
        model = model_of()
        batch = torch.linspace(-1, 1, 64).reshape(8, 8)
        label = torch.zeros(8, 8)
        array = np.zeros(8, dtype=np.float32)
        holder = types.SimpleNamespace(value=0.0)
        given: dict[str, tuple[Any, Any]] = {
            "whole": (label, squared),
            "split by hand": (label, squared),
            "in a dict": ({"y": label, "w": [label]}, lambda o, y: squared(o, y["y"]) + squared(o, y["w"][0])),
            "broadcast": (label[:1].expand(8, 8), squared),
            "array": ({"y": label, "a": array}, lambda o, y: squared(o, torch.from_numpy(y["a"]))),
            "object": ({"y": label, "o": holder}, lambda o, y: (o - y["o"].value).square().sum()),
        }
        value, loss_fn = given[kind]
        config = RoundPipeRunConfig(split_label=lambda v, n: list(v.split(2))) if kind == "split by hand" else None
        loss: Any = None
        if entry == "submit":
            pending = model.submit((batch,), label=value, loss_fn=loss_fn, run_config=config)
        else:
            loss = model.forward_backward((batch,), label=value, loss_fn=loss_fn, run_config=config)
        if reused:
            label.fill_(100)
            batch.fill_(100)
            array[:] = 100
            holder.value = 100.0
        losses.append((pending.loss() if entry == "submit" else loss, gradients_of(model)))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(map(torch.equal, losses[0][1], losses[1][1]))


def test_objects_among_the_inputs_are_read_before_the_call_returns() -> None:
    roundpipe.devices(SLOW_LINK)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, value: torch.Tensor, scale: Any, factors: Any) -> torch.Tensor:
            return self.linear(value) * scale.value * torch.from_numpy(factors)

    results = []
    for reused in (False, True):
        torch.manual_seed(1)
        model = RoundPipe(Scaled(), model_run_config=RoundPipeRunConfig(num_microbatch=2))
        scale, factors = types.SimpleNamespace(value=3.0), np.full(8, 2, dtype=np.float32)
        pending = model.submit((torch.ones(4, 8), scale, factors), loss_fn=lambda outputs, _: outputs.sum())
        if reused:
            scale.value = 0.0
            factors[:] = 0
        results.append((pending.loss(), gradients_of(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_given_to_backward_may_be_reused_at_once(hooked: bool) -> None:
    roundpipe.devices(SLOW_LINK)
    results = []
    for reused in (False, True):
        model = model_of()
        outputs = model(torch.linspace(-1, 1, 64).reshape(8, 8))
        gradient = torch.ones(8, 8)
        if hooked:
            seen: list[torch.Tensor] = []
            outputs.register_hook(seen.append)
            (outputs * 2).backward(gradient)
            if reused:
                seen[0].zero_()
        else:
            outputs.backward(gradient)
        if reused:
            gradient.zero_()
        results.append(gradients_of(model))
    assert all(map(torch.equal, *results))


def test_the_model_may_be_changed_while_the_backward_runs() -> None:
    roundpipe.devices("virtual:2")
    for change in ("eval", "attribute", "new attribute"):
        torch.manual_seed(4)
        plain = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(6)])
        mine = copy.deepcopy(plain)
        model = RoundPipe(mine, model_run_config=RoundPipeRunConfig(num_microbatch=4))
        batch = torch.randn(256, 32)
        model.forward_backward((batch,), loss_fn=lambda outputs, _: outputs.square().mean())
        if change == "eval":
            model.eval()
        for layer in mine:
            if change == "attribute":
                layer[1].p = 0.9
            elif change == "new attribute":
                layer[1].note = "later"
        model.synchronize()
        for m, part in enumerate(batch.tensor_split(4)):
            hidden = part.clone()
            for index, layer in enumerate(plain):
                torch.manual_seed(model.layer_seed(0, m, index))
                hidden = layer(hidden)
            hidden.square().mean().backward()
        for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad), change
        # The next call goes by what the model is then.
        with torch.no_grad():
            outputs = model(batch)
            expected = torch.cat([plain.eval()(part) for part in batch.tensor_split(4)])
            assert torch.equal(outputs, expected) == (change == "eval")


def test_a_change_between_submissions_counts_from_the_next_one() -> None:
    roundpipe.devices("virtual:2")
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.factor = 1.0

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.weight * self.factor

    chain = nn.Sequential(Scaled(), Scaled(), Scaled())
    model = RoundPipe(chain, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    pending = []
    for step in range(6):
        chain[1].factor = float(step)
        pending.append(model.submit((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.sum()))
    assert [float(batch.loss()) for batch in pending] == [16.0 * step for step in range(6)]


def test_an_evaluation_right_after_a_batch_leaves_its_buffers_alone() -> None:
    roundpipe.devices("virtual:2")
    for _ in range(10):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        plain = copy.deepcopy(model)
        pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
        for _ in range(3):
            inputs = torch.randn(8, 4)
            plain(inputs)
            pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
            with torch.no_grad():
                found, expected = pipe.eval()(inputs), plain.eval()(inputs)
            assert torch.equal(found, expected)
            pipe.train()
            plain.train()
        pipe.synchronize()
        for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)
