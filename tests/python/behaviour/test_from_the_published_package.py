"""docs/reference/from-the-published-package.md is true, row by row."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from causal_models import build, padded_batch
from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeError,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.data.packed import RoundPipePackedData

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "from-the-published-package.md"
SHOWN: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])


def shows(*rows: str) -> Callable[[Test], Test]:
    """The rows of the page, by their first cells, that a test shows to be true."""
    SHOWN.update(rows)
    return lambda test: test


def test_every_row_of_the_page_is_shown() -> None:
    cells = re.findall(r"^\| (?!what \|)(.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert len(cells) == len(set(cells)) and set(cells) == SHOWN


class Echo(nn.Module):
    """Returns what `function` makes of its arguments, and keeps the shapes of those that are tensors."""

    def __init__(self, function: Callable[..., Any] = lambda *args, **kwargs: args[0]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.function = function
        self.shapes: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.shapes.append([tuple(tensor.shape) for tensor in tensors])
        return self.function(*args, **kwargs)


def echo(function: Callable[..., Any] = lambda *args, **kwargs: args[0], microbatches: int | None = 2) -> RoundPipe:
    return RoundPipe(Echo(function), model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))


# --- losses and scalers ---


@shows("a loss that is NaN")
def test_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        return outputs.sum() * math.nan

    value = torch.randn(4, 2)
    with pytest.raises(RoundPipeError, match="is NaN"):
        RoundPipe(nn.Linear(2, 2)).forward_backward((value,), loss_fn=loss)
    assert RoundPipe(nn.Linear(2, 2), check_loss=False).forward_backward((value,), loss_fn=loss).isnan()
    scaler = GradScaler()
    with pytest.raises(RoundPipeError, match="is NaN"):
        RoundPipe(nn.Linear(2, 2)).forward_backward((value,), loss_fn=loss)
    scaled = RoundPipe(nn.Linear(2, 2))
    assert scaled.forward_backward((value,), loss_fn=lambda *given: scaler.scale(loss(*given))).isnan()
    monkeypatch.setenv("ROUNDPIPE_CHECK_LOSS", "0")
    assert RoundPipe(nn.Linear(2, 2)).forward_backward((value,), loss_fn=loss).isnan()
    monkeypatch.setenv("ROUNDPIPE_CHECK_LOSS", "maybe")
    with pytest.raises(ValueError, match="ROUNDPIPE_CHECK_LOSS"):
        RoundPipe(nn.Linear(2, 2))


@shows("a language model's loss over microbatches", "a merged loss with `num_items_in_batch`")
def test_language_model_losses() -> None:
    model = build("llama")
    batch = padded_batch(rows=5)
    count = int((batch["labels"][:, 1:] != -100).sum())
    expected = copy.deepcopy(model)(**batch).loss
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    loss = wrapped.forward_backward(input_kwargs=batch, loss_fn=lambda outputs, _: outputs.loss / 3)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(wrapped(**batch, num_items_in_batch=count).loss, expected)


@shows("a batch without a label that counts")
def test_no_labels() -> None:
    wrapped = wrap_model_to_roundpipe(build("llama"))
    batch = padded_batch(rows=3)
    with pytest.raises(ValueError, match="every label of the batch is ignored"):
        wrapped.forward_backward(input_kwargs={**batch, "labels": torch.full_like(batch["labels"], -100)})


class Scaled:
    def __init__(self) -> None:
        self.pipe = RoundPipe(nn.Linear(2, 1, bias=False), model_run_config=RoundPipeRunConfig(num_microbatch=1))
        self.optimizer = torch.optim.SGD(self.pipe.optim_parameters(), lr=0.1)
        self.scaler = GradScaler(8.0, growth_interval=1)
        self.used: list[float] = []

    def batch(self, factor: float = 1.0) -> None:
        def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
            self.used.append(self.scaler.get_scale())
            return self.scaler.scale(outputs.sum() * factor)  # type: ignore[no-any-return]

        self.pipe.forward_backward((torch.ones(1, 2),), loss_fn=loss)


@shows("an overflow that two steps see")
def test_overflows() -> None:
    loop = Scaled()
    loop.scaler.set_growth_interval(100)
    for factor in (math.inf, math.inf, 1.0, 1.0):
        loop.batch(factor)
        loop.pipe.step(lambda: (loop.scaler.step(loop.optimizer), loop.optimizer.zero_grad()))
        loop.scaler.update()
    assert loop.used == [8.0, 8.0, 4.0, 4.0]


@shows("`scaler.update()` at the end of the step function")
def test_update_in_the_step() -> None:
    loop = Scaled()
    for _ in range(4):
        loop.batch()
        loop.pipe.step(lambda: (loop.scaler.step(loop.optimizer), loop.scaler.update(), loop.optimizer.zero_grad()))
    assert loop.used == [8.0, 8.0, 16.0, 32.0]


@shows("a scaler without `model.step`")
def test_a_scaler_by_itself() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler(8.0, growth_interval=1)
    for scale in (8.0, 16.0, 32.0):
        assert scaler.get_scale() == scale
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@shows("a scaler that has scaled no loss yet")
def test_a_scaler_without_losses() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler(8.0)
    for work in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update):
        with pytest.raises(AssertionError, match="_scale is None"):
            work()
    assert weight.tolist() == [1.0, 1.0] and scaler.get_scale() == 8.0


@shows("sums of 16-bit values over microbatches: gradients, and scalar outputs that are averaged")
def test_sums_of_16_bits() -> None:
    """1 + 0.0004 + 0.0004 in fp16: each small part alone is lost in rounding, together they are not."""
    parts = torch.tensor([1.0, 0.0004, 0.0004]).half()
    module = nn.Linear(1, 1, bias=False).half()
    pipe = RoundPipe(module, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    pipe.forward_backward((parts[:, None],), loss_fn=lambda outputs, _: outputs.sum())
    pipe.synchronize()
    whole = parts.double().sum().half()
    assert module.weight.grad is not None and module.weight.grad.item() == whole
    one_after_the_other = parts[0] + parts[1] + parts[2]
    assert whole != one_after_the_other
    mean = echo(lambda value: value.sum(), microbatches=3)(parts)
    assert mean == (parts.double().mean()).half() and mean != one_after_the_other / 3


# --- microbatches ---


@shows("positional tensors with different numbers of rows")
def test_positional_rows() -> None:
    pipe = echo()
    with pytest.warns(UserWarning, match=r"every microbatch gets these whole: args\[1\] \[6\]"):
        pipe(torch.ones(4), torch.ones(6))
    assert pipe._wrapped.shapes == [[(2,), (6,)]] * 2
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    spec = (TensorChunkSpec(0), TensorChunkSpec(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(torch.ones(4), torch.ones(6), roundpipe_run_config=RoundPipeRunConfig(split_input=(spec, None)))
    assert pipe._wrapped.shapes[2:] == [[(2,), (3,)]] * 2


@shows("keyword tensors with different numbers of rows, and no positional one")
def test_keyword_rows() -> None:
    pipe = echo(lambda **kwargs: kwargs["ids"])
    with pytest.warns(UserWarning, match=r"whole: kwargs\['table'\] \[5\]"):
        pipe(table=torch.ones(5), ids=torch.ones(4), mask=torch.ones(4))
    assert pipe._wrapped.shapes == [[(5,), (2,), (2,)]] * 2


@shows("nothing to cut, and no number requested")
def test_nothing_to_cut() -> None:
    for microbatches, calls in ((None, 1), (3, 3)):
        pipe = echo(lambda number: torch.full((2,), number), microbatches)
        assert pipe(5).tolist() == [5, 5] * calls


@shows("packed input with another number of microbatches", "tensors beside packed input")
def test_packed_input() -> None:
    pipe = echo(microbatches=2)
    packed = RoundPipePackedData([torch.zeros(1), torch.zeros(2), torch.zeros(1)])
    with pytest.warns(UserWarning, match="hold 3 microbatches, and num_microbatch is 2"):
        assert len(pipe(packed, torch.ones(4, 2))) == 4
    assert pipe._wrapped.shapes == [[(1,), (1, 2)], [(2,), (2, 2)], [(1,), (1, 2)]]


@shows("functions that split or merge")
def test_functions_for_one_microbatch() -> None:
    config = RoundPipeRunConfig(
        num_microbatch=1,
        split_input=lambda args, kwargs, n: ([(args[0] + n,)], [kwargs]),
        merge_output=lambda outputs: [len(outputs), outputs[0].tolist()],
    )
    assert echo()(torch.zeros(1), roundpipe_run_config=config) == [1, [1.0]]


@shows("outputs of an `nn.ModuleList`'s elements, wrapped part by part")
def test_elements_of_a_list() -> None:
    class Labelled(Echo):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, f"{len(x)} rows"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Labelled(), Labelled()])

        def forward(self, x: torch.Tensor) -> Any:
            return [x := x[0] + layer(x[1:])[0] for layer in self.layers], self.layers[0](x)[1]

    one = RoundPipeRunConfig(num_microbatch=2)
    x = torch.randn(7, 2)
    model = wrap_model_to_roundpipe(Model(), model_run_config=one, lower_threshold=0, upper_threshold=0)
    outputs, packed = model(x)
    assert all(map(torch.equal, outputs, Model()(x)[0]))
    assert isinstance(packed, RoundPipePackedData) and packed == ["3 rows", "2 rows"]


@shows("scalars that are True or False")
def test_truth_values() -> None:
    assert echo(lambda value: torch.tensor(True))(torch.ones(2)).item() is True
    with pytest.raises(ValueError, match="microbatch 1 returned False, microbatch 0 True"):
        echo(lambda value: value.sum() > 1)(torch.tensor([2.0, 0.0]))


@shows("labels with different numbers of rows")
def test_label_rows() -> None:
    label = {"target": torch.ones(4), "weight": torch.ones(2)}

    def loss(outputs: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append((len(parts["target"]), len(parts["weight"])))
        return outputs.sum()

    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    seen: list[tuple[int, int]] = []
    pipe = RoundPipe(nn.Linear(2, 2), model_run_config=RoundPipeRunConfig(num_microbatch=2))
    with pytest.raises(ValueError, match="has 2 rows"):
        pipe.forward_backward((torch.ones(4, 2),), label=label, loss_fn=loss)
    spec = {"target": TensorChunkSpec(0), "weight": _Replicate}
    pipe.forward_backward(
        (torch.ones(4, 2),), label=label, loss_fn=loss, run_config=RoundPipeRunConfig(split_label=spec)
    )
    assert seen == [(2, 2)] * 2


@shows(
    "labels with another number of rows than the batch",
    "labels beside packed input",
    "a list or tuple of plain numbers as the label",
)
def test_label_rows_of_the_batch() -> None:
    from torch.distributed.pipelining.microbatch import _Replicate

    seen: list[Any] = []

    def loss(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        seen.append((len(outputs), len(label)))
        return outputs.sum()

    pipe, x = RoundPipe(nn.Linear(2, 2)), torch.ones(4, 2)
    for microbatches in (1, 2):
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        with pytest.raises(ValueError, match=r"label has 2 rows .* the batch has 4"):
            pipe.forward_backward((x,), label=torch.ones(2), loss_fn=loss, run_config=config)
    packed = RoundPipePackedData([torch.ones(1, 2), torch.ones(3, 2)])
    pipe.forward_backward((packed,), label=torch.ones(4), loss_fn=loss)
    assert sorted(seen) == [(1, 1), (3, 3)]
    two = RoundPipeRunConfig(num_microbatch=2)
    with pytest.raises(ValueError, match="label is a sequence of 3 numbers"):
        pipe.forward_backward((x,), label=[1, 2, 3], loss_fn=loss, run_config=two)
    del seen[:]
    whole = RoundPipeRunConfig(num_microbatch=2, split_label=_Replicate)
    pipe.forward_backward((x,), label=[1, 2, 3], loss_fn=loss, run_config=whole)
    assert seen == [(2, 3), (2, 3)]


# --- steps and gradients ---


class Trained:
    """A model whose gradient is the same in every batch: 1 for each weight, so a step adds -0.5 to it."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.module.weight)
        self.pipe = RoundPipe(self.module, model_run_config=RoundPipeRunConfig(num_microbatch=1))

    def backward(self) -> None:
        self.pipe(torch.ones(1, 2)).sum().backward()

    @property
    def weights(self) -> list[float]:
        self.pipe.synchronize()
        return self.module.weight.flatten().tolist()  # type: ignore[no-any-return]

    def update(self) -> None:
        for parameter in self.pipe.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None


