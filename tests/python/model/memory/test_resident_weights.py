"""Frozen weights that stay on a device: what is uploaded then, and that every way of writing them is seen.

Bits are those of plain PyTorch, and of a device without a cap, where nothing is resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import pipe_of, squared_error
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.quantise import encode_weights
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH, RANK, LAYERS, ROWS = 128, 4, 6, 8
BASE = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's frozen block
ADAPTER = 4 * 2 * WIDTH * RANK
ROOMY, HALF, TIGHT = "16MiB", "720KiB", "560KiB"


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.base(value) + self.up(self.down(value)))


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Adapted() for _ in range(LAYERS)))


def batches(count: int, rows: int = ROWS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def stages() -> ModelExecutePlan:
    """Two layers a job: each layer but the last two is visited twice a step."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(2), range(2, 4)]
    plan.bwd_plan = [range(4, 6), range(2, 4), range(2)]
    return plan


VISITS = 2 * LAYERS - 2  # of layers, by the stages above


def uploaded_weights() -> int:
    """Bytes of all devices so far."""
    report = roundpipe.devices().transfer_report()
    classes = [entry for device in report for entry in device["classes"]]
    return sum(entry["bytes"] for entry in classes if entry["direction"] == "up" and entry["kind"] == "weights")


def resident() -> list[int]:
    return [device["resident_bytes"] for device in roundpipe.devices().memory_report()]


class Trained:
    """Steps of a model over the devices `spec`, with what each of them has uploaded."""

    def __init__(self, spec: str, steps: int, microbatches: int = 2, network: nn.Module | None = None) -> None:
        roundpipe.devices(spec)
        self.model = pipe_of(chain() if network is None else network, microbatches, execute_plan=stages())
        self.optimizer = roundpipe.optim.SGD(self.model, lr=0.01, momentum=0.9)
        self.losses: list[torch.Tensor] = []
        self.uploaded: list[int] = []
        for value, label in batches(steps):
            self.step(value, label)

    def step(self, value: torch.Tensor, label: torch.Tensor) -> None:
        before = uploaded_weights()
        self.losses.append(self.model.forward_backward((value,), label=label, loss_fn=squared_error).clone())
        self.model.step(self.optimizer, is_async=False)
        self.model.synchronize()
        self.uploaded.append(uploaded_weights() - before)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def trained_plainly(steps: int, microbatches: int = 2) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    plain = chain()
    optimizer = roundpipe.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    losses = []
    for value, label in batches(steps):
        parts = []
        for part, of_label in zip(value.tensor_split(microbatches), label.tensor_split(microbatches), strict=True):
            loss = squared_error(plain(part), of_label)
            loss.backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).sum())
        optimizer.step()
        optimizer.zero_grad()
    return losses, plain.state_dict()


def check_same(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert torch.equal(value, expected[name]), name


# --- What is uploaded ---

STEPS = 10
POOLS = {
    "one": "virtual:1{},debug",
    "two": "virtual:2{},debug",
    "four": "virtual:4{},debug",
    "unequal": "virtual:1{},debug;virtual:1,memory=720KiB,debug;virtual:1,debug",
}


def pool_of(name: str, memory: str) -> Any:
    spec = POOLS[name].format(f",memory={memory}" if memory else "")
    return spec.split(";")


@sweep("pool, memory", POOLS, ["", TIGHT, HALF, ROOMY], together=1)
def test_bits_do_not_depend_on_what_is_resident(pool: str, memory: str) -> None:
    run = Trained(pool_of(pool, memory), STEPS)  # type: ignore[arg-type]
    losses, state = trained_plainly(STEPS)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(run.losses, losses, strict=True))
    check_same(run.state(), state)
    whole = VISITS * (BASE + ADAPTER)
    assert run.uploaded[0] == whole, "what layers do is not known before they have run"
    caps = [device["limit_bytes"] for device in roundpipe.devices().memory_report()]
    assert all(bytes == 0 for bytes, cap in zip(resident(), caps, strict=True) if cap == 0)
    if not memory and pool != "unequal":
        assert run.uploaded == [whole] * STEPS
    if memory == ROOMY and pool != "unequal":
        # Each device has met each layer by now.
        assert resident() == [LAYERS * BASE] * len(caps)
        assert run.uploaded[-1] == VISITS * ADAPTER


def test_encoded_weights_stay_where_plain_ones_have_no_room() -> None:
    network = chain()
    encode_weights(network, "nf4", keep=["down", "up"])
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name)
    encoded = WIDTH * WIDTH // 2 + 4 * (WIDTH * WIDTH // 64 + WIDTH)
    assert sum(parameter.nbytes for parameter in network.parameters()) == LAYERS * (encoded + ADAPTER)
    tight = f"virtual:1,memory={TIGHT},debug"
    assert Trained(tight, 4).uploaded[-1] > VISITS * ADAPTER
    run = Trained(tight, 4, network=network)
    assert run.uploaded[0] == VISITS * (encoded + ADAPTER)
    assert run.uploaded[-1] == VISITS * ADAPTER and resident() == [LAYERS * encoded]


