from __future__ import annotations

import gc
import math
import pickle
import threading
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import _core
from roundpipe.model.step.scaler import GradScaler, StepScales, hand_over, synchronize_scales

# Losses here write down the scale that they see. Where a device's memory is known, measuring would call them once more.
UNMEASURED = "unmeasured"

OPTIONS: dict[str, Any] = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.7, "growth_interval": 3}
# 1 is an ordinary step, inf and nan are bad gradients.
HISTORY = [1, 1, 1, 1, math.inf, 1, 1, math.nan, math.inf, 1, 1, 1, 1, 1, 1]


class Maker:
    """Makes steps without a model."""

    def finish_update(self) -> None:
        pass


MAKER = Maker()


def handed_over() -> StepScales:
    scales = hand_over(MAKER, [])
    assert scales is not None
    return scales


def synchronize() -> None:
    synchronize_scales(MAKER, [])


class Problem:
    """A parameter of shape (2,) with one optimizer; `factor` spoils the gradient."""

    def __init__(self, optimizer: str) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)
            if optimizer == "sgd"
            else torch.optim.AdamW([self.weight], lr=0.1, fused=optimizer == "fused")
        )

    def loss(self, factor: float) -> torch.Tensor:
        return (self.weight.square() * factor).sum()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused"])
@pytest.mark.parametrize("unscale", [False, True])
def test_plain_use_has_torchs_bits(optimizer: str, unscale: bool) -> None:
    runs = []
    for scaler in (GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)):
        problem = Problem(optimizer)
        trace: list[Any] = []
        for factor in HISTORY:
            problem.optimizer.zero_grad()
            scaled = scaler.scale(problem.loss(factor))
            scaled.backward()  # type: ignore[no-untyped-call]
            if unscale:
                scaler.unscale_(problem.optimizer)
            gradient = problem.weight.grad
            assert gradient is not None
            trace.append((scaled.item(), gradient.tolist()))
            scaler.step(problem.optimizer)
            scaler.update()
            trace.append((scaler.get_scale(), scaler.state_dict(), problem.weight.tolist()))
        runs.append(repr(trace))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_synchronous_steps_have_torchs_bits(optimizer: str) -> None:
    ours, theirs = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    a, b = Problem(optimizer), Problem(optimizer)
    for factor in HISTORY:
        for scaler, problem in ((ours, a), (theirs, b)):
            problem.optimizer.zero_grad()
            scaler.scale(problem.loss(factor)).backward()  # type: ignore[no-untyped-call]
        with handed_over().active():
            ours.step(a.optimizer)
            ours.update()
        synchronize()
        theirs.step(b.optimizer)
        theirs.update()
        assert torch.equal(a.weight, b.weight) and ours.get_scale() == theirs.get_scale()
        assert ours.state_dict() == theirs.state_dict()


class Steps:
    """The step pipeline in small: step k runs in its own thread beside batch k + 1."""

    def __init__(self, scaler: GradScaler, problem: Problem) -> None:
        self.scaler, self.problem = scaler, problem
        self.thread: threading.Thread | None = None
        self.unscaled: list[list[float]] = []

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join(10)
            assert not self.thread.is_alive()

    def step(self, gradient: torch.Tensor, until: threading.Event | None = None) -> None:
        self.finish()
        token = handed_over()

        def run() -> None:
            if until is not None:
                until.wait(10)
            with token.active():
                self.problem.weight.grad = gradient
                self.scaler.unscale_(self.problem.optimizer)
                self.unscaled.append(gradient.tolist())
                self.scaler.step(self.problem.optimizer)
                self.scaler.update()

        self.thread = threading.Thread(target=run)
        self.thread.start()


def test_asynchronous_steps_unscale_with_the_scale_of_their_own_losses() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1)
    steps = Steps(scaler, Problem("sgd"))
    front = []
    for _ in range(6):
        scaled = scaler.scale(torch.tensor(1.0))
        front.append(scaled.item())
        steps.step(scaled.expand(2).clone())
    steps.finish()
    assert steps.unscaled == [[1.0, 1.0]] * 6
    assert front == [8.0, 8.0, 16.0, 32.0, 64.0, 128.0]  # one step late, every time
    synchronize()
    assert scaler.get_scale() == 8.0 * 2**6


