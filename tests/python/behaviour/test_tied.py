"""Gradients of parameters that several layers share: in which order they are added, and what moves for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundpipe
from reference_loops import BASE_SEED, Pair, fused_loop, plan_of, use_devices
from roundpipe import RoundPipe, RoundPipeRunConfig
from sweeps import sweep

MICROBATCHES = 6
TOKENS = torch.arange(24) % 11
PLANS = [
    None,
    plan_of(6, [3], [3], fused=True),
    plan_of(6, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], fused=True),
    plan_of(6, [2], [4, 5], fused=True),
    plan_of(6, [], [], fused=True),
]


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def three_sharers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Of which two stand side by side, so that most plans have them in one job."""
    torch.manual_seed(BASE_SEED)
    embedding = nn.Embedding(11, 8)
    back = nn.Sequential(nn.Softmax(dim=-1), nn.Linear(11, 8))
    model = nn.Sequential(
        embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding.weight), back, Head(embedding.weight)
    ).to(dtype)
    weight = nn.Parameter(model[0].weight.detach().clone())
    model[0].weight = model[3].weight = model[5].weight = weight
    return model


@sweep("number, order, devices", range(len(PLANS)), ["layer", "microbatch"], [1, 2, 4], ids=str)
def test_bits_are_those_of_the_rule(number: int, order: Any, devices: int) -> None:
    plan = PLANS[number]
    use_devices(devices)
    pair = Pair(three_sharers(), F.cross_entropy)
    config = RoundPipeRunConfig(execute_plan=plan, tied_grad_accumulation=order)
    pair.train((TOKENS,), label=TOKENS, microbatches=MICROBATCHES, calls=2, config=config)


def test_the_orders_differ() -> None:
    """Otherwise the tests above would say nothing of the order."""
    ends = []
    for order in (False, True):
        model = three_sharers()
        fused_loop(list(model), (TOKENS,), {}, TOKENS, F.cross_entropy, [[0] * 7] * MICROBATCHES, order)
        ends.append(model[0].weight.grad)
    torch.testing.assert_close(*ends)
    assert not torch.equal(*ends)


def test_only_one_sum_a_layer_moves_whatever_the_number_of_microbatches() -> None:
    def moved(order: Any, microbatches: int) -> int:
        use_devices(2)
        model = nn.Sequential(nn.Embedding(400, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 400, bias=False))
        model[2].weight = model[0].weight
        pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(tied_grad_accumulation=order))
        tokens = torch.arange(48) % 400
        config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan_of(3, [1], [1], fused=True))
        pipe.forward_backward((tokens,), label=tokens, loss_fn=F.cross_entropy, run_config=config)
        pipe.synchronize()
        classes = [entry for device in roundpipe.devices().transfer_report() for entry in device["classes"]]
        return sum(entry["bytes"] for entry in classes if entry["kind"] == "parameter gradients")

    shared, own = 400 * 16 * 4, 16 * 16 * 4
    for microbatches in (1, 4, 16):
        assert moved("layer", microbatches) == 2 * shared + own
        assert moved("microbatch", microbatches) == 2 * shared * microbatches + own


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="tied_grad_accumulation is 'stage', expected 'layer', 'microbatch'"):
        RoundPipeRunConfig(tied_grad_accumulation="stage")  # type: ignore[arg-type]
