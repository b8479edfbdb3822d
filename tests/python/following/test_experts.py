"""Mixtures of experts: only what has received a gradient is updated, as in torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from causal_models import tokens
from odd_models import OddForCausalLM, odd
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


class Experts(nn.Module):
    """Sends each token to one expert, as a list of modules; the last one never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, states: torch.Tensor, notes: Any = None) -> torch.Tensor:
        weights, chosen = self.router(states).softmax(-1).max(-1)
        result = torch.zeros_like(states)
        for index in chosen.unique().tolist():
            here = chosen == index
            result[here] = self.experts[index](states[here]) * weights[here].unsqueeze(-1)
        return states + result


def model_with_experts() -> OddForCausalLM:
    model = odd()
    model.layers = nn.ModuleList(Experts() for _ in range(3))
    return model


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_experts_without_tokens_stay_as_they_are(microbatches: int, fused: bool) -> None:
    roundpipe.devices("virtual:2,debug")
    model = model_with_experts()
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.5, fused=True)
    wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.5}
    if fused:
        mine: Any = roundpipe.optim.AdamW(wrapped, **options)
    else:
        mine = torch.optim.AdamW(wrapped.optim_parameters(), **options)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for seed in range(3):
        batch = {"input_ids": tokens(3, 5, seed), "labels": tokens(3, 5, seed)}
        expected = plain(**batch).loss
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(wrapped.forward_backward(input_kwargs=batch), expected.detach())
        if fused:
            wrapped.step(mine, is_async=False)
        else:
            wrapped.step(lambda: (mine.step(), mine.zero_grad()), is_async=False)
    wrapped.synchronize()
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(p, before[name]) == torch.equal(expected, before[name]), name
        if "experts.4" in name or name == "scale":
            assert torch.equal(p, before[name])
