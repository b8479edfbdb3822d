"""Random numbers on devices: layers draw what the documented loop draws there, and the user's own stream is left alone.

Dropout draws from a card's default generator, which belongs to the process; other operators are given the worker's own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drawing import MICROBATCHES, WIDTH, MayCheckpoint, Noisy, drawing_all_the_time, plain_loop
from roundpipe import RoundPipe, RoundPipeRunConfig


class Drawing(MayCheckpoint):
    """Draws by dropout and by operators that take a generator."""

    def draw(self, value: torch.Tensor) -> torch.Tensor:
        value = self.dropout(torch.tanh(self.linear(value)))
        return value + 0.1 * torch.randn_like(value) + torch.bernoulli(torch.full_like(value, 0.5))


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "dropout": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(5)]),
    "checkpoint": lambda: nn.Sequential(Drawing(), Drawing("plain"), nn.Dropout(0.2), Drawing("plain"), Noisy()),
    "reentrant checkpoint": lambda: nn.Sequential(Drawing(), Drawing("reentrant"), Drawing("reentrant"), Noisy()),
    "no default generator": lambda: nn.Sequential(
        Noisy(), Drawing(dropout=0), Drawing("plain", dropout=0), Noisy(), Drawing("reentrant", dropout=0)
    ),
}


def drawing_loss(outputs: torch.Tensor, _: object = None) -> torch.Tensor:
    return (outputs + 0.1 * torch.randn_like(outputs)).square().sum()


def made(chain: str, **config: Any) -> tuple[nn.Sequential, nn.Sequential, RoundPipe, torch.Tensor]:
    torch.manual_seed(5)
    plain = CHAINS[chain]()
    mine = copy.deepcopy(plain)
    model = RoundPipe(mine, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES, **config))
    return plain, mine, model, torch.randn(2 * MICROBATCHES, WIDTH)


@pytest.mark.kit
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("chain", CHAINS)
def test_layers_draw_the_documented_numbers(pool, accelerator, chain, grain):
    plain, mine, model, batch = made(chain, recompute_grain=grain)
    losses = [model.submit((batch,), loss_fn=drawing_loss).loss()]
    model.synchronize()
    # The default generator of a card can be drawn from by one thread only, so dropout leaves it to nobody else.
    alone = accelerator != "cpu" and chain != "no default generator"
    with contextlib.nullcontext() if alone else drawing_all_the_time(accelerator, pause_s=0.0005):
        losses += [model.forward_backward((batch,), loss_fn=drawing_loss) for _ in range(3)]
        model.synchronize()
    plain.to(accelerator)
    expected = plain_loop(plain, model, batch, range(4), drawing_loss, accelerator)
    assert all(map(torch.equal, losses, expected)), (losses, expected)
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.cpu())


@pytest.mark.parametrize("chain", CHAINS)
def test_the_user_s_own_numbers_do_not_notice_the_model(pool, accelerator, chain):
    _, _, model, batch = made(chain)
    places = [torch.device(name) for name in dict.fromkeys(pool.torch_devices)]

    def draw() -> list[torch.Tensor]:
        return [torch.rand(2, device=place).cpu() for place in places] + [torch.rand(2)]

    torch.manual_seed(99)
    expected = [draw() for _ in range(12)]
    torch.manual_seed(99)
    drawn = []
    for _ in range(2):
        pending = model.submit((batch,), loss_fn=drawing_loss)
        drawn.append(draw())
        pending.loss()
        drawn.append(draw())
        model.forward_backward((batch,), loss_fn=drawing_loss)
        drawn.append(draw())
        outputs = model(batch)
        drawn.append(draw())
        outputs.sum().backward()
        drawn.append(draw())
        model.synchronize()
        drawn.append(draw())
    for ours, theirs in zip(drawn, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_draws_of_the_user_s_while_a_recomputation_runs(pool, accelerator):
    _, mine, model, batch = made("checkpoint", recompute_grain="layer")
    torch.manual_seed(3)
    expected = [torch.rand(4, device=accelerator).cpu() for _ in range(30)]

    def train(draws: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model.calls = 0
        model.zero_grad()
        torch.manual_seed(3)
        drawn = []
        for _ in range(3):
            outputs = model(batch)
            outputs.square().sum().backward()
            drawn += [torch.rand(4, device=accelerator).cpu() for _ in range(draws)]
        model.synchronize()
        return drawn, [parameter.grad.clone() for parameter in mine.parameters()]

    _, quiet = train(0)
    drawn, disturbed = train(10)
    assert all(map(torch.equal, drawn, expected))
    assert all(map(torch.equal, quiet, disturbed))
