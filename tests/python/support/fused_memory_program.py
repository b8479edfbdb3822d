"""Trains a model of 16-bit weights for a few steps and prints what it took on the host, as JSON. Run by a test."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import roundpipe
from process_memory import status
from roundpipe import RoundPipe, RoundPipeRunConfig


def main() -> None:
    formats: Any = json.loads(sys.argv[1])
    is_async, width, layers = sys.argv[2] == "async", int(sys.argv[3]), int(sys.argv[4])
    roundpipe.devices("virtual:1,memory=256MiB")
    torch.set_num_threads(1)
    # What the first use of each kernel sets up is not the model's.
    roundpipe._core.set_threads(2)
    small = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    warm = RoundPipe(small, name="warm")
    warm_optimizer = roundpipe.optim.AdamW(warm, **formats)
    warm.forward_backward((torch.ones(2, 64, dtype=torch.bfloat16),), loss_fn=lambda o, _: o.float().square().mean())
    warm.step(warm_optimizer, is_async)
    warm.synchronize()
    base = status("VmRSS")

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    pipe = RoundPipe(model, name="big", model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = roundpipe.optim.AdamW(pipe, lr=1e-3, **formats)
    inputs = torch.randn(4, width).to(torch.bfloat16)
    for _ in range(4):
        pipe.forward_backward((inputs,), loss_fn=lambda o, _: o.float().square().mean())
        pipe.step(optimizer, is_async)
    pipe.synchronize()
    memory = optimizer.host_memory()
    print(
        json.dumps(
            {
                "parameters": memory.parameters,
                "predicted": memory.total,
                "table": str(memory),
                "devices": sum(device["peak_bytes"] for device in roundpipe.devices().memory_report()),
                "base": base,
                "peak": status("VmHWM"),
            }
        )
    )


if __name__ == "__main__":
    main()
