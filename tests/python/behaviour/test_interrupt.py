"""Ctrl+C at any moment."""

from __future__ import annotations

import _thread
import copy
import gc
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch
from torch import nn

import roundpipe
from robustness import assert_same, pipe_of, script_environment, sgd_step, squared_error
from roundpipe import RoundPipe
from roundpipe.following.layers.shell import PythonLayer
from roundpipe.model.step.uninterrupted import uninterrupted
from sweeps import mostly_long

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LOOP = """
import sys, time, torch, roundpipe
from torch import nn

class Slow(nn.Linear):
    def forward(self, value):
        time.sleep(0.001)
        return super().forward(value)

torch.manual_seed(0)
roundpipe.devices("virtual:2")
model = roundpipe.RoundPipe(nn.Sequential(*[Slow(8, 8) for _ in range(4)]))
optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-3)

def update():
    time.sleep(0.001)
    optimizer.step()
    optimizer.zero_grad()

def train():
    value = torch.randn(6, 8)
    while True:
        model.forward_backward((value,), loss_fn=lambda outputs, _: outputs.square().sum())
        model.step(update)
        model(value).square().sum().backward()
        model.step(update, is_async=False)
        model.synchronize()
"""

FUSED = LOOP.replace(
    "torch.optim.SGD(model.optim_parameters(), lr=1e-3)", "roundpipe.optim.AdamW(model, lr=1e-3)"
).replace("model.step(update", "model.step(optimizer")


# --- Ctrl+C ---


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("loop", [LOOP, FUSED], ids=["function", "fused"])
def test_ctrl_c_ends_a_script(loop: str) -> None:
    process = start(loop + "print('ready', flush=True)\ntrain()\n")
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(random.Random(1).uniform(0, 0.3))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGINT, errors
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
        assert errors.count("Traceback") == 1 and "Exception ignored" not in errors, errors
    finally:
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "times"),
    [
        pytest.param(LOOP, 12, id="function", marks=pytest.mark.long),
        pytest.param(FUSED, 12, id="fused", marks=pytest.mark.long),
        pytest.param(FUSED, 4, id="fused, a few times"),
    ],
)
def test_ctrl_c_again_and_again_in_one_script(loop: str, times: int) -> None:
    script = loop + textwrap.dedent(
        f"""
        import threading
        threads = None
        for _ in range({times}):
            try:
                print('ready', flush=True)
                train()
            except KeyboardInterrupt:
                pass
            model.zero_grad()
            loss = model.forward_backward((torch.ones(4, 8),), loss_fn=lambda outputs, _: outputs.square().sum())
            model.synchronize()
            assert loss.isfinite()
            assert threads is None or threading.active_count() == threads, threading.enumerate()
            threads = threading.active_count()
        """
    )
    delays = random.Random(2)
    process = start(script)
    try:
        assert process.stdout is not None
        for _ in range(times):
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
            time.sleep(delays.uniform(0, 0.15))
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()


class Slow(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.0005)
        return super().forward(value)


def train_until_interrupted(pipe: RoundPipe, what: str) -> None:
    value, label = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(100_000):
        if what == "forward":
            pipe(value)
        elif what == "backward":
            squared_error(pipe(value.clone().requires_grad_()), label).backward()
        else:
            pipe.forward_backward((value,), label=label, loss_fn=squared_error)
        if what == "step":
            pipe.step(lambda: time.sleep(0.002), is_async=False)
        if what == "asynchronous step":
            pipe.step(sgd_step(pipe, 1e-4))
        if what == "synchronize":
            pipe.synchronize()
    raise AssertionError("nobody interrupted")


@pytest.mark.parametrize(
    "what",
    mostly_long(
        ["forward", "backward", "forward_backward", "step", "asynchronous step", "synchronize"],
        *("forward_backward", "asynchronous step", "synchronize"),
    ),
)
def test_a_model_is_usable_after_an_interrupt(what: str) -> None:
    roundpipe.devices("virtual:2")
    torch.manual_seed(5)
    model = nn.Sequential(*[Slow(8, 8) for _ in range(4)])
    pipe = pipe_of(model, 3)
    pipe.forward_backward((torch.randn(6, 8),), label=torch.randn(6, 8), loss_fn=squared_error)
    pipe.step(lambda: None, is_async=False)
    process = psutil.Process()
    threads = (threading.active_count(), process.num_threads())
    delays = random.Random(what)
    for _ in range(8):
        timer = threading.Timer(delays.uniform(0.001, 0.06), _thread.interrupt_main)
        # Callbacks of the collector, which test libraries have, would swallow the interrupt.
        gc.disable()
        try:
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                train_until_interrupted(pipe, what)
        finally:
            gc.enable()
        timer.join()
        pipe.zero_grad()
        # What it computes now is what a plain loop computes from the same weights.
        value, label = torch.randn(6, 8), torch.randn(6, 8)
        plain = copy.deepcopy(model)
        pipe.forward_backward((value,), label=label, loss_fn=squared_error)
        for part, of_label in zip(value.chunk(3), label.chunk(3), strict=True):
            squared_error(plain(part), of_label).backward()
        pipe.synchronize()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same(gradients, {name: p.grad for name, p in plain.named_parameters()})
        pipe.zero_grad()
        # Fewer, when an earlier test's pool ends meanwhile.
        assert threading.active_count() <= threads[0]
        assert process.num_threads() <= threads[1]


def test_none_is_lost_while_the_first_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while layers are measured is left to the step itself to say; an interrupt is not one of these."""
    mode_key = PythonLayer.mode_key
    roundpipe.devices("virtual:2,memory=48MiB")
    value = torch.randn(4, 4)

    def first_step(interrupted_at: int) -> int:
        looks = 0

        def interrupted(layer: PythonLayer) -> int:
            nonlocal looks
            if threading.current_thread() is threading.main_thread():
                looks += 1
                if looks == interrupted_at:
                    raise KeyboardInterrupt
            return mode_key(layer)

        monkeypatch.setattr(PythonLayer, "mode_key", interrupted)
        pipe = pipe_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2)
        pipe.forward_backward((value,), label=value, loss_fn=squared_error)
        pipe.synchronize()
        return looks

    looks = first_step(interrupted_at=0)
    assert looks > 0
    for look in range(1, looks + 1):
        with pytest.raises(KeyboardInterrupt):
            first_step(look)


def test_an_interrupt_keeps_the_users_handler() -> None:
    roundpipe.devices("virtual:1")
    pipe = pipe_of(nn.Linear(4, 4), 1)
    before = signal.getsignal(signal.SIGINT)
    pipe.forward_backward((torch.randn(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pipe.step(sgd_step(pipe))
    pipe.synchronize()
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_wait_until_a_block_that_must_not_stop_is_over() -> None:
    """A handler that raises in the middle of the start of the optimizer's thread would leave one that nobody ends."""
    names = ("SIGINT", "SIGTERM", "SIGUSR1")
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        raise SystemExit(number)

    before = {name: signal.signal(getattr(signal, name), handler) for name in names}
    try:
        for _ in range(2):
            seen.clear()
            over = False
            with pytest.raises(SystemExit), uninterrupted():
                for name in (*names, "SIGTERM"):
                    signal.raise_signal(getattr(signal, name))
                assert not seen
                over = True
            assert over
            assert sorted(seen) == sorted(getattr(signal, name) for name in names)
            assert all(signal.getsignal(getattr(signal, name)) is handler for name in names)
    finally:
        for name, old in before.items():
            signal.signal(getattr(signal, name), old)
