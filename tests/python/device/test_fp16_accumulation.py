"""The pool's choice of fp16 accumulation: set, restored, refused, and told when a training goes on without it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe

MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    MATMUL.allow_fp16_accumulation = False
    yield
    roundpipe.devices("virtual:1", fp16_accumulation=False)
    MATMUL.allow_fp16_accumulation = False


def tiny_model(**options: Any) -> roundpipe.RoundPipe:
    torch.manual_seed(0)
    return roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)


def make_step(model: roundpipe.RoundPipe) -> float:
    loss = model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.square().sum())
    model.synchronize()
    return float(loss)


def test_the_switch_turns_with_the_pool_and_back() -> None:
    assert not roundpipe.devices("virtual:2").fp16_accumulation and not MATMUL.allow_fp16_accumulation
    pool = roundpipe.devices(fp16_accumulation=True)  # the same devices
    assert pool.fp16_accumulation and pool.description == "virtual:2" and MATMUL.allow_fp16_accumulation
    assert roundpipe.devices().fp16_accumulation, "asking changes nothing"
    assert not roundpipe.devices("virtual:1").fp16_accumulation and not MATMUL.allow_fp16_accumulation
    MATMUL.allow_fp16_accumulation = True
    roundpipe.devices("virtual:1", fp16_accumulation=True)
    roundpipe.devices("virtual:1")
    assert MATMUL.allow_fp16_accumulation, "what the program had set comes back"


def test_virtual_devices_compute_the_same() -> None:
    losses = [make_step(tiny_model()) for _ in (roundpipe.devices("virtual:2", fp16_accumulation=on) for on in (0, 1))]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("on", [True, False])
def test_a_switch_that_is_not_the_pools_is_refused(on: bool) -> None:
    roundpipe.devices("virtual:2", fp16_accumulation=on)
    model = tiny_model()
    expected = make_step(model)
    MATMUL.allow_fp16_accumulation = not on
    with pytest.raises(ValueError, match=rf"allow_fp16_accumulation is {not on}, and the pool was made with"):
        make_step(model)
    with pytest.raises(ValueError, match="allow_fp16_accumulation"), torch.no_grad():
        model(torch.ones(2, 4))
    MATMUL.allow_fp16_accumulation = on
    assert make_step(model) == expected


def test_work_that_runs_keeps_the_switch_that_it_began_with() -> None:
    roundpipe.devices("virtual:1", fp16_accumulation=True)
    model, entered, go_on, seen = tiny_model(), threading.Event(), threading.Event(), []

    def loss_fn(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        entered.set()
        go_on.wait(10)
        seen.append(MATMUL.allow_fp16_accumulation)
        return outputs.sum()

    pending = model.submit((torch.ones(1, 4),), loss_fn=loss_fn, run_config=ONE)
    assert entered.wait(10)
    threading.Timer(0.05, go_on.set).start()
    roundpipe.devices("virtual:1")
    assert seen == [True] and not MATMUL.allow_fp16_accumulation
    pending.loss()


ONE = roundpipe.RoundPipeRunConfig(num_microbatch=1)
PROGRAM = """
import torch, roundpipe
print(roundpipe.devices().fp16_accumulation, torch.backends.cuda.matmul.allow_fp16_accumulation)
roundpipe._core.Engine.shut_down()
print(torch.backends.cuda.matmul.allow_fp16_accumulation)
"""


@pytest.mark.parametrize(("value", "expected"), [("1", "True True False"), ("0", "False False False"), ("on", "")])
def test_the_environment(value: str, expected: str) -> None:
    environment = os.environ | {"ROUNDPIPE_DEVICES": "virtual:1", "ROUNDPIPE_FP16_ACCUMULATION": value}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected.split(), done.stderr
    if not expected:
        assert "[ROUNDPIPE_FP16_ACCUMULATION] the variable is 'on', expected 0 or 1" in done.stderr


def test_a_training_that_goes_on_otherwise_is_told(tmp_path: Path, capsys: Any) -> None:
    roundpipe.devices("virtual:1", fp16_accumulation=True)

    def made() -> tuple[roundpipe.RoundPipe, Any]:
        model = tiny_model()
        return model, roundpipe.optim.SGD(model, lr=0.1)

    model, optimizer = made()
    make_step(model)
    model.step(optimizer)
    roundpipe.save_checkpoint(tmp_path, model, optimizer, step=1).wait()
    for on, said in ((True, ""), (False, "ROUNDPIPE_FP16_ACCUMULATION=1 keeps them")):
        roundpipe.devices("virtual:1", fp16_accumulation=on)
        roundpipe.load_checkpoint(tmp_path, *made())
        assert (said in capsys.readouterr().err) if said else ("accumulation" not in capsys.readouterr().err)
