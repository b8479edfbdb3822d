"""Calls that cannot work are refused with a message that says what to do, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import assert_same, pipe_of, sgd_step, squared_error, state_of
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

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
        (torch.ones(0, WIDTH), None, ValueError, "the batch is empty"),
        (torch.ones(4, WIDTH, device="meta"), None, ValueError, "is on the meta device"),
        (torch.ones(4, WIDTH).to_sparse(), None, ValueError, "expected a dense strided tensor"),
        (torch.tensor(1.0), None, RuntimeError, "1D"),
        ("text", None, TypeError, "must be Tensor, not str"),
        (GOOD, torch.ones(4, 3, device="meta"), ValueError, "is on the meta device"),
        (GOOD, (torch.ones(4), torch.ones(3)), ValueError, r"label\[1\] has 3 rows .* the batch has 4"),
        (GOOD, torch.ones(0), ValueError, "label has 0 rows .* the batch has 4"),
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


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ([range(3)], [range(3, 4)], r"bwd_plan: layers \[0, 3\) are missing"),
        ([range(1), range(2, 3)], [range(3, 4), range(3)], r"fwd_plan: layers \[1, 2\) are missing"),
        ([range(2), range(1, 3)], [range(3, 4), range(3)], "overlaps"),
        ([range(3)], [range(3, 5), range(3)], "beyond layer 4"),
        ([range(4)], [range(3, 4), range(3)], "beyond layer 3"),
        ([], [], "are missing"),
    ],
)
def test_plans_that_do_not_fit(forward: list[range], backward: list[range], message: str) -> None:
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = forward, backward

    def go_wrong(pipe: RoundPipe) -> None:
        with pytest.raises(ValueError, match=message):
            pipe.forward_backward((GOOD,), loss_fn=mean, run_config=RoundPipeRunConfig(execute_plan=plan))

    leaves_no_trace(go_wrong)


@pytest.mark.parametrize(
    "spec",
    [
        "foo",
        "virtual:0",
        "virtual:-1",
        "virtual:two",
        "virtual:2,memory=much",
        "virtual:2,memory=-1GiB",
        "virtual:2,colour=red",
        "virtual:2,link=0GB/s",
        "memory=2GiB",
        "cuda:99",
        "",
    ],
)
def test_bad_device_specs_keep_the_pool(spec: str) -> None:
    before = roundpipe.devices().description

    def go_wrong(pipe: RoundPipe) -> None:
        with pytest.raises(ValueError, match=r"^\[devices\]"):
            roundpipe.devices(spec)

    leaves_no_trace(go_wrong)
    assert roundpipe.devices().description == before


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


def without_buffers() -> RoundPipe:
    torch.manual_seed(3)
    return pipe_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)), 2)


def test_another_dtype_is_refused_until_it_is_back() -> None:
    pipe = without_buffers()
    train(pipe)
    rounded = {name: tensor.half().float() for name, tensor in pipe.state_dict().items() if tensor.is_floating_point()}
    for _ in range(2):
        pipe._original_model.half()
        with pytest.raises(ValueError, match=r"(?s)has become .*Half.*since the model was wrapped.*then wrap it"):
            pipe.forward_backward((GOOD,), loss_fn=mean)
    pipe._original_model.float()
    other = without_buffers()
    train(other)
    other.load_state_dict(rounded)
    assert_same(train(pipe), train(other))


def test_values_may_be_changed_in_any_way() -> None:
    def by_copy(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.copy_(parameter * 0.5)

    def by_data(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data * 0.5

    def by_init(parameter: nn.Parameter) -> None:
        nn.init.constant_(parameter, 0.25)

    for change in (by_copy, by_data, by_init):
        pipe, other = make(), make()
        for model in (pipe, other):
            list(model.optim_parameters())  # the optimizer has its copies already
        with torch.no_grad():
            for parameter in pipe._original_model.parameters():
                change(parameter)
        expected = {name: tensor.clone() for name, tensor in pipe._original_model.state_dict().items()}
        other.load_state_dict(expected)
        assert_same(train(pipe), train(other))


def test_frozen_parameters_may_not_become_trainable_once_the_optimizer_has_its_own() -> None:
    pipe = make()
    pipe[0].requires_grad_(False)
    train(pipe)
    expected = state_of(pipe)
    pipe[0].requires_grad_(True)
    for _ in range(2):
        for attempt in (
            lambda: pipe.forward_backward((GOOD,), loss_fn=mean),
            lambda: pipe(GOOD),
            lambda: pipe.step(lambda: None),
        ):
            with pytest.raises(ValueError, match=r"parameter '0\.weight' was frozen .* wrap the model again"):
                attempt()
    pipe[0].requires_grad_(False)
    assert_same(state_of(pipe), expected)
    train(pipe)


def test_trainable_parameters_may_be_frozen_at_any_time() -> None:
    pipe = make()
    train(pipe)
    pipe[0].requires_grad_(False)
    frozen = pipe[0].weight.clone()
    moving = pipe[3].weight.clone()
    train(pipe)
    assert torch.equal(pipe[0].weight, frozen) and not torch.equal(pipe[3].weight, moving)
    pipe[0].requires_grad_(True)
    train(pipe)
    assert not torch.equal(pipe[0].weight, frozen)


def test_nothing_trainable() -> None:
    pipe = make().requires_grad_(False)
    assert not pipe(GOOD).requires_grad
    with pytest.raises(ValueError, match="the loss does not require grad"):
        pipe.forward_backward((GOOD,), loss_fn=mean)
    value = GOOD.clone().requires_grad_()
    pipe(value).sum().backward()
    assert value.grad is not None
