"""Models in a row, several models, host modules around them, and gradients that come and go by other ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_loops import (
    BASE_SEED,
    Pair,
    assert_same,
    assert_same_model,
    cut,
    plan_of,
    use_devices,
)
from roundpipe import RoundPipe, RoundPipeRunConfig


@pytest.fixture(autouse=True, params=[1, 3])
def _devices(request: pytest.FixtureRequest) -> None:
    use_devices(request.param)
    torch.manual_seed(BASE_SEED)


def bottom() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))


def top() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def with_micro(count: int, **options: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=count, **options)


def plain_copies(*models: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(model) for model in models]


def check(pipe: RoundPipe, model: nn.Module, plain: nn.Module, when: str = "") -> None:
    pipe.synchronize()
    assert_same_model(model, plain, when)


def rejoined(parts: list[Tensor]) -> list[Tensor]:
    """The same rows as views of one tensor, in which they lie otherwise."""
    return list(torch.cat(parts).split([len(part) for part in parts]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_two_models_in_a_row(packed: bool, microbatches: int, fused: bool) -> None:
    first, second = bottom(), top()
    plain_first, plain_second = plain_copies(first, second)
    a = RoundPipe(first, name="a", model_run_config=with_micro(microbatches, merge_output=not packed))
    b = RoundPipe(second, name="b", model_run_config=with_micro(microbatches))
    x, y = data(7, 5).requires_grad_(), data(7, 2)
    plain_x = x.detach().clone().requires_grad_()
    for call in range(2):
        hidden = a(x)
        if fused:
            loss = b.forward_backward((hidden,), label=y, loss_fn=F.mse_loss)
        else:
            loss = F.mse_loss(b(hidden), y)
            loss.backward()

        parts = [plain_first(part) for part in cut(plain_x, microbatches)]
        # Packed microbatches stay tensors of their own; others are rows of one.
        between = [part.detach() for part in parts]
        leaves = [part.detach().requires_grad_() for part in (between if packed else rejoined(between))]
        outputs = [plain_second(leaf) for leaf in leaves]
        if fused:
            expected = torch.zeros(())
            for output, target in zip(outputs, cut(y, microbatches), strict=True):
                part_loss = F.mse_loss(output, target)
                part_loss.backward()
                expected = expected + part_loss.detach()
        else:
            merged = torch.cat([output.detach() for output in outputs]).requires_grad_()
            expected = F.mse_loss(merged, y)
            expected.backward()
            for output, gradient in zip(outputs, merged.grad.split([len(o) for o in outputs]), strict=True):
                output.backward(gradient)
        gradients = [leaf.grad for leaf in leaves]
        for part, gradient in zip(parts, gradients if packed else rejoined(gradients), strict=True):
            part.backward(gradient)
        assert_same(loss.detach(), expected.detach(), f"loss {call}")
        check(a, first, plain_first, f"first {call}")
        check(b, second, plain_second, f"second {call}")
        assert_same(x.grad, plain_x.grad, "gradient of the batch")


def test_host_modules_between_models() -> None:
    first, second, host = bottom(), top(), nn.Linear(6, 6)
    plain_first, plain_second, plain_host = plain_copies(first, second, host)
    a, b = RoundPipe(first, model_run_config=with_micro(1)), RoundPipe(second, model_run_config=with_micro(1))
    for _ in range(2):
        b.forward_backward((host(a(data(4, 5))).relu(),), loss_fn=lambda out, _: out.square().mean())
        plain_second(plain_host(plain_first(data(4, 5))).relu()).square().mean().backward()
    check(a, first, plain_first)
    check(b, second, plain_second)
    assert_same_model(host, plain_host, "host")


def test_input_that_is_a_leaf_and_a_replicated_parameter() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.linear(x) * scale

    model = nn.Sequential(Scaled(), nn.Linear(5, 2))
    (plain,) = plain_copies(model)
    pipe = RoundPipe(model, model_run_config=with_micro(3))
    scale, x = nn.Parameter(torch.tensor(1.5)), data(7, 5)
    plain_scale = nn.Parameter(torch.tensor(1.5))
    for fused in (True, False, True):
        if fused:
            pipe.forward_backward((x,), {"scale": scale}, loss_fn=lambda out, _: out.square().sum())
        else:
            pipe(x, scale=scale).square().sum().backward()
        # What the microbatches give to a value that they share is one sum, which then goes where it came from.
        gradients = []
        for part in cut(x, 3):
            own = plain_scale.detach().clone().requires_grad_()
            plain[1](plain[0](part, own)).square().sum().backward()
            gradients.append(own.grad)
        plain_scale.backward(gradients[0] + gradients[1] + gradients[2])
        check(pipe, model, plain)
        assert_same(scale.grad, plain_scale.grad, "shared parameter")


def test_branches_join() -> None:
    """One model's output goes two ways, and one model is called twice before a backward."""
    stem, left, right = bottom(), top(), top()
    plain_stem, plain_left, plain_right = plain_copies(stem, left, right)
    one = with_micro(1)
    s, lp, rp = (RoundPipe(m, name=n, model_run_config=one) for m, n in ((stem, "s"), (left, "l"), (right, "r")))
    x = data(4, 5)
    hidden, plain_hidden = s(x), plain_stem(x)
    total = lp(hidden).sum() * 0.5 + rp(hidden * 2).square().sum() + lp(hidden.sin()).sum()
    expected = (
        plain_left(plain_hidden).sum() * 0.5
        + plain_right(plain_hidden * 2).square().sum()
        + plain_left(plain_hidden.sin()).sum()
    )
    assert_same(total.detach(), expected.detach(), "total")
    total.backward()
    expected.backward()
    for pipe, model, plain in ((s, stem, plain_stem), (lp, left, plain_left), (rp, right, plain_right)):
        check(pipe, model, plain)


