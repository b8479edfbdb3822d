"""Loads an optimizer's state over one that has stepped, and prints how far the host's memory grew, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import roundpipe
from process_memory import status
from roundpipe import RoundPipe, RoundPipeRunConfig


def main() -> None:
    width, layers, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    roundpipe.devices("virtual:1")
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    optimizer = roundpipe.optim.AdamW(pipe, lr=1e-3)
    pipe.forward_backward((torch.randn(4, width),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.step(optimizer)
    torch.save(optimizer.state_dict(), file)
    saved = torch.load(file)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    optimizer.load_state_dict(saved)
    grown = status("VmHWM") - before
    state = [entry[name] for entry in saved["state"].values() for name in ("exp_avg", "exp_avg_sq")]
    again = optimizer.state_dict()["state"]
    loaded = [entry[name] for entry in again.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(state, loaded, strict=True))
    print(json.dumps({"state": sum(tensor.nbytes for tensor in state), "grown": grown}))


if __name__ == "__main__":
    main()
