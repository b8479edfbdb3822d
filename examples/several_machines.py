"""Trains one model on several machines, and goes on by itself when one of them has failed.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else torch may look for ranks where they were before a restart
    torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 \
        examples/several_machines.py --folder /on/a/disk/that/both/see

On one machine, to try it: `torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/several_machines.py
--folder run`, with `--fail-rank 1 --fail-at 7` to lose a process on the way.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe

WIDTH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, on a disk that all machines see")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--fail-rank", type=int, help="this rank kills itself, in its first life")
    parser.add_argument("--fail-at", type=int, default=7, help="in this step")
    options = parser.parse_args()

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Sequential(nn.GELU(), nn.Dropout(0.1)), nn.Linear(4096, 1))
    model = RoundPipe(layers, name="several")  # rank 0's weights count
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    torch.manual_seed(1 + rank)  # each rank draws rows of its own

    done = 0
    if roundpipe.latest(options.folder) is not None:
        done = roundpipe.load_checkpoint(options.folder, model, optimizer).step
    save = None
    for step in range(done + 1, options.steps + 1):
        rows = torch.randn(64, WIDTH)
        label = rows.square().mean(dim=1, keepdim=True)
        loss = model.forward_backward((rows,), label=label, loss_fn=nn.functional.mse_loss)
        model.step(optimizer)
        if step % options.save_every == 0:
            save = roundpipe.save_checkpoint(options.folder, model, optimizer, keep_last=2)  # on every rank
        if rank == 0:
            print(f"step {step}  loss of these rows {float(loss):.4f}", flush=True)
        is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if rank == options.fail_rank and step == options.fail_at and is_first_life:
            os.kill(os.getpid(), signal.SIGKILL)
    model.synchronize()
    if save is not None:
        save.wait()  # before the process group ends
    if rank == 0:
        content = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        print(f"weights {hashlib.sha256(content).hexdigest()[:16]}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