@shows("`.backward()`")
def test_backward() -> None:
    def fail(value: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            raise KeyError("mine")
        return value * 2

    loss = echo(fail, 1)(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(KeyError, match="mine"):
        loss.backward()


@shows("`synchronize()` between a backward and `model.step`")
def test_synchronize() -> None:
    model = Trained()
    model.backward()
    model.pipe.synchronize()
    assert model.module.weight.grad is not None and model.module.weight.grad.tolist() == [[1.0, 1.0]]
    model.pipe.step(model.update)
    assert model.weights == [-0.5, -0.5] and model.module.weight.grad is None


@shows("`zero_grad()` of the model or of the optimizer, outside of `model.step`")
@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad(whose: str) -> None:
    model = Trained()
    optimizer = torch.optim.SGD(model.pipe.optim_parameters(), lr=0.5)
    model.backward()
    (model.pipe if whose == "model" else optimizer).zero_grad()
    model.backward()
    model.pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    assert model.weights == [-0.5, -0.5]


@shows("an optimizer over `model.parameters()`", "the warning of `parameters()`")
def test_own_parameters() -> None:
    model = Trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(model.pipe.parameters(), lr=0.5)
    for _ in range(2):
        model.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weights == [-1.0, -1.0]
    model = Trained()
    optimizer = torch.optim.SGD(model.pipe.parameters(), lr=0.5)
    model.backward()
    with pytest.raises(ValueError, match="the SGD of the step function has the model's own parameters"):
        model.pipe.step(optimizer.step, is_async=False)
    with pytest.warns(UserWarning, match="parameters"):
        list(model.pipe.parameters())


@shows("an optimizer over `model.optim_parameters()`, outside of step functions")
def test_optimizers_outside_of_step_functions() -> None:
    model = Trained()
    optimizer = torch.optim.SGD(model.pipe.optim_parameters(), lr=0.5)
    for _ in range(2):
        model.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weights == [-1.0, -1.0]


@shows("an optimizer of another model in the step function")
@pytest.mark.parametrize("is_async", [True, False])
def test_optimizers_of_another_model(is_async: bool) -> None:
    one, other = Trained(), Trained()
    first = torch.optim.SGD(one.pipe.optim_parameters(), lr=0.5)
    second = torch.optim.SGD(other.pipe.optim_parameters(), lr=0.5)

    def both() -> None:
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    other.pipe.step(both, is_async)  # nothing has a gradient, so nothing is left out
    for _ in range(3):
        one.backward()
        other.backward()
        one.pipe.step(lambda: None, is_async)
        other.pipe.step(both, is_async)
    assert one.weights == other.weights == [-1.5, -1.5]
    one.backward()
    with pytest.raises(ValueError, match=r"\[step\] the SGD of the step function has parameters of another model"):
        other.pipe.step(both, is_async)
        other.pipe.synchronize()
    one.pipe.step(both, is_async)
    assert one.weights == [-2.0, -2.0]


def test_reading_waits_for_the_step_function_of_another_model() -> None:
    one, other = Trained(), Trained()
    optimizer = torch.optim.SGD(one.pipe.optim_parameters(), lr=0.5)

    def late() -> None:
        assert sum(range(2_000_000)) > 0  # long enough for a reader that does not wait
        optimizer.step()
        optimizer.zero_grad()

    def read_by_call() -> float:
        return float(one.pipe(torch.ones(1, 2)).sum())

    reads: list[Callable[[], float]] = [
        lambda: sum(one.weights),
        lambda: float(one.pipe.state_dict()["weight"].sum()),
        lambda: float(one.pipe.get_parameter("weight").sum()),
        read_by_call,
    ]
    for step, read in enumerate(reads, 1):
        one.backward()
        one.pipe.step(lambda: None, is_async=False)
        other.pipe.step(late)
        assert read() == -step, step
    one.backward()
    one.pipe.step(lambda: None, is_async=False)
    other.pipe.step(late)
    optimizer.step()  # outside: after it, whose gradients are cleared then
    assert sum(one.weights) == -len(reads) - 1


@shows("`model.parameters()` in the step function", "weights written into the model after the optimizer was made")
def test_parameters_in_the_step() -> None:
    model = Trained()
    optimizers = list(model.pipe.optim_parameters())
    model.backward()
    seen: list[Any] = []
    model.pipe.step(lambda: (seen.extend(model.pipe.parameters()), model.update()), is_async=False)
    assert seen[0] is optimizers[0]
    model.module.load_state_dict({"weight": torch.full((1, 2), 4.0)})
    model.backward()
    model.pipe.step(model.update)
    assert model.weights == [3.5, 3.5]


@shows("`forward_backward` in eval mode")
def test_eval_mode() -> None:
    model = Trained()
    model.pipe.eval()
    with pytest.warns(UserWarning, match="eval mode"):
        model.pipe.forward_backward((torch.ones(1, 2),), loss_fn=lambda outputs, _: outputs.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.pipe.forward_backward((torch.ones(1, 2),), loss_fn=lambda outputs, _: outputs.sum())


# --- models and plans ---


@shows("names of parameters")
def test_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    pipe = RoundPipe(module)
    names = ["0.weight", "0.bias"]
    assert [name for name, _ in pipe.optim_named_parameters()] == names == list(pipe.state_dict())
    with pytest.warns(UserWarning, match="parameters"):
        assert [name for name, _ in pipe.named_parameters()] == names


@shows("`model.model`, `.layers`, `.name` and the like", "a model's name")
def test_attributes() -> None:
    llama = build("llama")
    wrapped = wrap_model_to_roundpipe(llama)
    assert wrapped.model is llama.model and list(wrapped.state_dict()) == list(llama.state_dict())
    assert len(wrapped.model.state_dict()) < len(wrapped.state_dict())
    plain = nn.Linear(2, 2)
    pipe = RoundPipe(plain)
    assert pipe.model is plain and pipe.name == "Linear"


@shows("an attribute that is set, with `set_original_model`")
def test_set_attributes() -> None:
    wrapped, original = nn.Linear(2, 2), nn.Linear(2, 2)
    pipe = RoundPipe(wrapped)
    pipe.set_original_model(original)
    pipe.note = 3
    assert original.note == 3 and not hasattr(wrapped, "note")


@shows("a Hugging Face model without a preset")
def test_followed_models() -> None:
    assert type(wrap_model_to_roundpipe(build("gpt2"))) is RoundPipe


@shows("`output_hidden_states=True` and `return_dict=False` of a model with a preset")
def test_forms_of_outputs() -> None:
    plain = build("llama").eval()
    model = wrap_model_to_roundpipe(copy.deepcopy(plain), use_sequential_preset=True)
    ids = padded_batch()["input_ids"]
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states=True).hidden_states
        expected = plain(input_ids=ids, output_hidden_states=True).hidden_states
        assert isinstance(model(input_ids=ids, return_dict=False), tuple)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@shows("`inspect.signature(model.forward)`")
def test_signatures() -> None:
    model = build("llama")
    wrapped = wrap_model_to_roundpipe(model)
    assert inspect.signature(wrapped.forward) == inspect.signature(model.forward)
    assert "input_ids" in inspect.signature(wrapped.forward).parameters


@shows("an unknown `recompute_grain`")
def test_unknown_grains() -> None:
    with pytest.raises(ValueError, match="recompute_grain"):
        echo()(torch.ones(4, 2), roundpipe_run_config=RoundPipeRunConfig(recompute_grain="x"))  # type: ignore[arg-type]


@shows("a model wrapped part by part")
def test_part_by_part() -> None:
    module = nn.Linear(2, 2)
    wrapped = AutoRoundPipe(nn.Sequential(RoundPipe(module)))
    loss = wrapped.forward_backward((torch.ones(2, 2),), loss_fn=lambda outputs, _: outputs.sum())
    wrapped.synchronize()
    assert loss.dim() == 0 and module.bias.grad is not None and module.bias.grad.tolist() == [2.0, 2.0]


@shows("`requires_grad=True` under `torch.no_grad()`")
def test_gradients_where_there_are_none() -> None:
    with torch.no_grad():
        outputs = RoundPipe(nn.Linear(2, 2))(
            torch.ones(2, 2), roundpipe_run_config=RoundPipeRunConfig(requires_grad=True)
        )
    assert outputs.requires_grad


@shows("an error in a layer")
def test_errors() -> None:
    def fail(value: torch.Tensor) -> torch.Tensor:
        if value.sum() > 0:
            raise KeyError("mine")
        return value

    pipe = echo(fail)
    with pytest.raises(KeyError, match="mine"):
        pipe(torch.ones(4))
    assert pipe(torch.zeros(4)).tolist() == [0.0] * 4


@shows("a plan for one model")
def test_plans() -> None:
    pipe = RoundPipe(nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)]))
    pipe.forward_backward((torch.ones(4, 2),), loss_fn=lambda outputs, _: outputs.sum())
    searched, balanced = ModelExecutePlan.auto("fused", pipe), ModelExecutePlan.auto("fused", pipe, min_stages=3)
    for plan in (searched, balanced):
        plan.check_valid(6, "fused")
    stages = pipe._pipeline.planned_stages(roundpipe._core.PlanMode.FUSED, len(roundpipe.devices()) + 1)
    assert searched.bwd_plan == [range(stage.first, stage.last) for stage in stages.backward]
    assert len(balanced.bwd_plan) >= 3


