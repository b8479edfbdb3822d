"""A device that runs out of memory: the work is done layer by layer, with the same bits, or refused with numbers."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import mostly_long
from trials import rows_of_trials


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are planned within a cap do not run out of memory."""
    monkeypatch.setenv("ROUNDPIPE_DEVICE_MEMORY", "unmeasured")


WIDTH = 128
LAYERS = 6
ROWS = 256
MICROBATCHES = 3


class Block(nn.Module):
    """A residual MLP; `norm` over features, or over the batch, which writes buffers and needs all rows at once."""

    def __init__(self, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.drop(self.down(nn.functional.gelu(self.up(self.norm(value)))))


class Outcome:
    """What a training leaves."""

    def __init__(self, losses: list[float], model: nn.Module, outputs: torch.Tensor, peaks: list[int]) -> None:
        self.losses = losses
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.outputs = outputs
        self.peaks = peaks

    def same_bits(self, other: Outcome) -> bool:
        states = all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        return states and self.losses == other.losses and torch.equal(self.outputs, other.outputs)


def train(pool: str, block: Callable[[], nn.Module], whole_stage: bool = True, rows: int = ROWS) -> Outcome:
    """Four asynchronous steps; `whole_stage`: all layers in one stage, else one in each."""
    pool_of = roundpipe.devices(pool)
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(LAYERS)])
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    config.execute_plan = ModelExecutePlan()
    single = [range(layer, layer + 1) for layer in range(LAYERS)]
    config.execute_plan.fwd_plan = [] if whole_stage else single[:-1]
    config.execute_plan.bwd_plan = [range(LAYERS)] if whole_stage else single[::-1]
    pipe = RoundPipe(model, name="m", model_run_config=config)
    optimizer = roundpipe.optim.AdamW(pipe, lr=1e-3)
    losses, outputs = [], torch.empty(0)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        batch, target = (torch.randn(rows * MICROBATCHES, WIDTH, generator=draw) for _ in range(2))
        loss, outputs = pipe.forward_backward(
            (batch,), label=target, loss_fn=lambda out, wanted: (out - wanted).square().mean(), return_outputs=True
        )
        losses.append(loss.item())
        pipe.step(optimizer)
    pipe.synchronize()
    return Outcome(losses, model, outputs, [entry["peak_bytes"] for entry in pool_of.memory_report()])


class Hungry(torch.autograd.Function):
    """Needs more in its backward than in its forward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (gradient.repeat(24, 1) * 2).view(24, *gradient.shape)[0] / 2


class HungryBlock(Block):
    """Runs out of memory when the loss is known already."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Hungry.apply(super().forward(value))  # type: ignore[no-any-return]


def test_a_loss_that_changes_when_it_is_taken_again_is_refused() -> None:
    peak = max(train("virtual:1", HungryBlock).peaks)
    roundpipe.devices(f"virtual:1,memory={peak * 5 // 6}B")
    torch.manual_seed(0)
    plan = ModelExecutePlan()
    plan.bwd_plan = [range(LAYERS)]
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    pipe = RoundPipe(nn.Sequential(*[HungryBlock() for _ in range(LAYERS)]), model_run_config=config)
    taken: list[int] = []

    def loss_fn(outputs: torch.Tensor, _: object) -> torch.Tensor:
        taken.append(1)
        return outputs.square().mean() * len(taken)

    with pytest.raises(roundpipe.RoundPipeError, match="memory ran out in the backward of microbatch"):
        pipe.forward_backward((torch.randn(ROWS, WIDTH),), loss_fn=loss_fn)
        pipe.synchronize()
    assert len(taken) > 1


# --- what does not fit even layer by layer ---


def mean_square(outputs: torch.Tensor, _: object = None) -> torch.Tensor:
    return outputs.square().mean()


