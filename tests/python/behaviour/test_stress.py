"""Random models, cuts, devices and microbatches: always the bits of the slow loop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe
from robustness import ReferenceLoop, assert_same, pipe_of, sgd_step, squared_error, state_of
from roundpipe import ModelExecutePlan

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WIDTH = 4
Draw = st.DrawFn


# --- layers ---


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.inner(value)


class Noise(nn.Module):
    """Draws without being a dropout, and keeps a count in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count = self.count + 1
            value = value + self.scale * torch.rand_like(value)
        return value


class Fork(nn.Module):
    """One tensor in; itself, another and a number out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        return value, {"other": self.linear(value), "same": value}, 3


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor], int]) -> tuple[object, ...]:
        value, others, number = pair
        return value, {"other": self.linear(others["other"]) / number, "same": others["same"]}, number + 1


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor], int]) -> torch.Tensor:
        value, others, number = pair
        return value + others["other"] * others["same"] / number


def frozen_linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def half_frozen_linear() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


SIMPLE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "dropout": lambda: nn.Dropout(0.3),
    "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
    "layernorm": lambda: nn.LayerNorm(WIDTH),
    "residual": Residual,
    "noise": Noise,
    "frozen": frozen_linear,
    "half frozen": half_frozen_linear,
    "identity": nn.Identity,
}
IN_PLACE = {"relu in place": lambda: nn.ReLU(inplace=True), "dropout in place": lambda: nn.Dropout(0.2, inplace=True)}
# Their outputs are not needed for their own backward, so the next layer may write to them.
BEFORE_IN_PLACE = ("linear", "batchnorm", "layernorm", "residual", "frozen", "half frozen", "tied")


@dataclass
class Case:
    kinds: list[str]
    forward_cuts: list[int]
    backward_cuts: list[int]
    default_plan: bool
    devices: int
    microbatches: int
    samples: int
    grain: str
    is_async: bool
    cap: str
    fused: bool
    calls_per_step: int
    input_gradients: bool
    training: bool
    groups: int

    def build(self) -> nn.Sequential:
        torch.manual_seed(11)
        layers: list[nn.Module] = []
        for kind in self.kinds:
            if kind == "fork":
                layers += [Fork()]
            elif kind == "middle":
                layers += [Middle()]
            elif kind == "join":
                layers += [Join()]
            elif kind == "tied":
                layer = nn.Linear(WIDTH, WIDTH)
                layer.weight = next(one.weight for one in layers if type(one) is nn.Linear)
                layers += [layer]
            else:
                layers += [(SIMPLE | IN_PLACE)[kind]()]
        return nn.Sequential(*layers).train(self.training)

    def plan(self) -> ModelExecutePlan | None:
        if self.default_plan:
            return None
        plan, count = ModelExecutePlan(), len(self.kinds)
        backward = stages_of(self.backward_cuts, count)
        plan.bwd_plan = backward[::-1]
        end = backward[-1].start if self.fused else count
        plan.fwd_plan = stages_of([cut for cut in self.forward_cuts if cut < end], end)
        return plan


def stages_of(cuts: list[int], end: int) -> list[range]:
    bounds = sorted({0, *cuts, end})
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


@st.composite
def cases(draw: Draw) -> Case:
    kinds: list[str] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([*SIMPLE, *IN_PLACE, "tied", "fork"]))
        if kind in IN_PLACE and (not kinds or kinds[-1] not in BEFORE_IN_PLACE):
            kind = "relu"
        if kind == "tied" and not {"linear", "frozen", "half frozen"} & set(kinds):
            kind = "linear"
        kinds += ["fork", *["middle"] * draw(st.integers(0, 2)), "join"] if kind == "fork" else [kind]
    # Something has to be trainable, wherever it stands; not between a layer and one that writes to its output.
    places = [i for i in range(len(kinds) + 1) if i == len(kinds) or kinds[i] not in (*IN_PLACE, "middle", "join")]
    kinds.insert(draw(st.sampled_from(places)), "linear")
    cuts = st.lists(st.integers(1, max(1, len(kinds) - 1)), max_size=4) if len(kinds) > 1 else st.just([])
    microbatches = draw(st.integers(1, 6))
    fused = draw(st.booleans())
    return Case(
        kinds=kinds,
        forward_cuts=draw(cuts),
        backward_cuts=draw(cuts),
        default_plan=draw(st.booleans()),
        devices=draw(st.integers(1, 8)),
        microbatches=microbatches,
        samples=2 * microbatches + draw(st.integers(0, 3)),
        grain=draw(st.sampled_from(["stage", "layer"])),
        is_async=draw(st.booleans()),
        cap=draw(st.sampled_from(["", ",memory=256KiB"])),
        fused=fused,
        calls_per_step=draw(st.integers(1, 2)),
        input_gradients=draw(st.booleans()),
        training=draw(st.sampled_from([True, True, False])),
        groups=draw(st.sampled_from([1, 1, 2, 3])),
    )


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_same_bits_as_the_slow_loop(case: Case) -> None:
    roundpipe.devices(f"virtual:{case.devices}{case.cap},debug")
    model = case.build()
    pipe = pipe_of(
        model, case.microbatches, recompute_grain=case.grain, execute_plan=case.plan(), gradient_groups=case.groups
    )
    reference = ReferenceLoop(case.build(), pipe.layer_seed, case.is_async, case.groups)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for _ in range(case.calls_per_step):
            value = torch.randn(case.samples, WIDTH, generator=generator)
            label = torch.randn(case.samples, WIDTH, generator=generator)
            mine = value.clone().requires_grad_(case.input_gradients)
            theirs = value.clone().requires_grad_(case.input_gradients)
            if case.fused:
                loss = pipe.forward_backward((mine,), label=label, loss_fn=squared_error)
            else:
                squared_error(pipe(mine), label).backward()
            parts = theirs.tensor_split(case.microbatches)
            expected = reference.forward_backward(parts, label.tensor_split(case.microbatches), squared_error)
            if case.fused:
                assert torch.equal(loss, expected)
            if case.input_gradients:
                assert torch.equal(mine.grad, theirs.grad)
        pipe.step(sgd_step(pipe), case.is_async)
        reference.step()
    assert_same(state_of(pipe), reference.state())
