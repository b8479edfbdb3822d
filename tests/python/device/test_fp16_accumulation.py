"""The pool's choice of fp16 accumulation: set, restored, refused, and told when a training goes on without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
