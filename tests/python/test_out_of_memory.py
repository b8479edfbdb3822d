"""A device that runs out of memory: the work is done in smaller parts, with the same result."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from sweeps import sweep

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


def notices_of(train_it: Callable[[], Outcome]) -> tuple[Outcome, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = train_it()
    return outcome, [str(entry.message) for entry in caught if entry.category is RuntimeWarning]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": Block,
    "buffers": lambda: Block(batch_norm=True),
    "random numbers": lambda: Block(dropout=0.2),
}


@sweep("kind, devices", BLOCKS, [1, 2], together=1)
def test_a_stage_that_does_not_fit_runs_by_layer_with_the_same_bits(kind: str, devices: int) -> None:
    block = BLOCKS[kind]
    ample = train(f"virtual:{devices}", block)
    cap_bytes = max(ample.peaks) * 3 // 4
    tight, notices = notices_of(lambda: train(f"virtual:{devices},memory={cap_bytes},debug", block))
    assert tight.same_bits(ample)
    assert max(tight.peaks) <= cap_bytes
    assert len(notices) == 1 and "not enough memory" in notices[0] and "layer by layer" in notices[0]


def test_with_ample_memory_nobody_is_warned() -> None:
    _, notices = notices_of(lambda: train("virtual:2,memory=1GiB", Block))
    assert notices == []


def test_a_layer_that_does_not_fit_runs_in_rows() -> None:
    rows = 1536
    ample = train("virtual:2", Block, whole_stage=False, rows=rows)
    cap_bytes = max(ample.peaks) * 2 // 3
    tight, notices = notices_of(lambda: train(f"virtual:2,memory={cap_bytes},debug", Block, False, rows))
    assert any("rows" in notice for notice in notices)
    # Sums over rows are made in another order: fp32, tens of thousands of terms, then four steps of Adam.
    for name, value in ample.state.items():
        torch.testing.assert_close(tight.state[name], value, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.tensor(tight.losses), torch.tensor(ample.losses), rtol=1e-5, atol=1e-6)


def test_a_layer_that_needs_all_its_rows_says_that_they_do_not_fit() -> None:
    rows = 1536
    ample = train("virtual:1", lambda: Block(batch_norm=True), whole_stage=False, rows=rows)
    with pytest.raises(torch.OutOfMemoryError, match=r"virtual:0.*out of memory"):
        train(f"virtual:1,memory={max(ample.peaks) // 3}", lambda: Block(batch_norm=True), False, rows)


class Mixing(nn.Module):
    """Without buffers, but each row reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        wide = self.linear(value).relu()
        return value - value.mean(0) + wide.unflatten(1, (8, WIDTH)).mean(1)


def test_rows_that_depend_on_each_other_are_not_cut() -> None:
    rows = 1536
    ample = train("virtual:1", Mixing, whole_stage=False, rows=rows)
    with pytest.raises(torch.OutOfMemoryError):
        train(f"virtual:1,memory={max(ample.peaks) * 2 // 5}", Mixing, False, rows)


def test_inference_runs_in_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    batch = torch.randn(8192, WIDTH)
    with torch.no_grad():
        expected = model(batch)
        roundpipe.devices("virtual:1,memory=30MiB")
        with pytest.warns(RuntimeWarning, match="some rows"):
            outputs = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))(batch)
    torch.testing.assert_close(outputs, expected)


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


def test_memory_that_runs_out_after_the_loss_gives_the_same_bits() -> None:
    ample = train("virtual:2", HungryBlock)
    tight, notices = notices_of(lambda: train(f"virtual:2,memory={max(ample.peaks) * 5 // 6},debug", HungryBlock))
    assert len(notices) == 1
    assert tight.same_bits(ample)


def test_a_loss_that_changes_when_it_is_taken_again_is_refused() -> None:
    peak = max(train("virtual:1", HungryBlock).peaks)
    roundpipe.devices(f"virtual:1,memory={peak * 5 // 6}")
    torch.manual_seed(0)
    plan = ModelExecutePlan()
    plan.bwd_plan = [range(LAYERS)]
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    pipe = RoundPipe(nn.Sequential(*[HungryBlock() for _ in range(LAYERS)]), model_run_config=config)
    taken: list[int] = []

    def loss_fn(outputs: torch.Tensor, _: object) -> torch.Tensor:
        taken.append(1)
        return outputs.square().mean() * len(taken)

    with pytest.raises(roundpipe.RoundPipeError, match="another one when it is taken again"):
        pipe.forward_backward((torch.randn(ROWS, WIDTH),), loss_fn=loss_fn)
        pipe.synchronize()
    assert len(taken) > 1