def chain(block: Callable[[], nn.Module] = Block, layers: int = 3, **options: Any) -> RoundPipe:
    torch.manual_seed(0)
    config = RoundPipeRunConfig(
        num_microbatch=options.pop("num_microbatch", 2), recompute_grain=options.pop("recompute_grain", None)
    )
    if options.pop("whole_stage", False):
        config.execute_plan = ModelExecutePlan()
        config.execute_plan.bwd_plan = [range(layers)]
        config.execute_plan.fwd_plan = options.pop("fwd_plan", [])
    return RoundPipe(nn.Sequential(*[block() for _ in range(layers)]), name="m", model_run_config=config, **options)


def fused(pipe: RoundPipe, batch: torch.Tensor) -> None:
    pipe.forward_backward((batch,), loss_fn=mean_square)


def submitted(pipe: RoundPipe, batch: torch.Tensor) -> None:
    pipe.submit((batch,), loss_fn=mean_square).loss()


def trained(pipe: RoundPipe, batch: torch.Tensor) -> None:
    mean_square(pipe(batch)).backward()


def inferred(pipe: RoundPipe, batch: torch.Tensor) -> None:
    with torch.no_grad():
        pipe(batch)


CALLS = {"forward_backward": fused, "submit": submitted, "backward": trained, "inference": inferred}


@pytest.mark.parametrize("call", mostly_long(CALLS, "submit"))
def test_the_smallest_change_that_would_fit_fits(call: str) -> None:
    pool = roundpipe.devices("virtual:2,memory=12MiB")
    pipe = chain()
    batch = torch.randn(12288, WIDTH)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        CALLS[call](pipe, batch)
        pipe.synchronize()
    text = str(refused.value)
    assert re.match(r"\[virtual:\d\] out of memory: \S+ MiB were asked for", text)
    where = r"there was no room for the (\w+) of layer \d \(\d\) of m, microbatch \d of 2, in call 0, on virtual:\d"
    assert re.search(where + ", whose cap is 12.00 MiB; other jobs had made room, and it ran one layer at a time", text)
    assert re.search(
        r"predicted to take.*\n  weights .*\n(.*\n)*  work .*\n  together .*\n  the device's cap +12.00 MiB", text
    )
    assert isinstance(refused.value.__cause__, torch.OutOfMemoryError)
    change = text.splitlines()[-1]
    assert change.startswith("smallest change that would fit: num_microbatch=")
    count = int(change.split("num_microbatch=")[1].split()[0])
    assert count > 2
    assert change.endswith(" and recompute_grain='layer'")
    again = chain(num_microbatch=count, recompute_grain="layer")
    for _ in range(2):
        CALLS[call](again, batch)
        again.synchronize()
    assert max(entry["peak_bytes"] for entry in pool.memory_report()) <= 12 * 2**20
    # The first model is as it was: what fits, runs.
    CALLS[call](pipe, batch[:512])
    pipe.synchronize()


WAITS: dict[str, Callable[[RoundPipe, torch.Tensor], None]] = {
    "synchronize": lambda pipe, _: pipe.synchronize(),
    "step": lambda pipe, _: pipe.step(lambda: None, False),
    "state_dict": lambda pipe, _: (pipe.state_dict(), None)[1],
    "next call": lambda pipe, batch: (inferred(pipe, batch[:6]), pipe.synchronize())[1],
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_backward_that_did_not_fit_says_so_to_the_first_who_waits(
    wait: Callable[[RoundPipe, torch.Tensor], None],
) -> None:
    roundpipe.devices("virtual:1,memory=24MiB")
    pipe = chain(HungryBlock)
    batch = torch.randn(3072, WIDTH)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)the backward of layer \d .*smallest change that would fit"):
        fused(pipe, batch)
        wait(pipe, batch)
    fused(pipe, batch[:6])
    pipe.synchronize()


def test_one_row_that_does_not_fit_is_told_what_would_help() -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(lambda: nn.Sequential(nn.Flatten(0, 1), Block(), nn.Unflatten(0, (1, -1))), num_microbatch=2)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        fused(pipe, torch.randn(2, 6144, WIDTH))
    change = str(refused.value).splitlines()[-1]
    assert re.match(
        r"smallest change that would fit: a cap of '\S+ MiB'\. No number of microbatches helps: one row", change
    )
    assert change.endswith("Or shorter rows")


