"""Random numbers: layers draw what a loop with the documented seeds draws, and the user's own stream notices nothing.

Whatever draws: dropout, checkpoints inside layers, noise in a backward, on any number of devices, while threads of the
user draw all the time.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from drawing import MICROBATCHES, WIDTH, MayCheckpoint, Noisy, drawing_all_the_time, plain_loop
from roundpipe import RoundPipe, RoundPipeRunConfig, _core
from roundpipe.device.generators import _lead_to_own
from sweeps import sweep


class Drawing(MayCheckpoint):
    """Draws in several ways."""

    def draw(self, value: torch.Tensor) -> torch.Tensor:
        value = self.dropout(torch.tanh(self.linear(value)))
        return value + 0.1 * torch.randn_like(value) + 0.01 * torch.randperm(WIDTH)


class SeedsOfItsOwn(nn.Module):
    """Uses torch's functions of the default generator by name."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        first = torch.rand(WIDTH)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed() + 1)
            second = torch.rand(WIDTH, generator=torch.default_generator)
        return value * (first + second + torch.rand(WIDTH))


def drawing_loss(outputs: torch.Tensor, _: object = None) -> torch.Tensor:
    return nn.functional.dropout(outputs, 0.1).square().mean()


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "dropout": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(5)]),
    "checkpoint": lambda: nn.Sequential(Drawing(), Drawing("plain"), nn.Dropout(0.2), Drawing("plain"), Noisy()),
    "reentrant checkpoint": lambda: nn.Sequential(Drawing(), Drawing("reentrant"), Noisy(), Drawing("reentrant")),
    "noise in the backward": lambda: nn.Sequential(Noisy(), Noisy(), Drawing(), Noisy(), nn.Linear(WIDTH, WIDTH)),
    "its own seeds": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), SeedsOfItsOwn(), Drawing(), SeedsOfItsOwn()),
}


def made(chain: str, devices: int, **config: Any) -> tuple[nn.Sequential, nn.Sequential, RoundPipe, torch.Tensor]:
    roundpipe.devices(f"virtual:{devices}")
    torch.manual_seed(5)
    plain = CHAINS[chain]()
    mine = copy.deepcopy(plain)
    model = RoundPipe(mine, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES, **config))
    return plain, mine, model, torch.randn(2 * MICROBATCHES, WIDTH)


@sweep("chain, devices, grain", CHAINS, [1, 2, 4], ["stage", "layer"], ids=str, together=1)
def test_layers_draw_the_documented_numbers_while_the_user_draws(chain: str, devices: int, grain: str) -> None:
    plain, mine, model, batch = made(chain, devices, recompute_grain=grain)
    with drawing_all_the_time():
        losses = [model.submit((batch,), loss_fn=drawing_loss).loss()]
        losses += [model.forward_backward((batch,), loss_fn=drawing_loss) for _ in range(3)]
        outputs = model(batch)
        outputs.square().sum().backward()
        model.synchronize()
        model.zero_grad()
        losses += [model.forward_backward((batch,), loss_fn=drawing_loss)]
        model.synchronize()
    expected = plain_loop(plain, model, batch, range(4), drawing_loss)
    plain.zero_grad()
    expected += plain_loop(plain, model, batch, range(5, 6), drawing_loss)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, gradients_of(mine), gradients_of(plain)))
    assert len(gradients_of(mine)) == len(gradients_of(plain)) > 0


def test_without_preserve_rng_state_the_recomputation_draws_other_numbers() -> None:
    roundpipe.devices("virtual:1")
    drawn: list[list[float]] = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            drawn.append(torch.rand(3).tolist())
            return self.linear(value)

    for preserve, different in ((True, 1), (False, 2)):
        model = RoundPipe(
            nn.Sequential(Notes(), nn.Linear(4, 4)),
            model_run_config=RoundPipeRunConfig(num_microbatch=1, preserve_rng_state=preserve),
        )
        drawn.clear()
        model(torch.randn(2, 4)).sum().backward()
        model.synchronize()
        assert len(drawn) == 2
        assert len({tuple(numbers) for numbers in drawn}) == different


def test_default_generators_are_still_torchs_own_for_the_user() -> None:
    roundpipe.devices("virtual:1")
    generator = torch.Generator()
    for seed in range(3):
        assert torch.manual_seed(seed).initial_seed() == seed == torch.initial_seed()
        generator.manual_seed(seed)
        expected = torch.rand(3, generator=generator)
        state = torch.get_rng_state()
        assert torch.equal(torch.rand(3, generator=torch.default_generator), expected)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(3, generator=torch.random.default_generator), expected)
        torch.default_generator.set_state(state)
        assert torch.equal(torch.rand(3), expected)
        with torch.random.fork_rng(devices=[]):
            after = torch.rand(1)
        assert torch.equal(torch.rand(1), after)
    assert isinstance(torch.default_generator, torch.Generator)


def test_a_devices_module_without_generators_is_led_to_the_workers_own() -> None:
    standard = torch.Generator()

    def get_rng_state(device: Any = "cpu") -> torch.Tensor:
        return standard.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cpu") -> None:
        standard.set_state(new_state)

    def manual_seed(seed: int) -> None:
        standard.manual_seed(seed)

    module = types.SimpleNamespace(
        get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=manual_seed, current_device=lambda: 0
    )
    for _ in range(2):  # the second time changes nothing
        _lead_to_own(module, "cpu")
    module.manual_seed(5)
    assert standard.initial_seed() == 5
    before = module.get_rng_state()
    assert torch.equal(before, standard.get_state())
    for device in ("cpu", torch.device("cpu", 0), 0):
        with _core.DrawsApart(seed=1, device=torch.device("cpu")):
            state = module.get_rng_state(device)
            first = torch.rand(3)
            module.set_rng_state(state, device)
            assert torch.equal(torch.rand(3), first)
            module.manual_seed(1)
            assert torch.equal(torch.rand(3), first)
    assert torch.equal(standard.get_state(), before)
    module.set_rng_state(state)
    assert not torch.equal(standard.get_state(), before)


@pytest.mark.long
def test_compiled_layers_leave_the_users_stream_alone() -> None:
    roundpipe.devices("virtual:2")
    torch.manual_seed(0)
    layers = [torch.compile(Drawing()), Drawing(), torch.compile(Drawing())]
    model = RoundPipe(nn.Sequential(*layers), model_run_config=RoundPipeRunConfig(num_microbatch=2))
    batch = torch.randn(4, WIDTH)
    torch.manual_seed(7)
    expected = [torch.rand(2) for _ in range(4)]
    torch.manual_seed(7)
    drawn, losses = [], []
    for _ in range(4):
        model.calls = 0
        losses.append(model.forward_backward((batch,), loss_fn=drawing_loss))
        model.synchronize()
        drawn.append(torch.rand(2))
    assert all(map(torch.equal, drawn, expected))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
