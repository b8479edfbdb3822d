"""Strides and alignment of what crosses a layer boundary, and bits that depend on them.

Kernels choose their way by strides and alignment, on some processors more than on others. The layers here do so openly:
what they compute depends on how their input lies, and their gradient on how the gradient that they are given lies. So
any boundary that lays something out otherwise than the loop does shows on every processor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from reference_loops import BASE_SEED, Pair, fused_loop, laid_out, plan_of, run_layers, split_loop, use_devices
from roundpipe import RoundPipe, RoundPipeRunConfig

pytestmark = pytest.mark.timeout(120)


def mark(tensor: Tensor) -> float:
    """A number in [1, 2) for how a tensor lies: its strides, and its address modulo 64 bytes."""
    number = tensor.data_ptr() % 64
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number = number * 31 + size * 7 + stride
    return 1.0 + (number % 1021) / 1021


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * mark(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        # A new tensor that lies as the gradient does, broadcast or not.
        return torch.empty_like(gradient).copy_(gradient * mark(gradient))


class Looks(nn.Module):
    """Multiplies each tensor by a number for how it lies; backward, each gradient by one for how that lies."""

    def forward(self, value: Any) -> Any:
        def look(tensor: Tensor) -> Tensor:
            return Look.apply(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

        return pytree.tree_map_only(torch.Tensor, look, value)


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def as_row(value: Any) -> Tensor:
    """Everything in one dimension, in fp32."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    plain = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.cat([leaf.float().reshape(-1) for leaf in plain])


def write(value: Any) -> Any:
    """Writes to the first tensor."""
    pytree.tree_leaves(value)[0].mul_(1.5).add_(0.25)
    return value


WIDTH = 12
# Layers between a linear layer and the end: each takes what the one before returned, the first (rows, WIDTH).
CASES: dict[str, list[Callable[[Any], Any]]] = {
    "as it is": [lambda x: x],
    "every second": [lambda x: x[:, ::2]],
    "every fourth": [lambda x: x[:, ::4]],
    "every fourth, twice": [lambda x: x[:, ::4], lambda x: x[:, ::2]],
    "one column": [lambda x: x[:, 3]],
    "transposed": [lambda x: x.t()],
    "transposed gaps": [lambda x: x.t()[::2]],
    "some columns": [lambda x: x.narrow(1, 5, 7)],
    "a few columns": [lambda x: x.narrow(1, 5, 3)],
    "later rows": [lambda x: x[1:]],
    "later elements": [lambda x: x.reshape(-1)[5:]],
    "expanded": [lambda x: x.unsqueeze(1).expand(-1, 3, -1)],
    "expanded gaps": [lambda x: x[:, ::4].unsqueeze(1).expand(-1, 3, -1)],
    "expanded last": [lambda x: x.mean(1, keepdim=True).expand(-1, 5)],
    "flipped": [lambda x: x.flip(0)],
    "overlapping": [lambda x: x.unfold(1, 4, 1)],
    "overlapping gaps": [lambda x: x.unfold(1, 2, 1)[:, ::5]],
    "strided anyhow": [lambda x: x.reshape(-1).as_strided((5, 4), (3, 1), 2)],
    "channels last": [lambda x: x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)],
    "channels last, some rows": [lambda x: x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)[1:]],
    "size one": [lambda x: x[:, 2:3], lambda x: x.t()],
    "no elements": [lambda x: (x[:, 3:3], x)],
    "no dimensions": [lambda x: (x[1, 5], x)],
    "double": [lambda x: x.double()[:, 1::2]],
    "bfloat16": [lambda x: x.bfloat16()[:, 1:]],
    "complex": [lambda x: torch.view_as_complex(x.view(-1, 6, 2))[:, 1:]],
    "conjugate": [lambda x: torch.view_as_complex(x.view(-1, 6, 2))[:, 1:].conj()],
    "mask": [lambda x: (x, (x > 0)[:, ::4]), lambda t: (t[0] * 2, t[1].t())],
    "chunks": [lambda x: x.chunk(3, 1), lambda t: t[::-1]],
    "views of one": [lambda x: (x, x[:, 1:4], x[:, 6:]), lambda t: t[0].sum(1, keepdim=True) * t[1] + t[2][:, :3]],
    "twice": [lambda x: (x, x), lambda t: t[0] * t[1] + t[0].sin() + t[1]],
    "three times": [lambda x: (x, x, x), lambda t: t, lambda t: (t[2].exp() * t[0].sin() + t[1]) * t[2]],
    "gradient of a cat": [lambda x: x * 2, lambda x: torch.cat([x, x.detach()], 1)],
    "gradient of a wide cat": [lambda x: x * 2, lambda x: torch.cat([x[:, :2], x.detach(), x.detach()], 1)],
    "gradient of odd rows": [lambda x: x[:, :3] * 2, lambda x: torch.cat([x.detach()[:1], x])],
    "gradients of views": [lambda x: (x[:, :5], x[:, 5:]), lambda t: torch.cat([t[1], t[0]], 1), lambda x: x.t()],
    "gradient that is expanded": [lambda x: x * 2, lambda x: x.sum(1)],
    "gradient that is transposed": [lambda x: x * 2, lambda x: x.t() @ x],
    "gradients that add up": [lambda x: x[:, ::2], lambda x: torch.cat([x, x.sin(), x[:, :1]], 1) @ x.new_ones(13, 2)],
    "handed through": [
        lambda x: (x[:, :3] * 2, x[:, 3:6]),
        lambda t: (t[0], t[0].sin() * t[1]),
        lambda t: (t[0], t[1] + t[0].cos()),
        lambda t: torch.cat([t[1][:1].detach(), t[0], t[1]]),
    ],
    "handed through wide": [
        lambda x: (x[:, ::4], x),
        lambda t: (t[0], t[1].sin()),
        lambda t: (t[0].exp(), t[0], t[1]),
        lambda t: torch.cat([t[2], t[0] * t[1]], 1),
    ],
    "written gaps": [lambda x: x[:, ::2], write, lambda x: x.cos()],
    "written wide": [lambda x: x[:, ::4], write, lambda x: x.cos()],
    "written views": [lambda x: (x, x[:, 2:5]), write, lambda t: t[0][:, :3] * t[1], lambda x: x.cos()],
    "written twice": [lambda x: (x, x), write, lambda t: t[0] * t[1]],
}


