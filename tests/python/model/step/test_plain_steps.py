"""Optimizers that step outside of model.step, as in a plain PyTorch loop: the same losses, gradients and weights."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from sweeps import sweep

CALLS = RoundPipeRunConfig(num_microbatch=1)


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def batches(count: int = 5) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


Parameters = Callable[[Any], Any]
Loop = Callable[[Any, Parameters, Callable[[Any], torch.optim.Optimizer]], list[float]]


def usual(
    model: Any,
    parameters: Parameters,
    make: Any,
    *,
    count: int = 5,
    begin: Callable[[Any, Any, int], Any] = lambda model, optimizer, step: None,
    factor: float = 1,
    look: Callable[[Any, torch.optim.Optimizer, torch.Tensor, int], float | None] = lambda *_: None,
    end: Callable[[torch.optim.Optimizer, int], Any] = lambda optimizer, step: optimizer.zero_grad(),
    steps: Callable[[int], bool] = lambda step: True,
) -> list[float]:
    """Losses, and what was looked at between the backward and the step."""
    optimizer = make(list(parameters(model)))
    found = []
    for step, (inputs, labels) in enumerate(batches(count)):
        begin(model, optimizer, step)
        loss = F.cross_entropy(model(inputs), labels) * factor
        loss.backward()
        found.append(loss.item())
        found.append(look(model, optimizer, inputs, step) or 0.0)
        if steps(step):
            optimizer.step()
            end(optimizer, step)
    return found


def cleared_late(model: Any, parameters: Parameters, make: Any) -> list[float]:
    optimizer = make(parameters(model))
    losses = []
    for inputs, labels in batches():
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()  # of the step before: this loss has no gradients yet
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cleared_by_model(model: Any, parameters: Parameters, make: Any) -> list[float]:
    return usual(model, parameters, make, begin=lambda model, *_: model.zero_grad(), end=lambda *_: None)


def clipped(model: Any, parameters: Parameters, make: Any) -> list[float]:
    held = list(parameters(model))
    norm = lambda *_: float(nn.utils.clip_grad_norm_(held, 0.5))  # noqa: E731
    return usual(model, lambda _: held, make, factor=10, look=norm)


def clipped_anew(model: Any, parameters: Parameters, make: Any) -> list[float]:
    norm = lambda model, *_: float(nn.utils.clip_grad_norm_(parameters(model), 0.5))  # noqa: E731
    return usual(model, parameters, make, factor=10, look=norm)


def accumulated(model: Any, parameters: Parameters, make: Any) -> list[float]:
    clear = lambda optimizer, step: optimizer.zero_grad(set_to_none=step == 1)  # noqa: E731
    return usual(model, parameters, make, count=6, factor=0.5, end=clear, steps=lambda step: step % 2 == 1)


def dropped(model: Any, parameters: Parameters, make: Any) -> list[float]:
    """Every other batch is not learnt from."""
    drop = lambda _, optimizer, __, step: optimizer.zero_grad() if step % 2 else None  # noqa: E731
    return usual(model, parameters, make, look=drop)


def evaluated(model: Any, parameters: Parameters, make: Any) -> list[float]:
    @torch.no_grad()
    def evaluate(model: Any, _: Any, inputs: torch.Tensor, step: int) -> float:
        return float(model(inputs * 2).sum())

    @torch.no_grad()
    def begin(model: Any, _: Any, step: int) -> None:
        seen.append(float(model(torch.ones(4, 6)).sum()))

    seen: list[float] = []
    return usual(model, parameters, make, begin=begin, look=evaluate) + seen


def by_hand(model: Any, parameters: Parameters, make: Any) -> list[float]:
    held = list(parameters(model))
    losses = []
    for inputs, labels in batches():
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in held:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def of_two_calls(model: Any, parameters: Parameters, make: Any) -> list[float]:
    """One backward goes through two calls, as for losses that compare two batches."""
    trained = list(parameters(model))
    optimizer = make(trained)
    losses = []
    for inputs, labels in batches():
        outputs, others = model(inputs), model(inputs.flip(0))
        loss = F.cross_entropy(outputs, labels) + (outputs - others).square().mean()
        loss.backward()
        losses.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_closure(model: Any, parameters: Parameters, make: Any) -> list[float]:
    optimizer = make(parameters(model))
    losses = []
    for inputs, labels in batches(3):

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def with_a_closure_that_runs_again(model: Any, parameters: Parameters, make: Any) -> list[float]:
    return with_closure(model, parameters, lambda trained: torch.optim.LBFGS(trained, lr=0.1, max_iter=3))


LOOPS: list[Loop] = [
    usual,
    cleared_late,
    cleared_by_model,
    clipped,
    clipped_anew,
    accumulated,
    dropped,
    evaluated,
    by_hand,
    of_two_calls,
    with_closure,
    with_a_closure_that_runs_again,
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "ours": lambda p: roundpipe.optim.AdamW(p, lr=0.01),
}


def own(model: Any) -> Any:
    return model.parameters()


def copies(model: Any) -> Any:
    return model.optim_parameters()


def train(
    loop: Loop, optimizer: str, parameters: Parameters, devices: int, config: RoundPipeRunConfig
) -> tuple[Any, ...]:
    plain = make_model()
    ours = make_model()
    roundpipe.devices(f"virtual:{devices}")
    model = RoundPipe(ours, model_run_config=config)
    expected = loop(plain, own, OPTIMIZERS[optimizer])
    found = loop(model, parameters, OPTIMIZERS[optimizer])
    model.synchronize()
    return expected, found, list(plain.parameters()), list(ours.parameters())


@pytest.mark.parametrize("parameters", [own, copies])
@sweep("loop, optimizer", LOOPS, OPTIMIZERS, together=1)
@pytest.mark.filterwarnings("ignore:.*parameters.. outside of step_fn")
def test_a_plain_loop_trains(loop: Loop, optimizer: str, parameters: Parameters) -> None:
    expected, found, theirs, mine = train(loop, optimizer, parameters, 2, CALLS)
    assert found == expected
    for a, b in zip(theirs, mine, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("parameters", [own, copies], ids=["own", "copies"])
def test_microbatches(parameters: Parameters, devices: int) -> None:
    config = RoundPipeRunConfig(num_microbatch=4)
    expected, found, theirs, mine = train(usual, "sgd", parameters, devices, config)
    assert found == pytest.approx(expected, rel=1e-5)
    for a, b in zip(theirs, mine, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_backward_fills_gradients_that_are_looked_at() -> None:
    plain, model = make_model(), RoundPipe(make_model(), model_run_config=CALLS)
    held = list(model.parameters())
    for inputs, labels in batches(2):
        F.cross_entropy(plain(inputs), labels).backward()
        model.forward_backward((inputs,), label=labels, loss_fn=F.cross_entropy)
        for parameter, theirs in zip(held, plain.parameters(), strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, theirs.grad)


@pytest.mark.parametrize("style", ["step", "optimizer.step", "closure", "clipped"])
def test_a_fused_optimizer_steps_by_itself(style: str) -> None:
    plain, ours = make_model(), make_model()
    model = RoundPipe(ours, model_run_config=CALLS)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    mine = roundpipe.optim.AdamW(model, lr=0.01)
    for inputs, labels in batches():
        expected = F.cross_entropy(plain(inputs), labels) * 10
        expected.backward()
        if style == "clipped":
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        if style == "closure":
            found = mine.step(lambda i=inputs, t=labels: loss_of(model, i, t))
        else:
            found = loss_of(model, inputs, labels)
            if style == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            if style == "step":
                model.step(mine, is_async=False)
            else:
                mine.step()
            mine.zero_grad()
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    model.synchronize()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def loss_of(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs), labels) * 10
    loss.backward()
    return loss


def test_both_ways_of_stepping_may_take_turns() -> None:
    plain, ours = make_model(), make_model()
    model = RoundPipe(ours, model_run_config=CALLS)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    mine = torch.optim.AdamW(model.optim_parameters(), lr=0.01)

    def update() -> None:
        mine.step()
        mine.zero_grad()

    for index, (inputs, labels) in enumerate(batches(6)):
        F.cross_entropy(plain(inputs), labels).backward()
        theirs.step()
        theirs.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if index % 2:
            model.step(update, is_async=False)
        else:
            update()
    model.synchronize()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_refusals_name_what_to_do() -> None:
    inputs, labels = next(batches())
    model = RoundPipe(make_model())
    own_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    roundpipe.optim.AdamW(model)
    F.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(ValueError, match=r"use model.step\(optimizer\)"):
        own_optimizer.step()

    model = RoundPipe(make_model())
    own_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(inputs), labels).backward()
    model.step(own_optimizer.step)
    with pytest.raises(ValueError, match=r"give it model.optim_parameters\(\)"):
        model.synchronize()


def test_gradients_of_some_leaves_alone_are_refused() -> None:
    plain, model = make_model(), RoundPipe(make_model(), model_run_config=CALLS)
    inputs = torch.randn(4, 6, requires_grad=True)
    for backward in (lambda loss: torch.autograd.grad(loss, inputs), lambda loss: loss.backward(inputs=[inputs])):
        with pytest.raises(RuntimeError, match=r"\[backward\] torch\.autograd\.grad and backward\(inputs=\.\.\.\)"):
            backward(model(inputs).square().sum())
    (expected,) = torch.autograd.grad(plain(inputs).square().sum(), inputs)
    model.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(model(inputs).square().sum(), inputs)[0], expected)
    model.requires_grad_(True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_optimizers_of_other_models_are_left_alone() -> None:
    model = RoundPipe(make_model(), model_run_config=CALLS)
    inputs, labels = next(batches())
    F.cross_entropy(model(inputs), labels).backward()
    other = make_model()
    F.cross_entropy(other(inputs), labels).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert model._pipeline.has_gradients


def test_the_optimizers_parameters_are_copied_as_plain_ones() -> None:
    model = RoundPipe(make_model())
    parameter = next(model.optim_parameters())
    read = pickle.loads(pickle.dumps(parameter))
    assert type(read) is nn.Parameter and torch.equal(read, parameter)
    twin = copy.deepcopy(parameter)
    assert torch.equal(twin, parameter) and twin.grad is None
    assert twin.group() is None


@pytest.mark.parametrize("which", ["own", "copies", "fused"])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.filterwarnings("ignore:.*parameters.. outside of step_fn")
def test_the_documented_amp_loop(which: str, unscales: bool) -> None:
    plain, ours = make_model(), make_model()
    model = RoundPipe(ours, model_run_config=CALLS)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    given: Any = {"own": model.parameters, "copies": model.optim_parameters, "fused": lambda: model}[which]()
    mine = roundpipe.optim.SGD(given, lr=0.1, momentum=0.9)
    for network, optimizer, scaler in (
        (plain, theirs, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)),
        (model, mine, roundpipe.GradScaler(init_scale=4.0, growth_interval=2)),
    ):
        for index, (inputs, labels) in enumerate(batches(6)):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs), labels) * (float("inf") if index == 3 else 1.0)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                held = model.optim_parameters() if network is model and which == "copies" else network.parameters()
                nn.utils.clip_grad_norm_(held, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0
    model.synchronize()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("parameters", [own, copies], ids=["own", "copies"])
def test_hooks_on_gradients_of_parameters_are_refused(register: str, parameters: Parameters) -> None:
    model = RoundPipe(make_model(), model_run_config=CALLS)
    handle = getattr(next(iter(parameters(model))), register)(lambda _: None)
    inputs, _ = next(batches())
    with pytest.raises(ValueError, match="has hooks on its gradient"):
        model(inputs)
    handle.remove()
    model(inputs)


@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_clearing_after_a_step_function_waits_for_it(clears: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = make_model(), make_model()
    model = RoundPipe(ours, model_run_config=CALLS)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    mine = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    may_step = threading.Event()
    group = model._step_group

    def letting_it_step(wait: Callable[[], None]) -> Callable[[], None]:
        def let_it_step_and_wait() -> None:
            may_step.set()
            wait()

        return let_it_step_and_wait

    def update() -> None:
        assert may_step.wait(20)
        mine.step()

    for inputs, labels in batches(3):
        F.cross_entropy(plain(inputs), labels).backward()
        theirs.step()
        theirs.zero_grad()
        model.forward_backward((inputs,), label=labels, loss_fn=F.cross_entropy)
        may_step.clear()
        with monkeypatch.context() as patch:
            model.step(update)
            patch.setattr(group, "hand_over", letting_it_step(group.hand_over))
            patch.setattr(group, "synchronize", letting_it_step(group.synchronize))
            (mine if clears == "optimizer" else model).zero_grad()
            model.synchronize()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_optimizer_over_copies_of_one_model_and_parameters_of_another() -> None:
    plain, ours = [make_model() for _ in range(2)], [make_model() for _ in range(2)]
    first, second = (RoundPipe(model, model_run_config=CALLS) for model in ours)
    theirs = torch.optim.SGD([p for model in plain for p in model.parameters()], lr=0.1)
    mine = torch.optim.SGD([*first.optim_parameters(), *second.parameters()], lr=0.1)
    for inputs, labels in batches(3):
        for models, optimizer in ((plain, theirs), ((first, second), mine)):
            sum(F.cross_entropy(model(inputs), labels) for model in models).backward()
            optimizer.step()
            optimizer.zero_grad()
    for model in (first, second):
        model.synchronize()
    for a, b in zip(plain, ours, strict=True):
        for one, other in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(one, other)