def test_front_scale_does_not_depend_on_when_a_step_runs() -> None:
    traces = []
    for late in (False, True):
        scaler = GradScaler("cpu", **OPTIONS)
        steps = Steps(scaler, Problem("sgd"))
        trace = []
        for factor in HISTORY:
            gate = threading.Event()
            before = scaler.scale(torch.tensor(1.0)).item()
            gradient = torch.full((2,), before * factor)
            steps.step(gradient, until=gate)
            if not late:
                gate.set()
                steps.finish()
            trace.append((before, scaler.scale(torch.tensor(1.0)).item(), scaler.get_scale()))
            gate.set()
        steps.finish()
        synchronize()
        traces.append(trace)
    assert traces[0] == traces[1]


def test_get_scale_inside_a_step() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    problem = Problem("sgd")
    scaler.scale(problem.loss(1)).backward()
    with handed_over().active():
        assert scaler.get_scale() == 8.0
        scaler.step(problem.optimizer)
        scaler.update()
        assert scaler.get_scale() == 16.0
    assert scaler.get_scale() == 8.0 and scaler.state_dict()["scale"] == 16.0
    synchronize()
    assert scaler.get_scale() == 16.0


def test_all_losses_of_a_step_share_one_scale() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    problem = Problem("sgd")
    scaler.scale(problem.loss(1)).backward()
    with handed_over().active():
        scaler.step(problem.optimizer)
        scaler.update()
    problem.optimizer.zero_grad()
    scaler.scale(problem.loss(1)).backward()  # accumulates with 8, although 16 is known when ...
    synchronize()  # ... the user looks at gradients between two batches
    assert scaler.scale(torch.tensor(1.0)).item() == 8.0
    with handed_over().active():
        assert scaler.get_scale() == 8.0


def test_scale_of_containers_and_dtypes() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(2, dtype=torch.float16)
    tree = scaler.scale([one, (one, one)])
    assert isinstance(tree, list) and isinstance(tree[1], tuple)
    assert tree[0].dtype == torch.float16 and tree[1][1].tolist() == [4.0, 4.0]
    assert [t.tolist() for t in scaler.scale(iter([one]))] == [[4.0, 4.0]]
    with pytest.raises(ValueError, match=r"\[GradScaler.scale\] got a int"):
        scaler.scale(3)


def test_scale_from_many_threads_starts_once() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    barrier = threading.Barrier(8)
    results: list[float] = []

    def work() -> None:
        barrier.wait(10)
        results.extend(scaler.scale(torch.tensor(1.0)).item() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [4.0] * 400


def test_state_dict_goes_to_torchs_and_back() -> None:
    ours = GradScaler("cpu", **OPTIONS)
    problem = Problem("sgd")
    for factor in (1, math.inf, 1):
        problem.optimizer.zero_grad()
        ours.scale(problem.loss(factor)).backward()
        ours.step(problem.optimizer)
        ours.update()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict() and ours.state_dict()["_growth_tracker"] == 1
    for fresh in (GradScaler("cpu"), pickle.loads(pickle.dumps(ours))):
        fresh.load_state_dict(theirs.state_dict())
        assert fresh.state_dict() == ours.state_dict()
        assert fresh.scale(torch.tensor(1.0)).item() == ours.get_scale()
    ours.load_state_dict({**ours.state_dict(), "scale": 5.0})
    assert ours.scale(torch.tensor(1.0)).item() == ours.get_scale() == 5.0


def test_new_scale() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.tensor(1.0))
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0 == scaler.scale(torch.tensor(1.0)).item()
    with handed_over().active():
        scaler.update(torch.tensor(2.0))
    assert scaler.get_scale() == 16.0
    synchronize()
    assert scaler.get_scale() == 2.0


def test_disabled_and_default_device() -> None:
    scaler = GradScaler(enabled=False)
    problem = Problem("sgd")
    loss = problem.loss(1)
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.get_scale() == 1.0
    loss.backward()
    with StepScales({}).active():
        scaler.unscale_(problem.optimizer)
        scaler.step(problem.optimizer)
        scaler.update()
    assert problem.weight.tolist() != [1.0, 2.0] and scaler.state_dict() == {}
    synchronize()
    if not torch.accelerator.is_available():
        assert GradScaler().is_enabled()
        with pytest.warns(UserWarning, match="CUDA is not available"):
            assert not GradScaler("cuda").is_enabled()


def test_misuse_is_reported_as_in_torch() -> None:
    scaler = GradScaler("cpu")
    problem = Problem("sgd")
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.unscale_(problem.optimizer)
    scaler.scale(problem.loss(1)).backward()
    with handed_over().active():
        scaler.unscale_(problem.optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(problem.optimizer)


def test_scalers_are_not_kept_alive() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.tensor(1.0))
    token = handed_over()
    assert scaler in token._scales
    del scaler
    gc.collect()
    assert not token._scales