def test_unused_output_of_several() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.a(x), "b": self.b(x), "x": x.detach()}

    model = nn.Sequential(nn.Linear(5, 5), Two())
    (plain,) = plain_copies(model)
    pipe = RoundPipe(model, model_run_config=with_micro(2, execute_plan=plan_of(2, [1], [1], False)))
    out = pipe(data(6, 5))
    assert out["a"].requires_grad and out["b"].requires_grad and not out["x"].requires_grad
    out["a"].square().sum().backward()
    for part in cut(data(6, 5), 2):
        plain(part)["a"].square().sum().backward()
    check(pipe, model, plain)
    assert model[1].b.weight.grad is None


def test_adversarial_training() -> None:
    generator, judge = (
        nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5)),
        nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1)),
    )
    plain_generator, plain_judge = plain_copies(generator, judge)
    micro = 2
    g = RoundPipe(generator, name="g", model_run_config=with_micro(micro, merge_output=False))
    d = RoundPipe(judge, name="d", model_run_config=with_micro(micro))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    g_optimizer, d_optimizer = sgd(g.optim_parameters()), sgd(d.optim_parameters())
    plain_g_optimizer, plain_d_optimizer = sgd(plain_generator.parameters()), sgd(plain_judge.parameters())

    def loss_fn(out: Tensor, target: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, torch.full_like(out, target)) / micro

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        real, noise = data(6, 5) + step, data(6, 3) - step
        d.requires_grad_(True)
        with torch.no_grad():
            fake = g(noise, roundpipe_run_config=RoundPipeRunConfig(merge_output=True))
        d.forward_backward((real,), label=1.0, loss_fn=loss_fn)
        d.forward_backward((fake,), label=0.0, loss_fn=loss_fn)
        d.step(lambda: update(d_optimizer), is_async=False)
        d.requires_grad_(False)
        loss = d.forward_backward((g(noise),), label=1.0, loss_fn=loss_fn)
        g.step(lambda: update(g_optimizer), is_async=False)

        plain_judge.requires_grad_(True)
        with torch.no_grad():
            plain_fake = torch.cat([plain_generator(part) for part in cut(noise, micro)])
        assert_same(fake, plain_fake, "fake")
        for batch, target in ((real, 1.0), (plain_fake, 0.0)):
            for part in cut(batch, micro):
                loss_fn(plain_judge(part), target).backward()
        update(plain_d_optimizer)
        plain_judge.requires_grad_(False)
        expected = torch.zeros(())
        for part in cut(noise, micro):
            part_loss = loss_fn(plain_judge(plain_generator(part)), 1.0)
            part_loss.backward()
            expected = expected + part_loss.detach()
        update(plain_g_optimizer)
        assert_same(loss, expected, f"loss {step}")
        check(g, generator, plain_generator, f"generator {step}")
        check(d, judge, plain_judge, f"judge {step}")


