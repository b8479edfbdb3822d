"""What a fused optimizer refuses, and that nothing has changed then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from programs import ProgramRunner
from reference_loops import use_devices
from roundpipe import RoundPipe


@pytest.fixture
def pipe() -> RoundPipe:
    use_devices(1)
    torch.manual_seed(0)
    return RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), name="bad")


def train(pipe: RoundPipe) -> None:
    pipe.forward_backward((torch.randn(4, 4),), loss_fn=lambda outputs, _: outputs.square().mean())


GROUPS: list[tuple[Any, str]] = [
    ([{"params": "3.weight"}], "'3.weight' fits no trainable parameter.*'0.weight'"),
    ([{"params": ["0.*", "missing"]}], "'missing' fits no"),
    ([{"params": re.compile("^nothing")}], "'\\^nothing' fits no"),
    ([{"params": lambda name, p: False}], "the function .* fits no"),
    ([{"params": nn.Parameter(torch.zeros(2))}], "a parameter of shape \\(2,\\) fits no"),
    ([{"params": "0.*"}, {"params": "*.bias"}], "'0.bias' is in groups\\[0\\] already"),
    ([{"lr": 1.0}], "expected a dict with 'params'"),
    (["0.*"], "expected a dict with 'params'"),
    ([{"params": 3}], "'params' has a int"),
    ([{"params": "0.*", "learning_rate": 1.0}], "groups\\[0\\] has 'learning_rate', expected options of AdamW"),
]


@pytest.mark.parametrize(("groups", "message"), GROUPS, ids=[message[:20] for _, message in GROUPS])
def test_groups(pipe: RoundPipe, groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        roundpipe.optim.AdamW(pipe, groups=groups)
    # Refused before anything was bound: the model can still be stepped in any way.
    list(pipe.optim_parameters())


MAKING: list[tuple[Callable[[RoundPipe], Any], str]] = [
    (lambda pipe: roundpipe.optim.AdamW(pipe, moments="4bit"), "moments is '4bit'"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, gradients="bf16"), "gradients is 'bf16'"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, masters="8bit"), "masters is '8bit', expected 'float32' or '24bit'"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, masters="24bit"), "'0.weight' is Float, expected bfloat16"),
    (lambda pipe: roundpipe.optim.SGD(pipe, moments="8bit"), "8-bit moments are for Adam and AdamW"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, amsgrad=True, moments="8bit"), "8-bit moments are for Adam and AdamW"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, lr=-1.0), "[Ii]nvalid learning rate"),
    (lambda pipe: roundpipe.optim.AdamW(pipe, differentiable=True), "differentiable"),
    (lambda pipe: roundpipe.optim.AdamW([nn.Parameter(torch.ones(2))], moments="8bit"), "for a RoundPipe model"),
    (lambda pipe: roundpipe.optim.AdamW([nn.Parameter(torch.ones(2))], masters="24bit"), "for a RoundPipe model"),
    (lambda pipe: roundpipe.optim.AdamW(pipe.requires_grad_(False)), "no trainable parameter"),
]


@pytest.mark.parametrize(("make", "message"), MAKING, ids=[message[:20] for _, message in MAKING])
def test_making(pipe: RoundPipe, make: Callable[[RoundPipe], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(pipe)


def test_a_model_whose_optim_parameters_are_in_use(pipe: RoundPipe) -> None:
    torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="optim_parameters\\(\\) are in use"):
        roundpipe.optim.AdamW(pipe)


def test_dtype() -> None:
    use_devices(1)
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64)), name="double")
    with pytest.raises(ValueError, match="'weight' is Double, expected float32, bfloat16 or float16"):
        roundpipe.optim.AdamW(model)


def test_stepping(pipe: RoundPipe) -> None:
    optimizer = roundpipe.optim.AdamW(pipe)
    train(pipe)
    before = [p.detach().clone() for p in pipe.parameters()]
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: pipe.step(lambda: None), "use model.step\\(optimizer\\)"),
        (lambda: pipe.step(optimizer, max_grad_norm=-1.0), "max_grad_norm is -1,"),
        (lambda: pipe.step(optimizer, scaler=torch.amp.GradScaler("cpu")), "expected a roundpipe.GradScaler"),
        (lambda: pipe.step(optimizer, scaler=roundpipe.GradScaler("cpu")), "scaled no loss"),
        (lambda: pipe.step(optimizer, lr_scheduler=3), "lr_scheduler is a int"),
        (lambda: pipe.step(torch.optim.SGD([torch.ones(1)], lr=1.0)), "was not made for this model"),
        (lambda: pipe.optim_parameters(), ""),
        (lambda: list(pipe.optim_parameters()), "updates it in place"),
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "make a new one"),
    ]
    with pytest.raises(
        TypeError, match=r"^\[step\] got asynchronous, expected, with an optimizer, no other than is_async"
    ):
        pipe.step(optimizer, asynchronous=False)
    for call, message in refused:
        if message:
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(TypeError, match="closure"):
        pipe.step(optimizer, closure=lambda: 1.0)
    pipe.synchronize()
    for p, old in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(p, old) and p.grad is not None
    pipe.step(optimizer)
    pipe.synchronize()
    assert not torch.equal(next(iter(pipe.parameters())), before[0])


def test_sparse_gradients_become_dense() -> None:
    use_devices(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    pipe = RoundPipe(model, name="sparse")
    optimizer = roundpipe.optim.SGD(pipe, lr=0.1)
    before = model[0].weight.detach().clone()
    pipe.forward_backward((torch.tensor([1, 3]),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.step(optimizer)
    pipe.synchronize()
    changed = (model[0].weight != before).any(dim=1)
    assert changed.tolist() == [False, True, False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sd: sd["state"][0].pop("exp_avg"), "expected exp_avg, exp_avg_sq"),
        (lambda sd: sd["state"][0].update(exp_avg=torch.zeros(3)), "exp_avg of a parameter of shape"),
        (lambda sd: sd["param_groups"][0]["params"].pop(), "the state has 5 parameters, expected 6"),
    ],
)
def test_states_that_do_not_fit(pipe: RoundPipe, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    optimizer = roundpipe.optim.AdamW(pipe)
    train(pipe)
    pipe.step(optimizer)
    saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict())
    broken = torch.utils._pytree.tree_map(lambda x: x, saved)
    change(broken)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])
    assert after["param_groups"] == saved["param_groups"]


# The settings are the process's own, read when the first update is made: hence a process of its own.
SETTINGS = """
import os, sys, torch, roundpipe
from torch import nn
roundpipe.devices("virtual:1")
model = roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
model.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
good = {"ROUNDPIPE_OPTIM_THREADS": "3", "ROUNDPIPE_OPTIM_PIN": "1", "ROUNDPIPE_OPTIM_ISA": "baseline"}
for setting in sys.argv[1:]:
    variable, value = setting.split("=")
    os.environ |= good | {variable: value}
    try:
        roundpipe.optim.AdamW(model, gradients="float32")
    except ValueError as error:
        print(error)
os.environ |= good
before = model.state_dict()["0.weight"].clone()
assert model[0].weight.grad is not None
optimizer = roundpipe.optim.AdamW(model)
assert float(model.step(optimizer, max_grad_norm=1.0)) > 0
assert not torch.equal(model.state_dict()["0.weight"], before)
assert (roundpipe._core.threads(), roundpipe._core.instruction_set()) == (3, "baseline")
"""


@pytest.mark.long
def test_settings_of_the_environment(runner: ProgramRunner, tmp_path: Path) -> None:
    numbers = ("auto", "0", "-2", "1.5", "99999999999999999999")
    bad = [*(f"THREADS={number}" for number in numbers), "PIN=yes", "ISA=sse9"]  # in the order in which they are read
    bad = [f"ROUNDPIPE_OPTIM_{setting}" for setting in bad]
    program = tmp_path / "program.py"
    program.write_text(SETTINGS)
    run = runner.run(program, *bad)
    assert (run.returncode, run.stderr) == (0, "")
    for said, setting in zip(run.stdout.splitlines(), bad, strict=True):
        assert said.startswith(f"[{setting.split('=')[0]}] got ")
