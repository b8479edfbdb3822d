"""Device memory stays under its cap, and nothing grows with the number of steps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import roundpipe
from robustness import give_free_memory_back, pipe_of, sgd_step, squared_error
from roundpipe import ModelExecutePlan, RoundPipe

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def report() -> list[dict[str, Any]]:
    return roundpipe.devices().memory_report()


# --- caps ---


# --- use after release ---


# --- growth ---


def census() -> dict[str, Any]:
    gc.collect()
    return {
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "python threads": threading.active_count(),
        "threads": psutil.Process().num_threads(),
        "device": max(entry["current_bytes"] for entry in report()),
    }


def resident_bytes() -> int:
    give_free_memory_back()
    return int(psutil.Process().memory_info().rss)


def assert_no_growth(after: dict[str, Any], before: dict[str, Any], slot_bytes: int) -> None:
    assert after.pop("objects") - before.pop("objects") < 200
    # A slot takes on the size of a larger stage when one first happens to come to it.
    assert after.pop("device") - before.pop("device") <= 2 * slot_bytes
    # Fewer, when an earlier test's pool ends meanwhile.
    assert all(after[what] <= before[what] for what in before), (after, before)


@pytest.mark.long
@pytest.mark.parametrize("steps", [200, 1000])
@pytest.mark.parametrize("style", ["forward_backward", "forward and backward"])
def test_nothing_grows_with_the_steps(style: str, steps: int) -> None:
    roundpipe.devices("virtual:2,memory=16MiB")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(8)), nn.Linear(8, 8))
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(2)] if style == "forward_backward" else [range(2), range(2, 3)]
    plan.bwd_plan = [range(2, 3), range(2)]
    pipe = pipe_of(model, 2, execute_plan=plan)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1e-3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    value, label = torch.randn(4, 8), torch.randn(4, 8)

    def train(steps: int) -> None:
        for _ in range(steps):
            if style == "forward_backward":
                pipe.forward_backward((value,), label=label, loss_fn=squared_error)
            else:
                squared_error(pipe(value), label).backward()
            pipe.step(update)
        pipe.synchronize()

    train(100)
    before, memory = census(), resident_bytes()
    train(steps)
    after = census()
    grown = resident_bytes() - memory
    assert_no_growth(after, before, slot_bytes=1024)
    assert grown < 4 << 20


@pytest.mark.long
def test_failing_calls_do_not_pile_up() -> None:
    roundpipe.devices("virtual:2,memory=16MiB")
    fail = [False]

    class Sometimes(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if fail[0]:
                raise ValueError("now")
            return super().forward(value)

    pipe = pipe_of(nn.Sequential(nn.Linear(64, 64), Sometimes(64, 64)), 2)

    def rounds(count: int) -> dict[str, Any]:
        for _ in range(count):
            fail[0] = True
            with pytest.raises(ValueError, match="now"):
                pipe.forward_backward((torch.randn(64, 64),), loss_fn=lambda outputs, _: outputs.sum())
            fail[0] = False
            pipe.forward_backward((torch.randn(64, 64),), loss_fn=lambda outputs, _: outputs.sum())
            pipe.zero_grad()
        return census()

    before = rounds(10)
    assert_no_growth(rounds(40), before, slot_bytes=2 * 64 * 65 * 4)


# --- models that come and go ---


@pytest.mark.long
def test_redefining_a_model_frees_the_old_one() -> None:
    roundpipe.devices("virtual:2,memory=64MiB")
    value = torch.randn(8, 256)

    def redefine() -> RoundPipe:
        model = pipe_of(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), 2)
        model.forward_backward((value,), loss_fn=lambda outputs, _: outputs.sum())
        model.step(sgd_step(model))
        model.forward_backward((value,), loss_fn=lambda outputs, _: outputs.sum())  # still running when it is dropped
        return model

    gc.collect()
    gc.disable()  # the memory comes back without a garbage collection
    try:
        model = redefine()
        process = psutil.Process()
        dropped: list[weakref.ref[nn.Parameter]] = []
        for index in range(60):
            dropped.append(weakref.ref(model._original_model[0].weight))
            model = redefine()
            # The last one may still have work to do, and then goes when the next is made.
            assert all(old() is None for old in dropped[:-1])
            if index == 20:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 16 << 20
    finally:
        gc.enable()


class Collecting(nn.Linear):
    """Runs the garbage collector on the device's thread."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return super().forward(value)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Collections look at what the test itself makes, not at everything that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
def test_a_model_may_be_collected_by_its_own_device_thread() -> None:
    roundpipe.devices("virtual:2")
    for _ in range(3):
        model = pipe_of(nn.Sequential(Collecting(8, 8), nn.Linear(8, 8)), 2)
        model.loop = [model]  # a cycle: only a collection finds it
        model.forward_backward((torch.randn(4, 8),), loss_fn=lambda outputs, _: outputs.sum())
        reference = weakref.ref(model)
        del model
    pipe = pipe_of(nn.Linear(8, 8), 1)
    pipe(torch.randn(2, 8))
    gc.collect()
    assert reference() is None


# --- the host's memory ---


def test_no_memory_left_on_the_host_is_said_in_words() -> None:
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.zeros(1).expand(2**24, 2**32))  # takes no memory until it moves into a block
    with pytest.raises(MemoryError, match=r"\[memory\] the system has no .* of host memory left; expected"):
        RoundPipe(model)
