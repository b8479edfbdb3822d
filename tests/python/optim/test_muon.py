"""Muon, as a drop-in and on a model in the pipeline, against torch's Muon and AdamW, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from fused_reference import FusedPair
from reference_loops import assert_same, use_devices
from roundpipe import RoundPipe, optim
from roundpipe.model.memory.budget import BudgetError
from roundpipe.train.demo.plain_loop import fused_adamw
from sweeps import sweep

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch fuses multiplication and addition only with these",
)

WIDTH = 32
MUON = {"lr": 2e-2, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.05}

# -- drop-in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"momentum": 0.3, "weight_decay": 0.0, "ns_steps": 2, "adjust_lr_fn": "original", "eps": 1e-3},
        {"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 3},
    ],
    ids=str,
)
def test_the_bits_of_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    values = [torch.randn(96, 160), torch.randn(160, 96), torch.randn(48, 80).t(), torch.randn(64, 64)]
    mine, other = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    ours, theirs = optim.Muon(mine, **options), torch.optim.Muon(other, **options)
    assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    for step in range(5):
        for a, b in zip(mine, other, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 2:
            mine[0].grad = other[0].grad = None
        ours.step()
        theirs.step()
    for a, b in zip(mine, other, strict=True):
        assert_same(a.detach(), b.detach(), "weight")
        assert_same(ours.state[a], theirs.state[b], "state")


@pytest.mark.parametrize("to_ours", [True, False])
def test_state_dicts_go_both_ways(to_ours: bool) -> None:
    torch.manual_seed(2)
    first, second = (nn.Parameter(torch.randn(64, 32)) for _ in range(2))
    second.data.copy_(first)
    kinds = (torch.optim.Muon, optim.Muon) if to_ours else (optim.Muon, torch.optim.Muon)
    before, whole = kinds[0]([first]), torch.optim.Muon([second])
    for step in range(4):
        if step == 2:
            after = kinds[1]([first])
            after.load_state_dict(copy.deepcopy(before.state_dict()))
            before = after
        first.grad = torch.randn(64, 32)
        second.grad = first.grad.clone()
        before.step()
        whole.step()
    assert_same(first.detach(), second.detach(), "weight")


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optim.Muon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        optim.Muon([nn.Parameter(torch.zeros(3, 3))], momentum=-1.0)
    with pytest.raises(ValueError, match="adamw is for a RoundPipe model"):
        optim.Muon([nn.Parameter(torch.zeros(3, 3))], adamw={})
    of_a_model = optim.Muon([{"params": [nn.Parameter(torch.zeros(3, 3))], "use_muon": False}])
    of_a_model.param_groups[0]["params"][0].grad = torch.ones(3, 3)
    with pytest.raises(ValueError, match="need an AdamW of their own"):
        of_a_model.step()
    half = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))  # torch's own step
    other = nn.Parameter(half.detach().clone())
    half.grad = torch.randn_like(half)
    other.grad = half.grad.clone()
    optim.Muon([half]).step()
    torch.optim.Muon([other]).step()
    assert_same(half.detach(), other.detach(), "bf16 weight")


# -- for a model ----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two matrices in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.experts[0]).tanh() @ self.experts[1]


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
        Experts(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.Linear(WIDTH, WIDTH),
    ]
    layers[-1].weight.requires_grad_(False)
    return nn.Sequential(*layers).to(dtype)


class TorchsOwn:
    """torch's Muon for matrices, each of a stack by itself, and torch's AdamW for vectors."""

    def __init__(self, masters: list[tuple[str, nn.Parameter]]) -> None:
        self.stacks = [m for _, m in masters if m.dim() == 3]
        self.parts = [[nn.Parameter(part) for part in m.detach().unbind()] for m in self.stacks]
        matrices = [m for _, m in masters if m.dim() == 2]
        self.muon = torch.optim.Muon([*matrices, *(part for parts in self.parts for part in parts)], **MUON)
        self.adamw = fused_adamw([m for _, m in masters if m.dim() < 2], **ADAMW)

    def step(self) -> None:
        for stack, parts in zip(self.stacks, self.parts, strict=True):
            for part, gradient in zip(parts, stack.grad.unbind(), strict=True):  # type: ignore[union-attr]
                part.grad = gradient.contiguous()
        self.muon.step()
        self.adamw.step()


def ours(pipe: RoundPipe) -> Any:
    return optim.Muon(pipe, **MUON, adamw=ADAMW)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, WIDTH).to(dtype), torch.randn(8, WIDTH).to(dtype)


@sweep("count, is_async, dtype", [1, 2, 3, 4], [True, False], [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_torchs_loop_on_any_number_of_devices(count: int, is_async: bool, dtype: torch.dtype) -> None:
    use_devices(count)
    run = FusedPair(build(dtype), ours, TorchsOwn, microbatches=4)  # type: ignore[arg-type]
    for step in range(4):
        run.call(*batch(dtype))
        run.step(is_async, max_grad_norm=0.02 if step == 2 else None)
    run.compare()


@pytest.mark.parametrize("whole", [True, False])
def test_a_saved_run_goes_on_with_the_same_bits(whole: bool, tmp_path: Path) -> None:
    use_devices(2)
    data = [batch(torch.bfloat16) for _ in range(6)]

    def make() -> tuple[RoundPipe, Any]:
        pipe = RoundPipe(build(torch.bfloat16), name="resume")
        return pipe, ours(pipe)

    def steps(pipe: RoundPipe, optimizer: Any, batches: list[Any]) -> None:
        for inputs, label in batches:
            pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
            pipe.step(optimizer, is_async=True)

    pipe, optimizer = make()
    steps(pipe, optimizer, data[:3])
    other, other_optimizer = make()
    if whole:
        roundpipe.save_checkpoint(tmp_path, pipe, optimizer, step=3)
        roundpipe.load_checkpoint(tmp_path, other, other_optimizer)
    else:
        pipe.synchronize()
        other.load_state_dict({name: value.clone() for name, value in pipe.state_dict().items()})
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.calls = pipe.calls
    steps(pipe, optimizer, data[3:])
    steps(other, other_optimizer, data[3:])
    for (name, mine), theirs in zip(pipe.named_parameters(), other.parameters(), strict=True):
        assert_same(mine.detach(), theirs.detach(), name)
    states = [o.state_dict()["state"] for o in (optimizer, other_optimizer)]
    assert states[0].keys() == states[1].keys()
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert_same(mine, theirs, "state")
    kinds = {tuple(sorted(entry)) for entry in states[0].values()}
    assert kinds == {("master_remainder", "momentum_buffer"), ("exp_avg", "exp_avg_sq", "master_remainder", "step")}


def test_memory_is_that_of_each_parameters_rule() -> None:
    use_devices(1)
    model = build(torch.bfloat16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    pipe = RoundPipe(model, name="memory")
    optimizer = ours(pipe)
    inputs, label = batch(torch.bfloat16)
    pipe.forward_backward((inputs,), label=label, loss_fn=nn.functional.mse_loss)
    pipe.step(optimizer)
    pipe.synchronize()
    moments = sum(p.numel() * (4 if p.dim() >= 2 else 8) for p in trained.values())
    kept = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    assert optimizer.host_memory().moments == moments
    assert sum(t.nbytes for t in kept if t.dtype == torch.float32 and t.dim() > 0) == moments
    predicted = pipe.predict_memory((inputs,), label=label, loss_fn=nn.functional.mse_loss)
    assert predicted.host.moments == moments
    with pytest.raises(BudgetError, match="the model with Muon does not fit on the host"):
        tight = RoundPipe(build(torch.bfloat16), name="tight", host_memory=predicted.host.total - moments)
        ours(tight)
    exact = RoundPipe(build(torch.bfloat16), name="exact", host_memory=predicted.host.total)
    ours(exact)


def test_what_is_no_matrix_is_refused_by_name_unless_adamw_steps_it() -> None:
    use_devices(1)
    pipe = RoundPipe(build(), name="refused")
    with pytest.raises(ValueError, match=r"parameter '0\.bias' is of shape \[64\], expected a matrix"):
        optim.Muon(pipe)
    with pytest.raises(ValueError, match="8-bit moments are for Adam"):
        optim.Muon(pipe, adamw={}, moments="8bit")
    with pytest.raises(ValueError, match="ns_steps is 100"):
        optim.Muon(pipe, adamw={}, ns_steps=100)
    with pytest.raises(ValueError, match="Learning rate should be >= 0"):
        optim.Muon(pipe, lr=-1.0, adamw={})
    groups = [{"params": "*.bias", "use_muon": False, "lr": 0.5}, {"params": "3.weight", "momentum": 0.5}]
    optimizer = optim.Muon(pipe, lr=0.25, groups=groups, adamw={"weight_decay": 0.125})
    shown = [(g["use_muon"], g["lr"], g["weight_decay"], g["eps"], g["momentum"]) for g in optimizer.param_groups]
    assert shown == [
        (False, 0.5, 0.1, 1e-8, 0.95),
        (True, 0.25, 0.1, 1e-7, 0.5),
        (False, 0.25, 0.125, 1e-8, 0.95),  # the norm's weight
        (True, 0.25, 0.1, 1e-7, 0.95),
    ]
    assert [len(g["params"]) for g in optimizer.param_groups] == [4, 1, 1, 3]


def test_embeddings_are_for_adamw_by_their_class() -> None:
    use_devices(1)
    pipe = RoundPipe(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)), name="tokens")
    optimizer = optim.Muon(pipe, adamw={})
    assert [(g["use_muon"], len(g["params"])) for g in optimizer.param_groups] == [(False, 1), (True, 1)]


def test_a_tied_weight_is_stepped_once() -> None:
    use_devices(2)
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    layers[2].weight = layers[0].weight
    run = FusedPair(
        layers, lambda pipe: optim.Muon(pipe, **MUON), lambda masters: torch.optim.Muon([m for _, m in masters], **MUON)
    )
    for _ in range(3):
        run.call(*batch())
        run.step(is_async=True)
    run.compare()


def test_scaled_losses_give_the_same_bits_and_a_skipped_step_changes_nothing() -> None:
    use_devices(2)
    results = []
    for scale, overflows in ((1.0, False), (8.0, False), (8.0, True)):
        torch.manual_seed(4)
        pipe = RoundPipe(build(), name="scaled", check_loss=False)
        optimizer, scaler = ours(pipe), roundpipe.GradScaler(init_scale=scale)
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        inputs, label = batch()
        label = label * float("inf") if overflows else label

        def loss(outputs: torch.Tensor, target: torch.Tensor, scaler: roundpipe.GradScaler = scaler) -> torch.Tensor:
            return scaler.scale(nn.functional.mse_loss(outputs, target))

        pipe.forward_backward((inputs,), label=label, loss_fn=loss)
        skipped = pipe.step(optimizer, is_async=False, scaler=scaler).skipped
        assert skipped is overflows
        pipe.synchronize()
        results.append(pipe.state_dict())
        if skipped:
            assert_same(dict(results[-1]), before, "a skipped step")
    assert_same(dict(results[0]), dict(results[1]), "scaled by a power of two")