@pytest.mark.parametrize(
    ("args", "options", "device", "scale"),
    [
        ((8192.0,), {}, None, 8192.0),
        ((4.0, 3.0, 0.7, 5, True), {}, None, 4.0),
        (("cpu", 16.0), {}, "cpu", 16.0),
        ((), {"device": "cpu", "init_scale": 2}, "cpu", 2.0),
        ((32,), {"device": "cpu"}, "cpu", 32.0),
    ],
)
def test_the_first_argument_is_the_scale(args: Any, options: Any, device: str | None, scale: float) -> None:
    scaler = GradScaler(*args, **options)
    assert scaler.get_scale() == scale and scaler.enabled is scaler.is_enabled()
    assert device is None or scaler._device == device
    if len(args) == 5:
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.7, 5)


def test_arguments_that_fit_nowhere() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'init_scale'"):
        GradScaler(8.0, init_scale=8.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        GradScaler(8.0, 2.0, 0.5, 2000, True, "cpu")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"init_scale is \[\], expected a number"):
        GradScaler([])  # type: ignore[call-overload]


class Loop:
    """A model of one weight, stepped with a function and a scaler that the main thread updates."""

    def __init__(self, growth_interval: int = 1) -> None:
        self.module = torch.nn.Linear(2, 1, bias=False)
        self.pipe = roundpipe.RoundPipe(self.module, device_memory=UNMEASURED)
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=0.1)
        self.scaler = GradScaler(8.0, growth_interval=growth_interval)
        self.used: list[float] = []

    def batch(self, factor: float = 1.0) -> None:
        def loss(outputs: torch.Tensor, _: None) -> torch.Tensor:
            self.used.append(self.scaler.get_scale())
            return self.scaler.scale(outputs.sum() * factor)  # type: ignore[no-any-return]

        config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
        self.pipe.forward_backward((torch.ones(1, 2),), loss_fn=loss, run_config=config)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()


@pytest.mark.parametrize("is_async", [True, False])
def test_updates_on_the_main_thread_come_one_step_late(is_async: bool) -> None:
    loop = Loop()
    start = loop.module.weight.detach().clone()
    for _ in range(5):
        loop.batch()
        loop.pipe.step(loop.update, is_async)
        assert loop.scaler.get_scale() == loop.used[-1]  # until `update`, that of the step's losses
        loop.scaler.update()
    assert loop.used == [8.0, 8.0, 16.0, 32.0, 64.0]
    loop.pipe.synchronize()
    torch.testing.assert_close(loop.module.weight, start - 0.5)
    assert loop.scaler.get_scale() == 8.0 * 2**5


def test_an_update_that_waits_is_there_for_the_next_losses() -> None:
    loop = Loop()
    for _ in range(4):
        loop.batch()
        loop.pipe.step(loop.update, is_async=False)
        loop.scaler.update(is_async=False)
    assert loop.used == [8.0, 16.0, 32.0, 64.0]


def test_an_overflow_is_seen_by_an_update_on_the_main_thread() -> None:
    loop = Loop(growth_interval=100)
    start = loop.module.weight.detach().clone()
    for factor in (1.0, math.inf, 1.0, 1.0):
        loop.batch(factor)
        loop.pipe.step(loop.update)
        loop.scaler.update()
    assert loop.used == [8.0, 8.0, 8.0, 4.0]
    loop.pipe.synchronize()
    torch.testing.assert_close(loop.module.weight, start - 0.3)


def test_a_new_scale_is_set_behind_the_step() -> None:
    loop = Loop()
    for new_scale in (2.0, None, None):
        loop.batch()
        loop.pipe.step(loop.update)
        loop.scaler.update(new_scale)
    assert loop.used == [8.0, 8.0, 2.0]


@pytest.mark.parametrize("is_async", [True, False])
def test_unscaling_and_stepping_on_the_main_thread(is_async: bool) -> None:
    loop = Loop()
    start = loop.module.weight.detach().clone()
    for step in range(1, 4):
        loop.batch()
        loop.pipe.step(lambda: None, is_async)
        loop.scaler.unscale_(loop.optimizer)
        (weight,) = loop.pipe.optim_parameters()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[1.0, 1.0]]
        assert loop.scaler.step(loop.optimizer) is None
        loop.optimizer.zero_grad()
        loop.scaler.update()
        loop.pipe.synchronize()
        torch.testing.assert_close(loop.module.weight, start - 0.1 * step)


