"""Which parameters weight decay leaves out: by their roles, the same for every way of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

import dense_models
import moe_models
from roundpipe import RoundPipe, optim, wrap_model_to_roundpipe
from roundpipe.train.config import TrainConfig
from roundpipe.train.optimizer import make_optimizer

pytestmark = pytest.mark.usefixtures("one_device")


def left_out(model: Any, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of parameters without weight decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    none = [group["params"] for group in optimizer.param_groups if group["weight_decay"] == 0]
    return {names[id(parameter)] for parameters in none for parameter in parameters}


class StackedNorm(nn.Module):
    """The norms of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(-1, (2, 4)) * self.scales).flatten(-2)


class Mine(nn.RMSNorm):
    pass


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.channels = nn.Parameter(torch.ones(8))
        self.bias_of_experts = nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.channels + self.bias_of_experts.sum(0)


def test_roles_count_and_not_shapes() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), Mine(8), StackedNorm(), Gate())
    found = left_out(chain, optim.AdamW(RoundPipe(chain), decay_norms_and_biases=False))
    norms = {"1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "4.scales"}
    assert found == norms | {"0.bias", "5.bias_of_experts"}
    assert left_out(chain, optim.AdamW(RoundPipe(chain))) == set()


def test_groups_that_set_weight_decay_keep_it() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    groups = [{"params": "1.*", "weight_decay": 0.5}]
    optimizer = optim.AdamW(RoundPipe(chain), groups=groups, decay_norms_and_biases=False)
    assert left_out(chain, optimizer) == {"0.bias"}


@pytest.mark.parametrize("name", ["llama biases", "qwen3", "qwen3_moe", "gpt_oss"])
def test_the_command_leaves_out_what_transformers_leaves_out(name: str) -> None:
    """But for sinks, which are biases of logits; transformers knows them as neither."""
    model = (moe_models.make if name in moe_models.MODELS else dense_models.make)(name)
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    expected = {name for name, _ in model.named_parameters()} - set(decayed)
    sinks = {name for name, _ in model.named_parameters() if name.endswith("sinks")}
    assert bool(sinks) == (name == "gpt_oss")
    optimizer = make_optimizer(wrap_model_to_roundpipe(model), TrainConfig(weight_decay=0.1))
    assert left_out(model, optimizer) == expected | sinks
    assert any(name.endswith("down_proj_bias") for name in expected) == (name == "gpt_oss")