# --- Every way of writing a frozen weight ---


def first_base(network: nn.Module, layer: str = "1") -> nn.Linear:
    base = network.get_submodule(f"{layer}.base")
    assert isinstance(base, nn.Linear)
    return base


def one_element_through_data(network: nn.Module) -> None:
    first_base(network).weight.data[77, 5] += 0.25


def one_bit_through_numpy(network: nn.Module) -> None:
    first_base(network).bias.detach().numpy().view("int32")[3] ^= 1 << 22


def another_tensor(network: nn.Module) -> None:
    base = first_base(network)
    base.weight.data = base.weight.data * 1.5


def a_state(network: nn.Module) -> None:
    state = {name: value.clone() for name, value in network.state_dict().items()}
    state["1.base.weight"].add_(0.01)
    network.load_state_dict(state)


def two_trade_places(network: nn.Module) -> None:
    one, other = first_base(network).weight, network.get_submodule("4.base").weight
    assert isinstance(other, torch.Tensor)
    one.data, other.data = other.data, one.data


# How many layers are uploaded again. load_state_dict() writes all parameters, if only one with other values.
WAYS: dict[Callable[[nn.Module], None], int] = {
    one_element_through_data: 1,
    one_bit_through_numpy: 1,
    another_tensor: 1,
    a_state: LAYERS,
    two_trade_places: 2,
}


def losses_around(network: nn.Module, write: Callable[[nn.Module], None], uploads: list[int]) -> list[torch.Tensor]:
    """Steps of a plain loop, with a write in between."""
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for number, (value, label) in enumerate(batches(6)):
        if number == 3:
            if isinstance(network, RoundPipe):
                network.synchronize()
            write(network)
        before = uploaded_weights()
        loss = squared_error(network(value), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        if isinstance(network, RoundPipe):
            network.synchronize()
        uploads.append(uploaded_weights() - before)
    return losses


@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_seen(way: Callable[[nn.Module], None]) -> None:
    roundpipe.devices(f"virtual:1,memory={ROOMY},debug")
    plain, model = chain(), pipe_of(chain(), 1)
    uploads: list[int] = []
    mine = losses_around(model, way, uploads)
    expected = losses_around(plain, way, [])
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    check_same({name: value.clone() for name, value in model.state_dict().items()}, dict(plain.state_dict()))
    assert uploads[3] - uploads[2] == WAYS[way] * BASE, "only what has changed is uploaded again"
    assert uploads[4] == uploads[5] == uploads[2] < LAYERS * BASE


# --- Memory ---


@pytest.mark.parametrize("memory", [HALF, "1MiB", ROOMY])
def test_a_prediction_counts_them(memory: str) -> None:
    roundpipe.devices(f"virtual:1,memory={memory}")
    model = pipe_of(chain(), 2, execute_plan=stages())
    value, label = next(batches(1))
    predicted = model.predict_memory((value,), label=label, loss_fn=squared_error).device
    assert predicted.total == predicted.needed + predicted.resident
    optimizer = roundpipe.optim.SGD(model, lr=0.01)
    for value, label in batches(3):
        model.forward_backward((value,), label=label, loss_fn=squared_error)
        model.step(optimizer, is_async=False)
        model.synchronize()
    report = roundpipe.devices().memory_report()[0]
    # What jobs take is known by then, so that all of them have room even here.
    assert resident() == [predicted.resident] == [LAYERS * BASE]
    assert 0.97 * report["peak_bytes"] <= predicted.total <= report["limit_bytes"]


# --- Failures ---


def test_a_device_that_fails_takes_its_copies_along() -> None:
    roundpipe.devices(f"virtual:2,memory={ROOMY},debug")
    model = pipe_of(chain(), 2, execute_plan=stages(), fault_tolerant=True)
    optimizer = roundpipe.optim.SGD(model, lr=0.01, momentum=0.9)
    losses = []
    for number, (value, label) in enumerate(batches(8)):
        if number == 5:
            roundpipe.devices().inject_fault("virtual:1", "error@1")
        losses.append(model.forward_backward((value,), label=label, loss_fn=squared_error).clone())
        model.step(optimizer, is_async=False)
        model.synchronize()
    expected, state = trained_plainly(8)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    check_same({name: value.clone() for name, value in model.state_dict().items()}, state)
    roundpipe.devices().restore()


def test_checked_jobs_read_the_host() -> None:
    roundpipe.devices(f"virtual:2,memory={ROOMY},debug")
    model = pipe_of(chain(), 2, execute_plan=stages(), verify_every=1)
    optimizer = roundpipe.optim.SGD(model, lr=0.01, momentum=0.9)
    for value, label in batches(6):
        model.forward_backward((value,), label=label, loss_fn=squared_error)
        model.step(optimizer, is_async=False)
        model.synchronize()
    check_same({name: value.clone() for name, value in model.state_dict().items()}, trained_plainly(6)[1])