def test_weights_that_do_not_fit_are_told_so() -> None:
    roundpipe.devices("virtual:1,memory=1MiB")
    pipe = chain(lambda: nn.Linear(WIDTH, 40 * WIDTH), layers=1)
    with pytest.raises(torch.OutOfMemoryError, match="no room for the weights of layer 0") as refused:
        fused(pipe, torch.randn(4, WIDTH))
    assert "weights and gradients alone take 5.04 MiB" in str(refused.value).splitlines()[-1]


def test_a_language_model_is_told_of_its_chunks() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=4000
    )
    roundpipe.devices("virtual:1,memory=12MiB")
    options = RoundPipeRunConfig(num_microbatch=1)
    pipe = wrap_model_to_roundpipe(LlamaForCausalLM(config), loss_chunk_tokens=None, model_run_config=options)
    ids = torch.randint(0, 4000, (1, 1500))
    with pytest.raises(torch.OutOfMemoryError) as refused:
        pipe.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
    change = str(refused.value).splitlines()[-1]
    assert "shorter rows, a smaller loss_chunk_tokens (now None), a smaller mlp_chunk_tokens (now 'auto')" in change


class OnlyInThePipeline(Block):
    """Refuses to be measured."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            raise KeyError("not here")
        return super().forward(value)


def test_where_nothing_can_be_predicted_the_error_stays() -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(OnlyInThePipeline)
    with pytest.raises(torch.OutOfMemoryError) as refused:
        fused(pipe, torch.randn(12288, WIDTH))
    text = str(refused.value)
    assert text.startswith("[virtual:0] out of memory: ") and "no room for the forward of layer" in text
    assert "the largest layer takes 515.50 KiB for its weights and, in a backward, 515.50 KiB for gradients" in text
    assert "could not be predicted (KeyError: 'not here')" in text


def test_nothing_is_predicted_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = rows_of_trials(monkeypatch)
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(whole_stage=True)
    with pytest.warns(RuntimeWarning, match="layer by layer"):
        fused(pipe, torch.randn(1536, WIDTH))
        pipe.synchronize()
    assert not measured
    with pytest.raises(torch.OutOfMemoryError):
        fused(pipe, torch.randn(12288, WIDTH))
    assert measured


def test_what_is_noted_of_a_call_keeps_nothing_of_the_user() -> None:
    roundpipe.devices("virtual:1")
    pipe = chain()
    batch, label = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    kept = weakref.ref(batch.untyped_storage()), weakref.ref(batch), weakref.ref(label)
    go_on = threading.Event()

    def loss_fn(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        go_on.wait(60)
        return (outputs - wanted).square().mean()

    pending = pipe.submit((batch,), label=label, loss_fn=loss_fn)
    del batch
    gc.collect()
    assert kept[0]() is None and kept[1]() is None
    go_on.set()
    assert pending.loss().isfinite()


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_its_loss_refers_to_can_go(fails: bool) -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    held = [chain()]
    gone = weakref.ref(held[0])
    batch = torch.randn(12288 if fails else 64, WIDTH)
    try:
        held[0].forward_backward((batch,), loss_fn=lambda out, _, pipe=held[0]: out.sum() * pipe.num_layers)
    except torch.OutOfMemoryError:
        assert fails
    held[0].synchronize()
    held.clear()
    gc.collect()
    assert gone() is None


# --- the warning comes with the call that it is about ---


class Held(torch.autograd.Function):
    """The backward waits until it is let go."""

    let_go = threading.Event()

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert Held.let_go.wait(20)
        return gradient


class HeldBlock(HungryBlock):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Held.apply(super().forward(value))  # type: ignore[no-any-return]


def told_in(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    notices = [entry for entry in caught if entry.category is RuntimeWarning]
    # It is shown at the user's line.
    assert all(entry.filename == __file__ for entry in notices)
    return [str(entry.message) for entry in notices]


@pytest.fixture
def tight() -> int:
    """Microbatches of so many rows run layer by layer."""
    roundpipe.devices("virtual:1")
    pool = roundpipe.devices()
    Held.let_go.set()
    pipe = chain(HeldBlock, whole_stage=True, layers=LAYERS, num_microbatch=1)
    fused(pipe, torch.randn(ROWS, WIDTH))
    pipe.synchronize()
    peak = max(entry["peak_bytes"] for entry in pool.memory_report())
    roundpipe.devices(f"virtual:1,memory={peak * 5 // 6}B")
    return ROWS


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("start", [fused, submitted])
def test_a_backward_that_runs_on_is_told_of_by_the_first_who_waits(
    tight: int, start: Callable[[RoundPipe, torch.Tensor], None], wait: Callable[[RoundPipe, torch.Tensor], None]
) -> None:
    pipe = chain(HeldBlock, whole_stage=True, layers=LAYERS, num_microbatch=1, fwd_plan=[])
    wait = (lambda pipe, batch: start(pipe, batch[:6])) if wait is WAITS["next call"] else wait
    batch = torch.randn(tight, WIDTH)
    Held.let_go.clear()
    try:
        assert told_in(lambda: start(pipe, batch)) == []
    finally:
        Held.let_go.set()
    notices = told_in(lambda: wait(pipe, batch))
    assert len(notices) == 1 and " of m in call 0; going on layer by layer" in notices[0]
    assert told_in(lambda: (start(pipe, batch), pipe.synchronize())) == []


def test_a_backward_of_autograds_tells_before_it_returns(tight: int) -> None:
    pipe = chain(HeldBlock, whole_stage=True, layers=LAYERS, num_microbatch=1, fwd_plan=[range(LAYERS)])
    notices = told_in(lambda: trained(pipe, torch.randn(tight, WIDTH)))
    assert len(notices) == 1 and " of m in call 0; going on layer by layer" in notices[0]


def test_what_ran_out_before_the_loss_is_told_with_the_loss() -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(whole_stage=True)
    pending = []
    assert told_in(lambda: pending.append(pipe.submit((torch.randn(1536, WIDTH),), loss_fn=mean_square))) == []
    notices = told_in(lambda: pending[0].loss())
    assert len(notices) == 1 and "in call 0" in notices[0]


@pytest.mark.parametrize("call", [fused, submitted])
def test_a_call_that_raises_is_warned_of_itself(call: Callable[[RoundPipe, torch.Tensor], None]) -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(whole_stage=True)
    fused(pipe, torch.randn(64, WIDTH))

    def refused() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            call(pipe, torch.randn(12288, WIDTH))

    notices = told_in(refused)
    assert len(notices) == 1 and " of layers 0 to 2 of m in call 1;" in notices[0]
    assert told_in(lambda: (fused(pipe, torch.randn(64, WIDTH)), pipe.synchronize())) == []


def test_where_warnings_are_errors_the_error_of_the_call_still_counts() -> None:
    roundpipe.devices("virtual:1,memory=12MiB")
    pipe = chain(whole_stage=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            fused(pipe, torch.randn(12288, WIDTH))
        other = chain(whole_stage=True)
        with pytest.raises(RuntimeWarning, match="layer by layer"):
            fused(other, torch.randn(1536, WIDTH))
        fused(other, torch.randn(1536, WIDTH))
        other.synchronize()


class Branches(nn.Module):
    """Two chains, and a root that stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[HeldBlock() for _ in range(LAYERS)])
        self.second = nn.Sequential(Block(), Block())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(value)) + value  # type: ignore[no-any-return]


def test_a_model_in_parts_is_warned_of_its_part(tight: int) -> None:
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(LAYERS)], [range(LAYERS)]
    model = wrap_model_to_roundpipe(
        Branches(),
        name="m",
        model_run_config=RoundPipeRunConfig(num_microbatch=1),
        override_config={"first": RoundPipeRunConfig(execute_plan=plan)},
    )
    batch = torch.randn(tight, WIDTH)
    notices = told_in(lambda: mean_square(model(batch)).backward())
    assert len(notices) == 1 and " of m.first in call 0;" in notices[0]