def model_of(case: str, looks: bool = True) -> nn.Sequential:
    """The case's layers, with layers between them that look."""
    layers: list[nn.Module] = [nn.Linear(6, WIDTH)]
    for function in CASES[case]:
        layers += [Looks()] if looks else []
        layers += [Lambda(function)]
    return nn.Sequential(*layers, Looks(), Lambda(as_row))


def mean_square(output: Any, _: Any) -> Tensor:
    looked: Tensor = Looks()(output)
    return looked.square().mean()


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def train(
    model: nn.Sequential,
    args: tuple[Any, ...],
    *,
    devices: int = 1,
    microbatches: int = 1,
    fused: bool = True,
    grain: Literal["stage", "layer"] = "stage",
    forward_cuts: Any = (),
    backward_cuts: Any = (),
    loss: Callable[[Any, Any], Tensor] = mean_square,
    label: Any = None,
) -> None:
    """One step of the pipeline and of the loop; all bits are the same."""
    use_devices(devices)
    plan = plan_of(len(model), forward_cuts, backward_cuts, fused)
    config = RoundPipeRunConfig(recompute_grain=grain, execute_plan=plan)
    pair = Pair(model, loss)
    pair.train(args, label=label, microbatches=microbatches, fused=fused, steps=1, config=config)


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_loop_wherever_stages_are_cut(case: str) -> None:
    every = range(1, 20)
    plans: list[dict[str, Any]] = [
        {},
        {"grain": "layer", "devices": 2, "microbatches": 3},
        {"forward_cuts": every, "backward_cuts": every, "devices": 4},
        {"forward_cuts": every[::2], "backward_cuts": every[1::2], "fused": False, "looks": False},
    ]
    for options in plans:
        torch.manual_seed(BASE_SEED)
        model = model_of(case, options.pop("looks", True))
        train(model, (batch(7, 6),), **options)


cuts = st.sets(st.integers(1, 9))


