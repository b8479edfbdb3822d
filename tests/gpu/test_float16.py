"""Training in float16 with a scaler, with products that are added up in fp32 and in fp16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig

SCALE, STEPS = 2.0**8, 3


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 64)]
    return nn.Sequential(*layers).half()


def squared_error(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - target).square().mean()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 64, generator=generator).half(), torch.randn(8, 64, generator=generator)) for _ in range(STEPS)
    ]


@pytest.mark.parametrize("adds_in_fp16", [False, True])
def test_steps_are_those_of_a_plain_loop(target, adds_in_fp16):
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    data, found = batches(), []
    for workers in (1, 2):
        roundpipe.devices(target.spec(workers), fp16_accumulation=adds_in_fp16)
        assert torch.backends.cuda.matmul.allow_fp16_accumulation == adds_in_fp16
        plain = chain()
        model = RoundPipe(copy.deepcopy(plain), model_run_config=RoundPipeRunConfig(num_microbatch=2))
        optimizer, scaler = roundpipe.optim.AdamW(model, lr=1e-3), GradScaler(init_scale=SCALE)
        losses, skipped = [], 0

        def scaled_half(outputs: torch.Tensor, part: torch.Tensor, scaler: GradScaler = scaler) -> torch.Tensor:
            return scaler.scale(squared_error(outputs, part)) / 2

        for inputs, labels in data:
            loss = model.forward_backward((inputs,), label=labels, loss_fn=scaled_half)
            losses.append(float(loss) / SCALE)
            skipped += model.step(optimizer, False, scaler=scaler).skipped
        assert skipped == 0
        model.synchronize()
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
        plain.to(target.device)
        first = [squared_error(plain(i.to(target.device)), o.to(target.device)) / 2 for i, o in halves(data[0])]
        assert losses[0] == pytest.approx(float(sum(first)), rel=1e-6)
        assert losses[-1] != losses[0]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))
    roundpipe.devices("virtual:1")
    assert torch.backends.cuda.matmul.allow_fp16_accumulation == before


def halves(batch: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*(part.tensor_split(2) for part in batch), strict=True))
