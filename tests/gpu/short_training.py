"""A few steps of everything, as a program: `python short_training.py SPEC [ENDING]` prints the losses.

ENDING: "at once" ends without waiting for anything; "fault" goes on until a layer has read beyond its table.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig


class Lookup(nn.Module):
    """Rows of a table, and then a product; `beyond` reads a row that is not there."""

    beyond = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens + 100 if self.beyond else tokens)


def main(spec: str, ending: str = "") -> None:
    torch.set_num_threads(1)
    roundpipe.devices(spec)
    torch.manual_seed(1)
    lookup = Lookup()
    layers = [lookup, *[nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()) for _ in range(3)]]
    model = RoundPipe(nn.Sequential(*layers), model_run_config=RoundPipeRunConfig(num_microbatch=3))
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    tokens = torch.arange(24).view(6, 4) % 16

    def step() -> float:
        loss = model.forward_backward((tokens,), loss_fn=lambda outputs, _: outputs.square().sum())
        model.step(optimizer, max_grad_norm=1.0)
        return float(loss)

    print([step() for _ in range(4)], flush=True)
    if ending == "at once":
        return
    if ending == "fault":
        lookup.beyond = True
        for _ in range(4):
            step()
    model.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
