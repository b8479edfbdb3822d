"""What PyTorch users do with a model out of habit: it works, or is refused by name and changes nothing."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

ONE = RoundPipeRunConfig(num_microbatch=1)


class Root(nn.Module):
    """Becomes an AutoRoundPipe: its own forward stays on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values * scale


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))


def piped() -> Any:
    return RoundPipe(chain(), model_run_config=ONE)


def auto() -> Any:
    torch.manual_seed(0)
    return wrap_model_to_roundpipe(Root(), lower_threshold=0, upper_threshold=200, model_run_config=ONE)


both = pytest.mark.parametrize("make", [piped, auto])


@both
def test_what_changes_nothing_returns_the_wrapper(make: Callable[[], Any]) -> None:
    model = make()
    before = [(id(p), p.clone()) for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for done in (
            *(model.to("cpu"), model.to(torch.float32), model.to(device="cpu", dtype=torch.float32)),
            *(model.to(torch.ones(1)), model.cpu(), model.float(), model.type(torch.float32)),
        ):
            assert done is model
    for move in (lambda: model.to("cuda"), model.cuda, model.xpu, lambda: model.to("cuda:0", torch.float32)):
        with pytest.warns(UserWarning, match="not needed"):
            assert move() is model
    assert [identity for identity, _ in before] == [id(p) for p in model.parameters()]
    assert model(torch.ones(2, 6)).shape == (2, 6)


@both
def test_conversions_are_refused_before_they_change_anything(make: Callable[[], Any]) -> None:
    model = make()
    expected = [p.clone() for p in model.parameters()]
    refused: list[Callable[[], Any]] = [
        *(
            model.half,
            model.double,
            model.bfloat16,
            lambda: model.to(torch.bfloat16),
            lambda: model.type("torch.HalfTensor"),
        ),
        *(lambda: model.to("cuda", torch.float16), lambda: model.to(torch.ones(1, dtype=torch.float64))),
        *(lambda: model.to(memory_format=torch.channels_last), lambda: model.to_empty(device="cpu")),
        *(model.share_memory, lambda: model.to("meta")),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"wrap|state_dict"):
            call()
    model.eval()
    model(torch.ones(2, 6))
    for parameter, old in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, old)


@both
def test_apply_initialises_the_original_model(make: Callable[[], Any]) -> None:
    model = make()
    plain = copy.deepcopy(model._original_model) if make is piped else None

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    assert model.apply(initialise) is model
    assert all(torch.all(p == 0.25) for name, p in model.named_parameters() if name.endswith("weight"))
    if plain is not None:
        inputs = torch.ones(2, 6)
        assert torch.equal(model.eval()(inputs), plain.apply(initialise).eval()(inputs))


@both
def test_copies_name_the_state_dict(make: Callable[[], Any]) -> None:
    model = make()
    for call in (
        lambda: copy.deepcopy(model),
        lambda: copy.copy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.optim.swa_utils.AveragedModel(model),
    ):
        with pytest.raises(ValueError, match="state_dict"):
            call()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    model.load_state_dict(torch.load(buffer))


@both
def test_inputs_that_are_not_where_they_belong(make: Callable[[], Any]) -> None:
    model = make()
    batch = {"values": torch.ones(4, 6)}
    for call in (
        lambda: model.forward_backward(batch),
        lambda: model.forward_backward(UserDict(batch)),
        lambda: model.forward_backward(**batch),
        lambda: model.forward_backward((), **batch),
    ):
        with pytest.raises(ValueError, match="input_kwargs="):
            call()
    if make is piped:
        with pytest.raises(ValueError, match="input_kwargs="):
            model.submit(batch)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ValueError, match="gradients are off"):
            model.forward_backward((torch.ones(4, 6),), loss_fn=lambda outputs, _: outputs.sum())


