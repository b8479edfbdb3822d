"""Sums of gradients over groups of microbatches and over layers that share a parameter: what is refused, what moves for
them, and what they take. test_equality_table.py has their bits."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundpipe
from reference_loops import BASE_SEED, Pair, plan_of, shared_plan, use_devices
from roundpipe import RoundPipe, RoundPipeRunConfig, _core

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH = 6


def squared(outputs: Tensor, label: Tensor) -> Tensor:
    return ((outputs - label).float() ** 2).sum()


def model_of() -> nn.Sequential:
    torch.manual_seed(BASE_SEED)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def data(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def test_a_plan_that_cuts_a_group_is_refused_before_anything_runs() -> None:
    use_devices(2)
    pipe = RoundPipe(model_of())
    x, y = data(6)
    plan = shared_plan(6, 6, 6, 2, fused=True, seed=2)
    assert any(job.phase != "forward" and job.microbatches.last < 6 for job in plan.jobs)
    with pytest.raises(ValueError, match=r"trainable layer \d within a group of gradients: gradient_groups is 1 for 6"):
        config = RoundPipeRunConfig(num_microbatch=6, execute_plan=plan)
        pipe.forward_backward((x,), label=y, loss_fn=squared, run_config=config)
    assert pipe.forward_backward((x,), label=y, loss_fn=squared).isfinite()


def test_layers_that_do_not_train_may_be_divided_anywhere() -> None:
    use_devices(3)
    model = model_of()
    for parameter in [*model[3].parameters(), *model[4].parameters()]:
        parameter.requires_grad_(False)
    jobs: list[Any] = [("forward", 0, 5, 0, 6, 0, 0.0), ("fused", 5, 6, 0, 6, 1, 0.1)]
    jobs += [("backward", 3, 5, m, m + 2, m // 2, 0.2 + m / 100) for m in (0, 2, 4)]
    jobs += [("backward", 0, 3, 0, 6, 2, 0.5)]
    config = RoundPipeRunConfig(execute_plan=_core.Plan(6, 6, 3, 0, jobs))
    x, y = data(12)
    Pair(model, squared).train((x,), label=y, microbatches=6, calls=2, config=config)


def test_memory_is_what_was_predicted() -> None:
    """Parts of a layer that four devices share: on the host at most the predicted bytes, and more than one of them."""
    roundpipe.devices("virtual:4")
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=4, gradient_groups=4))
    jobs: list[Any] = [("forward", 0, 1, 0, 4, 0, 0.0)]
    jobs += [("fused", 1, 2, m, m + 1, m, 0.1 + m / 100) for m in range(4)] + [("backward", 0, 1, 0, 4, 0, 0.2)]
    config = RoundPipeRunConfig(execute_plan=_core.Plan(2, 4, 4, 0, jobs))
    x = torch.randn(4, 256).bfloat16()
    arguments: Any = {"loss_fn": lambda outputs, _: outputs.float().square().sum(), "run_config": config}
    predicted = pipe.predict_memory((x,), **arguments)
    layer = sum(parameter.numel() for parameter in model[1].parameters()) * 4
    assert predicted.host.partial_sums >= 4 * layer
    pipe.forward_backward((x,), **arguments)
    pipe.synchronize()
    held = predicted.host.weights + predicted.host.gradients + predicted.host.partial_sums
    assert pipe.host_bytes() <= held * 1.01
    assert predicted.host.weights + predicted.host.gradients < pipe.host_bytes()


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


class _Held(nn.Module):
    """Its backward waits until it may go on."""

    def __init__(self, may_go_on: threading.Event) -> None:
        super().__init__()
        self.may_go_on = may_go_on

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        if out.requires_grad:
            out.register_hook(self.wait)
        return out

    def wait(self, _: Tensor) -> None:
        assert self.may_go_on.wait(timeout=120)


def test_a_job_may_be_over_before_the_sum_that_its_gradients_are_added_to() -> None:
    """The next call's last layers share a weight with first ones whose backward, in this call, is still running."""
    use_devices(3)
    may_go_on = threading.Event()
    may_go_on.set()
    torch.manual_seed(BASE_SEED)
    ends = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    ends[1].weight = ends[0].weight
    model = nn.Sequential(ends[0], _Held(may_go_on), ends[1])
    x, y = data(4)
    for _ in range(2):
        squared(model(x), y).backward()
    expected = ends[0].weight.grad
    assert expected is not None
    ends[0].weight.grad = None
    pipe = RoundPipe(model)
    jobs: list[Any] = [("forward", 0, 2, 0, 1, 2, 0.0), ("fused", 2, 3, 0, 1, 1, 0.1), ("backward", 0, 2, 0, 1, 0, 0.2)]
    config = RoundPipeRunConfig(
        num_microbatch=1, execute_plan=_core.Plan(3, 1, 3, 0, jobs), tied_grad_accumulation="microbatch"
    )
    may_go_on.clear()
    try:
        for _ in range(2):
            pipe.forward_backward((x,), label=y, loss_fn=squared, run_config=config)
        # What comes from device 1 after the gradients of the second call: its job there is over.
        after = RoundPipeRunConfig(
            num_microbatch=1, execute_plan=_core.Plan(1, 1, 3, 0, [("forward", 0, 1, 0, 1, 1, 0.0)])
        )
        with torch.no_grad():
            RoundPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH)))(x, roundpipe_run_config=after)
    finally:
        may_go_on.set()
    pipe.synchronize()
    assert ends[0].weight.grad is not None
    assert torch.equal(ends[0].weight.grad, expected)


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="tied_grad_accumulation is 'stage', expected 'layer', 'microbatch'"):
        RoundPipeRunConfig(tied_grad_accumulation="stage")  # type: ignore[arg-type]