@settings(max_examples=50, deadline=None)
@given(
    case=st.sampled_from(sorted(CASES)),
    looks=st.booleans(),
    devices=st.sampled_from([1, 2, 4]),
    microbatches=st.integers(1, 3),
    fused=st.booleans(),
    grain=st.sampled_from(["stage", "layer"]),
    forward_cuts=cuts,
    backward_cuts=cuts,
)
def test_any_plan_gives_the_bits_of_the_loop(
    case: str, looks: bool, forward_cuts: set[int], backward_cuts: set[int], **options: Any
) -> None:
    torch.manual_seed(BASE_SEED)
    model = model_of(case, looks)
    train(model, (batch(7, 6),), forward_cuts=sorted(forward_cuts), backward_cuts=sorted(backward_cuts), **options)


# --- the ends ---

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, :6],
    "gaps": lambda x: x[:, ::2],
    "wide": lambda x: x[:, ::4],
    "offset": lambda x: x.reshape(-1)[5:].narrow(0, 0, 105).view(7, 15),
    "transposed": lambda x: x[:, :7].t(),
    "expanded": lambda x: x[:, :1].expand(-1, 5),
    "overlapping": lambda x: x.reshape(-1).as_strided((7, 6), (4, 1), 3),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_labels_and_what_goes_back_to_the_caller(view: str, fused: bool) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        looked: Tensor = Looks()(output) * (Looks()(target) if fused else target).sum()
        return looked.square().mean()

    for microbatches, cuts in ((1, [1, 2]), (3, []), (3, [1])):
        use_devices(2)
        layers = nn.Sequential(Looks(), Lambda(lambda x: x * 2), Lambda(as_row))
        config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan_of(3, cuts, cuts, fused))
        ours, theirs = batch(7, 24).requires_grad_(), batch(7, 24).requires_grad_()
        target = VIEWS[view](batch(7, 24))
        pipe = RoundPipe(layers)
        if fused:
            pipe.forward_backward((VIEWS[view](ours),), label=target, loss_fn=loss, run_config=config)
        else:
            loss(pipe(VIEWS[view](ours), roundpipe_run_config=config), target).backward()
        loop = fused_loop if fused else split_loop
        loop(list(layers), (VIEWS[view](theirs),), {}, target, loss, [[0] * 4] * microbatches)
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), (microbatches, cuts)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_outputs_lie_as_the_last_layer_left_them(view: str, requires_grad: bool) -> None:
    for cut in ((), (1,)):
        use_devices(2)
        model = nn.Sequential(nn.Linear(6, 24), Lambda(VIEWS[view]))
        pipe = RoundPipe(model)
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan_of(2, cut, cut, fused=False))
        x = batch(7, 6)
        with torch.set_grad_enabled(requires_grad):
            output = pipe(x, roundpipe_run_config=config)
            expected = laid_out(run_layers(list(model), (x,), {}, [0, 0]))
        assert torch.equal(output, expected)
        assert output.stride() == expected.stride()
        assert output.data_ptr() % 64 == expected.data_ptr() % 64


def test_one_tensor_given_twice_is_one_in_every_layer() -> None:
    same: list[bool] = []

    def notes(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        same.append(pair[0] is pair[1])
        return pair

    for cut, grain in itertools.product(((), (1, 2, 3)), ("stage", "layer")):
        use_devices(2)
        model = nn.Sequential(nn.Linear(6, 4), Lambda(lambda x: (x, x)), Lambda(notes), Lambda(notes), Lambda(as_row))
        plan = plan_of(len(model), cut, cut, fused=True)
        config = RoundPipeRunConfig(num_microbatch=1, recompute_grain=grain, execute_plan=plan)  # type: ignore[arg-type]
        RoundPipe(model).forward_backward((batch(7, 6),), loss_fn=mean_square, run_config=config)
    assert same and all(same)


class Flags(nn.Linear):
    """What torch chooses its products by: whether each parameter requires gradients."""

    def forward(self, x: Tensor) -> Tensor:
        flags = torch.tensor([float(p.requires_grad) for p in self.parameters()], device=x.device)
        return x + 0 * super().forward(x) + flags


@pytest.mark.parametrize("gradients", [True, False])
def test_parameters_require_gradients_as_those_of_the_plain_model(gradients: bool) -> None:
    use_devices(2)
    model = nn.Sequential(Flags(2, 2), Flags(2, 2))
    model[0].bias.requires_grad_(False)
    x = torch.zeros(3, 2)
    with torch.set_grad_enabled(gradients):
        expected = model(x)
        found = RoundPipe(model)(x)
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad
