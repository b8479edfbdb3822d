"""Calls that cannot work are refused with a message that says what to do, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import assert_same, pipe_of, sgd_step, squared_error, state_of
from roundpipe import RoundPipe, RoundPipeRunConfig

WIDTH = 4


@pytest.fixture(autouse=True)
def pool(one_torch_thread: None) -> None:
    roundpipe.devices("virtual:2,debug")


def make() -> RoundPipe:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    return pipe_of(model, 2)


def train(pipe: RoundPipe, go_wrong: Callable[[RoundPipe], None] | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for _ in range(2):
            if go_wrong:
                go_wrong(pipe)
            value, label = torch.randn(2, 4, WIDTH, generator=generator)
            pipe.forward_backward((value,), label=label, loss_fn=squared_error)
        pipe.step(sgd_step(pipe))
    return state_of(pipe)


def leaves_no_trace(go_wrong: Callable[[RoundPipe], None]) -> None:
    assert_same(train(make(), go_wrong), train(make()))


def mean(outputs: torch.Tensor, label: Any) -> torch.Tensor:
    return outputs.mean()


GOOD = torch.ones(4, WIDTH)


@pytest.mark.parametrize(
    ("value", "label", "error", "message"),
    [
        (torch.ones(4, WIDTH + 1), None, RuntimeError, "shapes cannot be multiplied"),
        (torch.ones(4, WIDTH, dtype=torch.long), None, RuntimeError, "dtype|expected"),
        (torch.ones(4, WIDTH, dtype=torch.float64), None, RuntimeError, "dtype"),
        (torch.tensor(1.0), None, RuntimeError, "1D"),
        ("text", None, TypeError, "must be Tensor, not str"),
        (GOOD, (torch.ones(4), torch.ones(3)), ValueError, r"label\[1\] has 3 rows .* the batch has 4"),
    ],
)
def test_wrong_batches(value: Any, label: Any, error: type[Exception], message: str) -> None:
    def go_wrong(pipe: RoundPipe) -> None:
        with pytest.raises(error, match=f"(?s){message}"):
            pipe.forward_backward((value,), label=label, loss_fn=mean)
        if label is None:
            with pytest.raises(error, match=f"(?s){message}"):
                pipe(value)

    leaves_no_trace(go_wrong)


def test_wrong_arguments() -> None:
    def go_wrong(pipe: RoundPipe) -> None:
        with pytest.raises(TypeError, match="argument"):
            pipe(GOOD, nothing=GOOD)
        with pytest.raises(TypeError, match="argument"):
            pipe.forward_backward((GOOD, GOOD), loss_fn=mean)
        with pytest.warns(UserWarning, match=r"args\[1\] \[3\]"), pytest.raises(TypeError, match="argument"):
            pipe(GOOD, torch.ones(3))

    leaves_no_trace(go_wrong)


class SplitError(Exception):
    pass


def test_errors_while_splitting() -> None:
    def failing(*arguments: Any) -> Any:
        raise SplitError("in the user's function")

    def go_wrong(pipe: RoundPipe) -> None:
        for config in (RoundPipeRunConfig(split_input=failing), RoundPipeRunConfig(split_label=failing)):
            with pytest.raises(SplitError, match="in the user's function"):
                pipe.forward_backward((GOOD,), label=GOOD, loss_fn=mean, run_config=config)
        with pytest.raises(ValueError, match="as long as the list of args"):
            pipe(GOOD, roundpipe_run_config=RoundPipeRunConfig(split_input=lambda args, kwargs, n: ([args], [])))
        with pytest.raises(ValueError, match="expected a pair"):
            pipe(GOOD, roundpipe_run_config=RoundPipeRunConfig(split_input=lambda args, kwargs, n: 3))

    leaves_no_trace(go_wrong)


def test_errors_while_merging() -> None:
    class Numbered(nn.Linear):
        def forward(self, value: torch.Tensor) -> Any:
            return super().forward(value), torch.ones(value.shape[0], int(value.shape[0]))

    def failing(outputs: list[Any]) -> Any:
        raise SplitError("merging")

    pipe = pipe_of(nn.Sequential(Numbered(WIDTH, WIDTH)), 2)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"output\[1\] cannot be merged.*set merge_output to False"):
            pipe(torch.ones(5, WIDTH))
        with pytest.raises(SplitError):
            pipe(GOOD, roundpipe_run_config=RoundPipeRunConfig(merge_output=failing))
        assert pipe(GOOD)[0].shape == (4, WIDTH)


# --- a model that changes ---


def test_replaced_parameters_are_refused_until_they_are_back() -> None:
    def go_wrong(pipe: RoundPipe) -> None:
        layer, old = pipe[0], pipe[0].weight
        layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Linear in layer 0 were added, removed or replaced.*then wrap it"):
                pipe.forward_backward((GOOD,), loss_fn=mean)
        with pytest.raises(ValueError, match="replaced"):
            pipe(GOOD)
        layer.weight = old

    leaves_no_trace(go_wrong)


@pytest.mark.parametrize("change", ["add parameter", "add buffer", "remove bias", "add module", "replace buffer"])
def test_changed_structure_is_refused(change: str) -> None:
    pipe = make()
    if change == "add parameter":
        pipe[0].extra = nn.Parameter(torch.ones(2))
    elif change == "add buffer":
        pipe[0].register_buffer("extra", torch.ones(2))
    elif change == "remove bias":
        pipe[0].bias = None
    elif change == "add module":
        pipe[0].extra = nn.Linear(2, 2)
    else:
        pipe[1].running_mean = torch.zeros(WIDTH)
    with pytest.raises(ValueError, match="were added, removed or replaced"):
        pipe(GOOD)


def test_nothing_trainable() -> None:
    pipe = make().requires_grad_(False)
    assert not pipe(GOOD).requires_grad
    with pytest.raises(ValueError, match="the loss does not require grad"):
        pipe.forward_backward((GOOD,), loss_fn=mean)
    value = GOOD.clone().requires_grad_()
    pipe(value).sum().backward()
    assert value.grad is not None
