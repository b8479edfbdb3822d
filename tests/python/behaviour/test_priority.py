"""Real bytes over throttled virtual links, by priority and in the order in which they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.plan.compare import predict
from roundpipe.plan.costs import parse
from roundpipe.plan.schedules import Request

sys.path[:0] = [str(Path(__file__).parents[3] / "bench")]
from support import emulation  # noqa: E402


@pytest.fixture(autouse=True)
def _own_devices() -> Iterator[None]:
    yield
    roundpipe.devices("virtual:2")


def moved_bytes(direction: str, kind: str) -> int:
    return sum(
        use["bytes"]
        for device in roundpipe.devices().transfer_report()
        for use in device["classes"]
        if (use["direction"], use["kind"]) == (direction, kind)
    )


@pytest.mark.parametrize("priorities", [False, True])
@pytest.mark.parametrize("gradient_bytes", [0, 40_000])
def test_the_bytes_of_the_costs_move_and_values_stay(priorities: bool, gradient_bytes: int) -> None:
    layer = {"forward_ms": 2, "backward_ms": 4, "weight_bytes": 80_000, "activation_bytes": 8_000}
    costs = parse(
        {
            "schema": "roundpipe-costs",
            "version": 1,
            "layers": [{"count": 6, "gradient_bytes": gradient_bytes, **layer}],
        },
        "here",
    )
    request = emulation.scaled(Request(costs, costs.cluster(2), microbatches=4), 1.0, 0.5)
    prediction = predict("published", request)
    links = emulation.Links(0.05, 0.1, priorities, 8_000 if priorities else 0).scaled(1.0, 0.5)
    steps, warm_up = 2, 1
    # Checks every loss.
    measured = emulation.emulate(prediction, request, steps, lambda done, total: None, links=links, warm_up=warm_up)
    assert measured.step_ms > 0
    jobs = [job for plan in prediction.plans[: steps + warm_up] for job in plan.jobs]
    visits = sum(job.layers.last - job.layers.first for job in jobs)
    backward = sum(job.layers.last - job.layers.first for job in jobs if job.phase != "forward")
    # Beside the steps one microbatch goes both ways, by which the engine gets to know the layers; blocks are padded.
    # Sums of a layer that devices share go in fp32, twice the weights' width.
    layers, padding = 6, 1_024
    trained_bytes = max(4, gradient_bytes // 2)
    assert visits * 40_000 <= moved_bytes("up", "weights") <= (visits + 2 * layers) * (40_000 + padding)
    down = moved_bytes("down", "parameter gradients")
    assert backward * trained_bytes <= down <= (backward + layers) * (2 * trained_bytes + padding)
    assert moved_bytes("down", "activations") >= (steps + warm_up) * 4 * 4_000


def test_links_scale_with_the_costs() -> None:
    links = emulation.Links(25, 200).scaled(0.25, 0.0025)
    assert (links.gb_per_s, links.host_gb_per_s, links.chunk_bytes) == (0.25, 2.0, 160_000)
    assert links.options == "link=0.250000000GB/s,host=2.000000000GB/s,chunk=160000B"
    assert emulation.Links(1, 2, priorities=False).options.endswith(",fifo")


@pytest.mark.parametrize("gradient_bytes", [0, 9])
def test_more_gradients_than_weights_are_refused(gradient_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"\[EmulatedLayer\].*gradient_bytes={gradient_bytes}; expected"):
        roundpipe.EmulatedLayer(1.0, 1.0, weight_bytes=8, gradient_bytes=gradient_bytes)


def test_frozen_weights_travel_and_get_no_gradient() -> None:
    roundpipe.devices("virtual:1")
    layer = roundpipe.EmulatedLayer(0.1, 0.1, weight_bytes=4_096, gradient_bytes=512)
    assert layer.frozen is not None and not layer.frozen.requires_grad
    model = roundpipe.RoundPipe(nn.Sequential(layer), name="frozen")
    model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
    model.synchronize()
    assert moved_bytes("up", "weights") >= 4_096
    assert moved_bytes("down", "parameter gradients") == 512