@shows("data saved several times in a layer")
def test_recompute_data() -> None:
    got: list[Any] = []

    def remember(value: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            got.extend(roundpipe.get_recompute_data() for _ in range(2))
        else:
            roundpipe.save_for_recompute(1)
            roundpipe.save_for_recompute(2)
        return value * 2

    value = torch.ones(2, requires_grad=True)
    echo(remember, 1)(value).sum().backward()
    assert got == [(1,), (2,)]


@shows("`ModelTimer.VERBOSE`")
def test_times(capfd: pytest.CaptureFixture[str]) -> None:
    from roundpipe.timer import ModelTimer

    ModelTimer.VERBOSE = True
    try:
        RoundPipe(nn.Linear(2, 2))(torch.ones(2, 2))
    finally:
        ModelTimer.VERBOSE = False
    printed = capfd.readouterr().err
    assert re.search(r"Layer 0 fwd  new estimate: [\d.]+ ms", printed) and "record" not in printed


@shows("`roundpipe.models.function`")
def test_losses_are_not_compiled() -> None:
    from roundpipe.models.function import CompileCrossEntropy

    assert not hasattr(CompileCrossEntropy, "_torchdynamo_orig_callable")
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    torch.testing.assert_close(CompileCrossEntropy(logits, labels, -1), F.cross_entropy(logits, labels) * 4)


@shows("its internal modules")
def test_modules_that_are_not_there() -> None:
    for name in ("run", "threads", "transfer", "attribute", "optim_stream", "utils"):
        assert importlib.util.find_spec(f"roundpipe.{name}") is None
    assert [name for name in vars(importlib.import_module("roundpipe.model.memory")) if name[0].isupper()] == []
