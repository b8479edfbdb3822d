"""U-shaped models of diffusion: parts that hand several tensors across, wrapped part by part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import AutoRoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import sweep

ROWS = 5


class Residual(nn.Module):
    """Pictures [batch, channels, height, width] and an embedding of the time -> pictures of `outside` channels."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, inside)
        self.convolution = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(8, outside)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.convolution(self.norm(x).relu()) + self.time(time)[:, :, None, None]


class Down(nn.Module):
    """Hands its states on, and a tuple of those that the way up takes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.residual = Residual(channels, 2 * channels)
        self.smaller = nn.Conv2d(2 * channels, 2 * channels, 2, 2)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> Any:
        wide = self.residual(x, time)
        small = self.smaller(wide)
        return small, (wide, small)


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Residual(2 * channels, channels)
        self.second = Residual(2 * channels, channels // 2)

    def forward(self, x: torch.Tensor, skipped: tuple[torch.Tensor, ...], time: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.cat([x, skipped[-1]], 1), time)
        x = nn.functional.interpolate(x, scale_factor=2.0)
        return self.second(torch.cat([x, skipped[-2]], 1), time)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 8)
        self.before = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList([Down(4), Down(8)])
        self.middle = Residual(16, 16)
        self.up = nn.ModuleList([Up(16), Up(8)])
        self.after = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: Any) -> torch.Tensor:
        embedded = self.time(torch.as_tensor(time, dtype=x.dtype).expand(len(x))[:, None])
        x = self.before(x)
        kept: tuple[torch.Tensor, ...] = ()
        for down in self.down:
            x, states = down(x, embedded)
            kept += states
        x = self.middle(x, embedded)
        for up in self.up:
            x = up(x, kept[-2:], embedded)
            kept = kept[:-2]
        return self.after(x)


def own() -> nn.Module:
    return UNet()


def of_diffusers() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def conditioned() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
    )


def noise(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.sample


TIMES: dict[str, Any] = {"each": torch.arange(ROWS), "tensor": torch.tensor(3), "number": 3}
MODELS = {"own": own, "of_diffusers": of_diffusers, "conditioned": conditioned}


@sweep("model_name, time_name, microbatches, every_part", MODELS, TIMES, [1, 2, 4], [False, True], ids=str, together=1)
def test_one_training_step(
    model_name: str, time_name: str, microbatches: int, every_part: bool, one_torch_thread: None
) -> None:
    make, time = MODELS[model_name], TIMES[time_name]
    torch.manual_seed(0)
    roundpipe.devices("virtual:2,debug")
    model: Any = make().train()
    plain = copy.deepcopy(model)
    pictures, target = torch.randn(ROWS, 3, 16, 16), torch.randn(ROWS, 3, 16, 16)
    inputs = (pictures, time, *([torch.randn(ROWS, 7, 32)] if make is conditioned else []))
    expected = nn.functional.mse_loss(noise(plain(*inputs)), target)
    expected.backward()
    wrapped = wrap_model_to_roundpipe(
        model,
        model_run_config=RoundPipeRunConfig(num_microbatch=microbatches),
        **({"lower_threshold": 0, "upper_threshold": 0} if every_part else {}),
    )
    assert isinstance(wrapped, AutoRoundPipe)
    loss = wrapped.forward_backward(
        inputs, label=target, loss_fn=lambda outputs, label: nn.functional.mse_loss(noise(outputs), label)
    )
    wrapped.synchronize()
    # Gradients of states that several parts take, and of the rows, are added in another order.
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