def test_a_missing_step_is_reported_at_the_next_step() -> None:
    loop = Loop()
    loop.batch()
    loop.pipe.step(lambda: None)
    loop.scaler.update()
    loop.batch()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        loop.pipe.step(loop.update)
    loop.pipe.step(loop.update)
    loop.scaler.update()
    loop.pipe.synchronize()


def test_a_step_function_that_raises_leaves_the_scale_alone() -> None:
    def fail() -> None:
        raise KeyError("mine")

    loop = Loop()
    loop.batch()
    loop.pipe.step(fail)
    loop.scaler.update()
    with pytest.raises(KeyError, match="mine"):
        loop.pipe.synchronize()
    loop.pipe.synchronize()
    assert loop.scaler.get_scale() == 8.0


def test_getters_and_setters_keep_to_the_order_of_the_program() -> None:
    loop = Loop()
    loop.batch()
    loop.pipe.step(loop.update)
    loop.scaler.update()
    loop.scaler.set_growth_factor(4.0)
    loop.scaler.set_backoff_factor(0.25)
    loop.scaler.set_growth_interval(7)
    assert loop.scaler.get_growth_factor(up_to_date=True) == 4.0
    assert loop.scaler.get_backoff_factor(up_to_date=True) == 0.25
    assert loop.scaler.get_growth_interval(up_to_date=True) == 7
    loop.pipe.synchronize()
    assert loop.scaler.get_scale() == 16.0  # the queued update had the old factor


def test_a_step_function_knows_a_scaler_whose_losses_are_still_to_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = roundpipe.RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), device_memory=UNMEASURED)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
    scaler, gate = GradScaler(8.0), threading.Event()

    def loss(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        gate.wait(20)  # until the step waits, or believes that there is nothing to wait for
        scaled: torch.Tensor = scaler.scale(outputs.sum() * label.sum())
        return scaled

    def step() -> None:
        scaler.step(optimizer)

    wait_losses = _core.Pipeline.wait_losses
    monkeypatch.setattr(_core.Pipeline, "wait_losses", lambda pipeline: (gate.set(), wait_losses(pipeline))[1])
    pending = pipe.submit((torch.ones(1, 2),), label=torch.full((1, 1), math.inf), loss_fn=loss)
    try:
        pipe.step(step)
        scaler.update(is_async=False)
    finally:
        gate.set()
    pending.loss()
    assert scaler.get_scale() == 4.0


def test_the_first_step_waits_for_all_losses_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model knows a scaler from the first microbatch on whose loss it scales. Others of that call come later, and
    have to be made before the scale moves."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    pipe = roundpipe.RoundPipe(network, model_run_config=config, device_memory=UNMEASURED)
    optimizer = roundpipe.optim.SGD(pipe, lr=0.1)
    scaler, begun, gate = GradScaler(8.0), threading.Event(), threading.Event()
    seen: list[float] = []

    def loss(outputs: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        if begun.is_set():
            gate.wait(1)  # until a step that did not wait has moved the scale
        scaled: torch.Tensor = scaler.scale(outputs.sum() * factor.sum())
        seen.append(scaler.get_scale())
        begun.set()
        return scaled

    stepped_by = _core.ScaleMoves.stepped_by
    monkeypatch.setattr(_core.ScaleMoves, "stepped_by", lambda *arguments: (stepped_by(*arguments), gate.set())[0])
    pending = pipe.submit((torch.ones(2, 2),), label=torch.full((2, 1), math.inf), loss_fn=loss)
    assert begun.wait(20)
    assert pipe.step(optimizer, is_async=False, scaler=scaler).skipped
    pending.loss()
    pipe.forward_backward((torch.ones(2, 2),), label=torch.ones(2, 1), loss_fn=loss)
    assert seen == [8.0, 8.0, 4.0, 4.0]


def test_a_new_scaler_resumes_with_the_scale_of_its_next_losses() -> None:
    # An asynchronous step has decided 500 since the losses of the next step were promised 1000.
    scaler = GradScaler("cpu", **OPTIONS)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 500.0, "_growth_tracker": 2})
    scaler.load_resume_state({"front": 1000.0, "updates_on_main": False})
    assert scaler.get_scale() == 1000.0
    assert float(scaler.scale(torch.ones(()))) == 1000.0
    assert scaler.state_dict()["scale"] == 500.0 and scaler.state_dict()["_growth_tracker"] == 2