def test_everything_frozen_but_the_input() -> None:
    model = bottom().requires_grad_(False)
    (plain,) = plain_copies(model)
    pipe = RoundPipe(model, model_run_config=with_micro(2))
    x, plain_x = data(6, 5).requires_grad_(), data(6, 5).requires_grad_()
    pipe(x).square().sum().backward()
    pipe.forward_backward((x,), loss_fn=lambda out, _: out.sum())
    for part in cut(plain_x, 2):
        plain(part).square().sum().backward()
    first = plain_x.grad.clone()
    plain_x.grad = None
    for part in cut(plain_x, 2):
        plain(part).sum().backward()
    assert_same(x.grad, first + plain_x.grad, "gradient of the input")
    check(pipe, model, plain)


def test_accumulates_over_calls_of_both_kinds_and_synchronize_between() -> None:
    model = bottom()
    (plain,) = plain_copies(model)
    pipe = RoundPipe(model)
    for count, fused, look in ((1, True, False), (3, False, True), (2, True, True), (1, False, False)):
        config = with_micro(count)
        x = data(7, 5) * count
        if fused:
            pipe.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
        else:
            pipe(x, roundpipe_run_config=config).square().mean().backward()
        parts = [plain(part) for part in cut(x, count)]
        if fused:
            for part in parts:
                part.square().mean().backward()
        else:
            merged = torch.cat([part.detach() for part in parts]).requires_grad_()
            merged.square().mean().backward()
            for part, gradient in zip(parts, merged.grad.split([len(p) for p in parts]), strict=True):
                part.backward(gradient)
        if look:
            check(pipe, model, plain)
    check(pipe, model, plain)


def test_two_forwards_before_their_backwards() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    (plain,) = plain_copies(model)
    pipe = RoundPipe(model, model_run_config=with_micro(1))
    ours, theirs = [pipe(data(6, 5) * f) for f in (1, 2, 3)], [plain(data(6, 5) * f) for f in (1, 2, 3)]
    for index in (1, 2, 0):
        ours[index].square().sum().backward()
        theirs[index].square().sum().backward()
        check(pipe, model, plain)


def test_layers_may_be_changed_between_calls() -> None:
    """Attributes, values and modes; a layer that starts to draw, or to write."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.0), nn.BatchNorm1d(6), nn.Linear(6, 2))
    pair = Pair(model, lambda out, _: out.square().mean())
    x = data(6, 5)
    pair.train((x,), microbatches=2, steps=1)
    for owner in (model, pair.plain):
        owner[1].p = 0.5
        owner[2].eval()
    pair.train((x,), microbatches=2, steps=1)
    for owner in (model, pair.plain):
        owner[2].train()
        owner[2].momentum = 0.3
        with torch.no_grad():
            owner[0].weight.mul_(1.5)
            owner[3].bias.data = torch.full((2,), 0.1)
    pair.train((x,), microbatches=3, steps=1)
    for owner in (model, pair.plain):
        with torch.no_grad():
            owner[2].running_mean.fill_(0.5)
            owner[2].num_batches_tracked.zero_()
            owner[0].bias.fill_(0.25)
    pair.train((x,), microbatches=1, steps=2)


@pytest.mark.parametrize("cuts", [[], [1]], ids=str)
def test_tensors_in_unknown_objects_are_refused(cuts: list[int]) -> None:
    """Their gradients would be lost on the way between stages."""

    class State:
        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> State:
            return State(self.linear(x))

    class Takes(nn.Module):
        def forward(self, state: State) -> Tensor:
            return state.hidden * 2

    pipe = RoundPipe(nn.Sequential(Makes(), Takes()), model_run_config=with_micro(2))
    config = RoundPipeRunConfig(execute_plan=plan_of(2, cuts, cuts, True))
    with pytest.raises(ValueError, match="register"):
        pipe.forward_backward((data(4, 5),), loss_fn=lambda out, _: out.sum(), run_config=config)
    with torch.no_grad():
        assert pipe(data(4, 5)).shape == (4, 5)
    # The last layer's go to the loss on the spot.
    alone = RoundPipe(nn.Sequential(nn.Linear(5, 5), Makes()), model_run_config=with_micro(2))
    alone.forward_backward((data(4, 5),), loss_fn=lambda out, _: out.hidden.sum())
    with pytest.raises(ValueError, match="register"):
        alone(data(4, 5))
