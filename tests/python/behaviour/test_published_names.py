"""Names that scripts for the published package use: attributes of wrapped models, modules, and functions in them."""

from __future__ import annotations

import copy
import importlib
import inspect
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from causal_models import build, padded_batch
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.models.function import (
    ChunkedCompileLinearForCausalLMLoss,
    CompileCrossEntropy,
    CompileForCausalLMLoss,
    CompileLinearCrossEntropy,
)


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "roundpipe.roundpipe": ["RoundPipe", "AutoRoundPipe"],
        "roundpipe.scheduler": ["ModelExecutePlan"],
        "roundpipe.wrapper": ["wrap_model_to_roundpipe"],
        "roundpipe.grad_scaler": ["GradScaler"],
        "roundpipe.context": ["OptimizerCtx", "doing_recompute", "get_recompute_data", "save_for_recompute"],
        "roundpipe.run_config": ["RoundPipeRunConfig"],
    }.items(),
)
def test_modules_hold_what_the_package_holds(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert all(getattr(found, name) is getattr(roundpipe, name) for name in names)


def test_modules_with_names_of_their_own() -> None:
    from roundpipe.batch import RoundPipePackedData
    from roundpipe.optim.adam import Adam, adam

    assert issubclass(RoundPipePackedData, list) and Adam is roundpipe.optim.Adam and callable(adam)
    assert callable(roundpipe.optim.Adam)  # the module of that name does not hide the class


def test_modules_are_attributes() -> None:
    """Without being imported by their names, as `import roundpipe` alone has them in the published package."""
    program = """
import roundpipe
roundpipe.timer.ModelTimer, roundpipe.models.wrap_model, roundpipe.batch.Batch, roundpipe.device.get_num_devices
roundpipe.run_config.FullRoundPipeRunConfig, roundpipe.scheduler.ModelExecutePlan, roundpipe.optim.adam.Adam
roundpipe.context.doing_optimizer, roundpipe.grad_scaler.GradScaler, roundpipe.wrapper.wrap_model_to_roundpipe
assert len(roundpipe.roundpipe.RoundPipe.__mro__) > 1 and callable(roundpipe.devices)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert roundpipe.__version__ == metadata.version("roundpipe-engine")


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_device_list(devices: int) -> None:
    roundpipe.devices(f"virtual:{devices}")
    from roundpipe import device

    assert [each.id for each in device.device_list] == list(range(devices)) and device.get_num_devices() == devices
    assert all(torch.ones(1, device=each.device).device.type == "cpu" for each in device.device_list)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        device.nothing  # noqa: B018


# --- attributes ---


def test_attributes_of_a_plain_model() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    config = RoundPipeRunConfig(num_microbatch=3)
    pipe = RoundPipe(module, torch.float32, "mine", config)
    assert pipe.model is module and pipe.original_model is None and pipe.name == "mine"
    assert pipe.layers == list(module) and pipe.optim_dtype == torch.float32
    assert pipe.model_run_config == config and pipe.model_run_config is not config
    config.num_microbatch = 1
    assert pipe.model_run_config.num_microbatch == 3
    single = RoundPipe(nn.Linear(2, 2))
    assert single.layers == [single.model] and single.name == "Linear"
    assert not hasattr(pipe, "nothing") and not hasattr(AutoRoundPipe(nn.Linear(2, 2)), "layers")


def test_what_the_model_itself_calls_so_is_its_own() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.layers, self.name = nn.Linear(2, 2), "layers", "own"

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.model(value)  # type: ignore[no-any-return]

    module = Named()
    pipe = RoundPipe(module)
    assert pipe.model is module.model and pipe.layers == "layers" and pipe.name == "own"


def test_attributes_of_a_followed_model() -> None:
    model = build("gpt2")
    pipe = wrap_model_to_roundpipe(model, name="followed")
    assert pipe.original_model is model and len(pipe.layers) == pipe.num_layers and pipe.name == "followed"
    assert list(pipe.model) == pipe.layers  # GPT-2 has no `model` of its own
    llama = build("llama")
    assert wrap_model_to_roundpipe(llama).model is llama.model


def test_another_original_model_does_not_change_what_is_trained() -> None:
    module, original = nn.Linear(4, 3), nn.Linear(4, 3)
    pipe = RoundPipe(module)
    pipe.set_original_model(original)
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=1.0)
    before = module.bias.detach().clone()
    pipe.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    pipe.synchronize()
    torch.testing.assert_close(module.bias, before - 2)
    pipe.eval()
    assert not module.training and not original.training


# --- AutoRoundPipe by hand ---


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(value) * self.scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_model_with_pipes_that_were_put_in_by_hand(devices: int) -> None:
    roundpipe.devices(f"virtual:{devices}")
    model = Halves()
    plain = copy.deepcopy(model)
    model.first, model.second = RoundPipe(model.first), RoundPipe(model.second)
    wrapped = AutoRoundPipe(model, "mine", torch.float32, pin_model="off")
    assert wrapped.name == "mine" and wrapped.optim_dtype == torch.float32
    assert [name for name, _ in wrapped.optim_named_parameters()] == [name for name, _ in plain.named_parameters()]
    optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        value = torch.randn(4, 4)
        wrapped(value).square().mean().backward()
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain(value).square().mean().backward()
        reference.step()
        reference.zero_grad()
    wrapped.synchronize()
    for (name, mine), (_, theirs) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_models_that_cannot_be_put_together_by_hand() -> None:
    model = Halves()
    model.second = RoundPipe(nn.Sequential(model.first))
    with pytest.raises(ValueError, match=r"parameter first.weight is also second.0.weight"):
        AutoRoundPipe(model)
    with pytest.raises(ValueError, match=r"expected a plain nn\.Module"):
        AutoRoundPipe(RoundPipe(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="unexpected options: nothing"):
        AutoRoundPipe(nn.Linear(2, 2), nothing=1)


# --- losses ---


@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)])
@pytest.mark.parametrize("shifted", [False, True])
def test_losses_of_a_language_model(items: Any, shifted: bool) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, head = torch.randn(3, 5, 4, requires_grad=True), nn.Linear(4, 11)
    labels = torch.randint(11, (3, 5))
    labels[0, 2:] = -100
    given: dict[str, Any] = {"labels": labels, "num_items_in_batch": items, "unused": 1}
    if shifted:
        given["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    expected = ForCausalLMLoss(logits=head(hidden), vocab_size=11, **given)
    (gradient,) = torch.autograd.grad(expected, hidden)
    for loss in (
        CompileForCausalLMLoss(head(hidden), vocab_size=11, **given),
        ChunkedCompileLinearForCausalLMLoss(hidden, head, **given),
    ):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], gradient)


def test_sums_of_cross_entropies() -> None:
    hidden, head, labels = torch.randn(6, 4), nn.Linear(4, 11), torch.tensor([1, 2, -1, 3, 4, 10])
    expected = F.cross_entropy(head(hidden), labels, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(CompileCrossEntropy(head(hidden), labels, -1), expected)
    torch.testing.assert_close(CompileLinearCrossEntropy(hidden, head.weight, head.bias, labels, -1), expected)
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        CompileForCausalLMLoss(head(hidden), None, 11)


def test_the_arguments_of_the_losses_are_the_published_ones() -> None:
    assert list(inspect.signature(CompileForCausalLMLoss).parameters) == [
        "logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels", "kwargs",
    ]  # fmt: skip
    assert list(inspect.signature(ChunkedCompileLinearForCausalLMLoss).parameters) == [
        "hidden_states", "lm_head", "labels", "num_items_in_batch", "ignore_index", "shift_labels", "kwargs",
    ]  # fmt: skip


def test_wrapping_with_a_preset() -> None:
    wrapped = roundpipe.models.wrap_model(build("llama"), model_run_config=RoundPipeRunConfig(num_microbatch=2))
    assert wrapped.forward_backward(input_kwargs=padded_batch(rows=4)) > 0
    with pytest.raises(NotImplementedError, match="no preset for Linear"):
        roundpipe.models.wrap_model(nn.Linear(2, 2))


# --- times ---


def test_times_are_not_printed_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    RoundPipe(nn.Linear(2, 2))(torch.randn(4, 2))
    assert "Layer" not in capfd.readouterr().err
