"""What a RoundPipe model looks like from outside."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from robustness import assert_same, pipe_of, sgd_step, squared_error, state_of
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.following.layers.recompute import layer_context, may_save


@pytest.fixture(autouse=True)
def pool(one_torch_thread: None) -> None:
    roundpipe.devices("virtual:2,debug")
    torch.manual_seed(0)


class Named(nn.Sequential):
    """A Sequential with something of its own."""

    size = 4

    def twice(self) -> int:
        return 2 * self.size


def linear_model() -> Named:
    return Named(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), nn.Linear(4, 4))


# --- attributes ---


def test_attributes_are_the_original_models() -> None:
    model = linear_model()
    pipe = RoundPipe(model)
    assert isinstance(pipe, nn.Module)
    assert pipe.size == 4 and pipe.twice() == 8
    pipe.size = 6
    assert model.size == 6 and model.twice() == 12
    pipe.extra = "new"
    assert model.extra == "new"
    del pipe.extra
    assert not hasattr(model, "extra")
    with pytest.raises(AttributeError, match="extra"):
        _ = pipe.extra
    assert pipe[0] is model[0] and len(pipe) == 3 and list(pipe) == list(model)
    assert {"size", "twice", "forward_backward", "step"} <= set(dir(pipe))
    assert repr(pipe).startswith("RoundPipe(Named(")
    assert pipe.num_layers == 3


def test_set_original_model_moves_the_attributes_only() -> None:
    model, face = linear_model(), nn.Module()
    face.answer = 42
    pipe = RoundPipe(model)
    before = pipe(torch.ones(2, 4))
    pipe.set_original_model(face)
    assert pipe.answer == 42 and not hasattr(pipe, "twice")
    assert torch.equal(pipe(torch.ones(2, 4)), before)
    with pytest.raises(ValueError, match=r"expected an nn.Module"):
        pipe.set_original_model("model")  # type: ignore[arg-type]


def test_train_and_eval_return_the_wrapper() -> None:
    model = linear_model()
    pipe = RoundPipe(model)
    assert pipe.eval() is pipe and not model[1].training and not pipe.training
    assert pipe.train() is pipe and model[1].training
    assert pipe.requires_grad_(False) is pipe and not any(p.requires_grad for p in model.parameters())


def test_parameters_warn_outside_of_the_optimizer() -> None:
    model = linear_model()
    pipe = RoundPipe(model)
    assert len(list(pipe.parameters())) == len(list(model.parameters()))  # they may be trained as they are
    pipe.optim_parameters()
    with pytest.warns(UserWarning, match="optim_parameters"):
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
    with pytest.warns(UserWarning, match="optim_parameters"):
        assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OptimizerCtx():
            mine = list(pipe.parameters())
        assert [id(p) for p in mine] == [id(p) for p in pipe.optim_parameters()]
        seen: list[int] = []
        pipe.step(lambda: seen.extend(id(p) for p in pipe.parameters()), is_async=False)
    assert seen == [id(p) for p in mine]
    assert not {id(p) for p in model.parameters()} & set(seen)


def test_optimizer_parameters_names_dtypes_and_duplicates() -> None:
    model = linear_model().half()
    model[2].weight = model[0].weight  # tied
    model[1][0].bias.requires_grad_(False)
    pipe = RoundPipe(model, optim_dtype=torch.float32)
    named = dict(pipe.optim_named_parameters())
    assert list(named) == [name for name, p in model.named_parameters() if p.requires_grad] and "1.0.bias" not in named
    assert all(p.dtype == torch.float32 and p.is_leaf for p in named.values())
    everything = list(pipe.optim_named_parameters(prefix="model", remove_duplicate=False))
    assert [name for name, _ in everything] == [
        f"model.{name}" for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    ]
    assert dict(everything)["model.2.weight"] is dict(everything)["model.0.weight"]
    # A model that nobody else keeps: its parameters do not need it.
    assert len(list(RoundPipe(linear_model()).optim_parameters())) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "model"}, "model is a str"),
        ({"optim_dtype": torch.int32}, "optim_dtype is torch.int32"),
        ({"pin_model": "yes"}, "pin_model is 'yes'"),
        ({"model": nn.Sequential()}, "the model has no layers"),
        ({"model": nn.Linear(2, 2, device="meta")}, "is on meta.*to_empty"),
        ({"model": torch.jit.script(nn.Linear(2, 2))}, "TorchScript"),
    ],
)
def test_refused_models_and_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^\[RoundPipe\] .*{message}"):
        RoundPipe(**{"model": linear_model(), **arguments})


def test_refuses_buffers_without_values_and_wrapping_twice() -> None:
    model = linear_model()
    model[0].register_buffer("nowhere", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"buffer 'nowhere' is a .* on meta"):
        RoundPipe(model)
    with pytest.raises(ValueError, match="wrapped already"):
        RoundPipe(RoundPipe(linear_model()))


# --- losses and outputs ---


def test_run_config_of_the_call_wins_over_the_models() -> None:
    pipe = RoundPipe(linear_model(), model_run_config=RoundPipeRunConfig(num_microbatch=3, merge_output=False))
    value = torch.randn(6, 4)
    assert len(pipe(value)) == 3
    assert len(pipe(value, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))) == 2
    merged = pipe(value, roundpipe_run_config=RoundPipeRunConfig(merge_output=True))
    assert merged.shape == (6, 4) and merged.requires_grad
    assert not pipe(
        value, roundpipe_run_config=RoundPipeRunConfig(merge_output=True, requires_grad=False)
    ).requires_grad
    pipe.synchronize()  # an output may be here before its job is through
    assert {record[3] for record in pipe.last_records()} == {0, 1, 2}


# --- recompute data ---


class Remembering(nn.Module):
    """Cannot be repeated from its inputs: it draws from a generator of its own."""

    generator = torch.Generator()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            (noise,) = roundpipe.get_recompute_data()
            number, text = roundpipe.get_recompute_data()
            assert (number, text) == (7, "seven")
        else:
            noise = torch.randn(value.shape, generator=self.generator)
            roundpipe.save_for_recompute(noise)
            roundpipe.save_for_recompute(7, "seven")
        return self.linear(value) * noise


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("fused", [True, False])
def test_recompute_gets_what_the_forward_saved(grain: str, fused: bool) -> None:
    roundpipe.devices("virtual:1")  # one device, so that the layers draw in order
    model = nn.Sequential(Remembering(), nn.Linear(4, 4), Remembering())
    plain = copy.deepcopy(model)
    value, label = torch.randn(4, 4), torch.randn(4, 4)
    pipe = pipe_of(model, 1, recompute_grain=grain)
    Remembering.generator.manual_seed(1)
    if fused:
        pipe.forward_backward((value,), label=label, loss_fn=squared_error)
    else:
        squared_error(pipe(value), label).backward()
    Remembering.generator.manual_seed(1)
    squared_error(plain(value), label).backward()
    pipe.synchronize()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_same(gradients, {name: p.grad for name, p in plain.named_parameters()})
    assert not roundpipe.doing_recompute()


def test_recompute_data_outside_of_a_recompute() -> None:
    roundpipe.save_for_recompute(torch.ones(1))
    with pytest.raises(AssertionError, match="no layer is being recomputed"):
        roundpipe.get_recompute_data()


class Saving(nn.Linear):
    """Saves `times` times, and keeps what it gets back when it asks three times."""

    def __init__(self, times: int) -> None:
        super().__init__(4, 4)
        self.times = times
        self.got: list[Any] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            self.got.extend(roundpipe.get_recompute_data() for _ in range(3))
        else:
            for _ in range(self.times):
                roundpipe.save_for_recompute(torch.arange(3), "text")
        return super().forward(value)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_same_recompute_data_when_asked_again(devices: int) -> None:
    roundpipe.devices(f"virtual:{devices}")
    nothing, once = Saving(0), Saving(1)
    pipe = pipe_of(nn.Sequential(nothing, once, nn.Linear(4, 4)), 1)
    pipe(torch.randn(2, 4)).sum().backward()
    pipe.synchronize()
    assert nothing.got == [None] * 3
    first, second, third = once.got
    assert first is second is third and first[0].tolist() == [0, 1, 2] and first[1] == "text"


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_recomputing_waits_for_what_the_forward_saves(devices: int, grain: str) -> None:
    roundpipe.devices(f"virtual:{devices}")
    layers = [Saving(1) for _ in range(3)]
    pipe = pipe_of(nn.Sequential(*layers), devices + 1, recompute_grain=grain)
    for _ in range(20):
        pipe.forward_backward((torch.randn(2 * devices + 2, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pipe.synchronize()
    assert all(got is not None and got[1] == "text" for layer in layers for got in layer.got)
    assert layers[0].got


def test_a_layer_that_does_not_show_that_it_asks() -> None:
    assert may_save(nn.Sequential(Saving(1))) and not may_save(nn.Linear(2, 2))
    with layer_context((0, 0, 0, True)), pytest.raises(ValueError, match="recomputed ahead of its forward"):
        roundpipe.get_recompute_data()


def test_asking_for_more_than_was_saved() -> None:
    pipe = pipe_of(nn.Sequential(Saving(2), nn.Linear(4, 4)), 1)
    with pytest.raises(ValueError, match="asked 3 times, but the forward saved 2 times"):
        pipe(torch.randn(2, 4)).sum().backward()
        pipe.synchronize()


# --- saving ---


@pytest.fixture(params=[False, True], ids=["", "where parameters are swapped"])
def swapping(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    after = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before)
    assert after == request.param


@pytest.mark.usefixtures("swapping")
def test_state_dict_round_trip() -> None:
    pipe = pipe_of(linear_model(), 2)
    pipe.forward_backward((torch.randn(4, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pipe.step(sgd_step(pipe))
    saved = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    other = pipe_of(linear_model(), 2)
    list(other.optim_parameters())
    other.load_state_dict(saved)
    assert_same(dict(other.state_dict()), saved)
    for model in (pipe, other):
        model.zero_grad()
        model.forward_backward((torch.ones(4, 4),), loss_fn=lambda outputs, _: outputs.square().sum())
        model.step(sgd_step(model))
    assert_same(state_of(other), state_of(pipe))


# --- documentation ---


def public_members() -> Iterator[tuple[str, Any]]:
    for name in roundpipe.__all__:
        value = getattr(roundpipe, name)
        yield name, value
        if inspect.isclass(value):
            for member, attribute in vars(value).items():
                if not member.startswith("_") and (callable(attribute) or isinstance(attribute, property)):
                    yield f"{name}.{member}", attribute


def test_a_state_dict_is_the_parameters_in_storages_of_their_own() -> None:
    model = RoundPipe(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.5)
    state = model.state_dict()
    assert list(state) == list(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict())
    for name, tensor in state.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is model[0].weight and state["0.weight"].data_ptr() == kept["0.weight"].data_ptr()
    state["0.weight"].fill_(2)  # as if the parameter itself was written: the optimizer goes on from there
    model.forward_backward((torch.ones(2, 3),), loss_fn=lambda outputs, _: outputs.sum() * 0)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert torch.equal(model.state_dict()["0.weight"], torch.full((3, 3), 2.0))
    del model, kept
    assert torch.equal(state["0.weight"], torch.full((3, 3), 2.0))
    with torch.inference_mode():
        assert RoundPipe(nn.Linear(3, 3)).state_dict()["weight"].shape == (3, 3)


def test_every_public_name_has_a_docstring() -> None:
    assert set(roundpipe.__all__) <= set(dir(roundpipe))
    missing = [name for name, value in public_members() if not inspect.getdoc(value)]
    assert not missing
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = roundpipe.nothing