@both
@pytest.mark.parametrize("way", ["function", "method", "autocast"])
def test_an_assigned_forward_is_called_and_may_call_the_pipeline(make: Callable[[], Any], way: str) -> None:
    model = make().eval()
    inputs = torch.randn(4, 6)
    expected = model(inputs)
    run = model.forward
    calls: list[int] = []

    @functools.wraps(run)
    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    if way == "function":
        model.forward = mine
    elif way == "method":
        model.forward = (lambda self, *args: mine(*args)).__get__(model)
    else:
        model.forward = torch.autocast("cpu", torch.bfloat16)(mine)
    found = model(inputs)
    assert calls == [1]
    if way == "autocast":
        assert found.dtype == torch.bfloat16
    else:
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"model\.forward was assigned"):
        model.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.sum())
    del model.forward
    assert torch.equal(model(inputs), expected) and calls == [1]


def test_hooks_run_around_calls() -> None:
    plain, model = chain().eval(), piped().eval()
    seen: dict[int, list[Any]] = {id(plain): [], id(model): []}
    for network in (plain, model):
        notes = seen[id(network)]

        def before(module: Any, args: Any, notes: list[Any] = notes) -> Any:
            notes.append(("before", args[0].shape))
            return (args[0] * 2,)

        def with_names(module: Any, args: Any, kwargs: Any, notes: list[Any] = notes) -> Any:
            notes.append(("first", sorted(kwargs)))
            return args, kwargs

        def after(module: Any, args: Any, outputs: Any, notes: list[Any] = notes) -> Any:
            notes.append(("after", outputs.shape))
            return outputs + 1

        network.register_forward_pre_hook(before)
        network.register_forward_pre_hook(with_names, with_kwargs=True, prepend=True)
        handle = network.register_forward_hook(after)
    inputs = torch.randn(4, 6)
    assert torch.equal(model(inputs), plain(inputs))
    assert seen[id(model)] == seen[id(plain)] and len(seen[id(model)]) == 3
    with pytest.raises(ValueError, match="hooks are registered"):
        model.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.sum())
    handle.remove()
    model(inputs)
    assert [name for name, _ in seen[id(model)]] == ["first", "before", "after", "first", "before"]
    with pytest.raises(ValueError, match="register_full_backward_hook"):
        model.register_full_backward_hook(lambda *_: None)


def test_hooks_that_nothing_would_run_are_refused() -> None:
    model = chain()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="Sequential has hooks"):
        RoundPipe(model)


def test_layers_may_change_until_there_is_an_optimizer() -> None:
    plain, model = chain().eval(), piped().eval()
    inputs = torch.randn(4, 6)
    model(inputs)
    for network in (plain, model):
        torch.manual_seed(3)
        network[2] = nn.Linear(6, 5)
        network.append(nn.ReLU())
    outputs = model(inputs)
    assert torch.equal(outputs, plain(inputs)) and model.num_layers == 4
    outputs.sum().backward()
    plain(inputs).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    model.optim_parameters()
    del model[3]
    with pytest.raises(ValueError, match="added, removed or replaced"):
        model(inputs)


def test_tracing_is_refused() -> None:
    with pytest.raises(ValueError, match="trac"):
        torch.jit.trace(piped().eval(), torch.ones(2, 6))


def test_parts_on_the_host_may_change_until_there_is_an_optimizer() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(values))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain = Network()
    ours = copy.deepcopy(plain)
    model = wrap_model_to_roundpipe(ours, skip_modules=["head"], lower_threshold=0, model_run_config=ONE)
    for network in (plain, model):
        torch.manual_seed(1)
        network.head = nn.Linear(6, 4)
    inputs, labels = torch.randn(4, 6), torch.randint(4, (4,))
    for network, optimizer in (
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
        (model, torch.optim.SGD(model.optim_parameters(), lr=0.1)),
    ):
        for _ in range(3):
            F.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.synchronize()
    assert torch.equal(ours.head.weight, plain.head.weight)
    model.head = nn.Linear(6, 2)
    with pytest.raises(ValueError, match="added, removed or replaced"):
        model(inputs)


def test_a_call_while_a_cuda_graph_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (model, lambda value: model.forward_backward((value,), loss_fn=lambda out, _: out.sum())):
        with pytest.raises(ValueError, match="a CUDA graph is being captured"):
            call(torch.ones(1, 2))
    monkeypatch.undo()
    model(torch.ones(1, 2))
