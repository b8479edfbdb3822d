"""Layers whose forward changes their parameters are refused by name, whatever their class; nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import moe_models
import roundpipe
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, wrap_model_to_roundpipe

ONE = RoundPipeRunConfig(num_microbatch=1)
TOKENS = torch.tensor([[0, 1], [2, 3]])


def loss(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return (outputs - 1).square().mean()


def written(layer: str, parameter: str) -> Any:
    return pytest.raises(ValueError, match=rf"\[forward\] layer {layer} changes its parameter '{parameter}'")


CALLS: dict[str, Callable[[RoundPipe], Any]] = {
    "training": lambda pipe: pipe.forward_backward((TOKENS,), loss_fn=loss),
    "outputs": lambda pipe: pipe(TOKENS),
    "evaluation": lambda pipe: pipe.eval()(TOKENS),
    "inference": lambda pipe: torch.inference_mode()(pipe)(TOKENS),
    "prediction": lambda pipe: pipe.predict_memory((TOKENS,), loss_fn=loss),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_a_largest_norm_is_refused(one_device: None, call: str, trains: bool) -> None:
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Linear(4, 1))
    net[0].requires_grad_(trains)
    before = copy.deepcopy(net.state_dict())
    pipe = RoundPipe(net, model_run_config=ONE)
    with written(r"0 \(0\)", "weight"):
        CALLS[call](pipe)
    pipe.synchronize()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_versions_that_rise_without_a_change_are_allowed(one_device: None) -> None:
    """PEFT's adapters of experts raise the versions of the experts' weights in every forward."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    torch.manual_seed(0)
    plain = peft.get_peft_model(moe_models.make("qwen3_moe"), config)
    model = copy.deepcopy(plain)
    weight = next(p for name, p in plain.named_parameters() if "gate_up_proj" in name or "experts" in name)
    version = weight._version
    ids = torch.randint(31, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    wrapped = wrap_model_to_roundpipe(model, model_run_config=ONE)
    optimizers = [
        torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5),
        roundpipe.optim.SGD(wrapped, lr=0.5),
    ]
    for _ in range(3):
        expected = plain(**batch).loss
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        found = wrapped.forward_backward(input_kwargs=batch)
        wrapped.step(optimizers[1], is_async=False)
        torch.testing.assert_close(found, expected.detach())
    assert weight._version > version  # else this test shows nothing


def test_a_layer_that_may_begin_to_write_is_taken_into_account(one_device: None) -> None:
    """Nothing is known of the values when its version rises for the first time, so that one step is dropped."""

    class Late(nn.Linear):
        late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.late:
                with torch.no_grad():
                    self.weight.mul_(1)
            return super().forward(x)

    net = nn.Sequential(Late(2, 2))
    pipe = RoundPipe(net, model_run_config=ONE)
    for _ in range(2):
        pipe(torch.ones(1, 2))
    net[0].late = True
    with pytest.raises(RoundPipeError, match="may have changed a parameter only after it had run without doing so"):
        pipe(torch.ones(1, 2))
    assert torch.equal(pipe(torch.ones(1, 2)), net(torch.ones(1, 2)))
