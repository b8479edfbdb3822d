"""Are a device's results those of plain PyTorch on it? `python equality.py SPEC` prints a JSON list of checks.

SPEC is a device of `roundpipe.devices` without options; several workers share it. A check is its name and what was
wrong, which is empty where all is well.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

# Read when CUDA starts: with other workspaces cuBLAS may give other bits on other streams.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from support.language_models import as_chain, language_model
from support.trainers import plain_loss
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

ROWS, TOKENS, STEPS = 4, 32, 2
WORKERS = (1, 2, 4)


def update(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Of one that makes no large step of a tiny difference, as Adam does."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_training(model: Any, ids: torch.Tensor, microbatches: int, device: torch.device) -> list[torch.Tensor]:
    """The losses, then the weights, of a plain loop on the device whose optimizer is on the host."""
    chain = copy.deepcopy(model).to(device)
    host = [nn.Parameter(parameter.detach().cpu().clone()) for parameter in chain.parameters()]
    optimizer = update(host)
    losses = []
    for _ in range(STEPS):
        chain.zero_grad()
        total = torch.zeros(())
        for index, part in enumerate(ids.to(device).tensor_split(microbatches)):
            hidden: Any = chain[0](part, part)
            for layer in chain[1:]:
                hidden = layer(hidden)
            (hidden / microbatches).backward()
            value = (hidden / microbatches).detach().cpu()
            total = value if index == 0 else total + value
        losses.append(total)
        for parameter, value in zip(chain.parameters(), host, strict=True):
            value.grad = parameter.grad.cpu()
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(chain.parameters(), host, strict=True):
                parameter.copy_(value)
    return [*losses, *(parameter.detach() for parameter in host)]


def our_training(model: Any, ids: torch.Tensor, microbatches: int) -> list[torch.Tensor]:
    """The same by the pipeline."""
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    piped = RoundPipe(copy.deepcopy(model), model_run_config=config)
    optimizer = update(list(piped.optim_parameters()))
    losses = []
    for _ in range(STEPS):
        call: Any = {"input_args": (ids, ids), "loss_fn": lambda loss, _: loss / microbatches}
        losses.append(piped.forward_backward(**call))
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    piped.synchronize()
    return [*losses, *(parameter.detach().cpu().clone() for parameter in piped._original_model.parameters())]


def changes(trained: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """The losses, and how far training has moved each weight."""
    before = [parameter.detach() for parameter in model.parameters()]
    return [*trained[:STEPS], *(after - start for after, start in zip(trained[STEPS:], before, strict=True))]


def difference(ours: list[torch.Tensor], expected: list[torch.Tensor], relative: float = 0.0) -> str:
    """Empty when all are equal, or within `relative` of each tensor's largest value."""
    for mine, theirs in zip(ours, expected, strict=True):
        if not torch.equal(mine, theirs):
            distance = ((mine - theirs).abs().max() / theirs.abs().max()).item()
            if not distance <= relative:  # NaN is no small distance
                return f"differs by {distance:.1e} of the largest value"
    return ""


def main(spec: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(roundpipe.devices(spec).torch_devices[0])
    ids = torch.randint(512, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    model = language_model("tiny", TOKENS, torch.float32, device)
    chain = as_chain(model, plain_loss)
    shared = "virtual:" if device.type == "cpu" else f"{spec}x"
    checks = []
    one_worker: list[torch.Tensor] = []
    for workers in WORKERS:
        roundpipe.devices(f"{shared}{workers}")
        bits = difference(our_training(chain, ids, 1), plain_training(chain, ids, 1, device))
        checks.append((f"training, 1 microbatch, {workers} workers: the plain loop's bits", bits))
        trained = our_training(chain, ids, ROWS)
        one_worker = one_worker or trained
        if workers > 1:
            name = f"training, {ROWS} microbatches, {workers} workers: the bits of 1 worker"
            checks.append((name, difference(trained, one_worker)))
    plain = plain_training(chain, ids, ROWS, device)
    near = difference(changes(one_worker, chain), changes(plain, chain), 1e-3)
    checks.append((f"training, {ROWS} microbatches: what the plain loop changes within 1e-3", near))
    followed = roundpipe.wrap_model_to_roundpipe(copy.deepcopy(model))
    loss = followed.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
    followed.synchronize()
    whole = copy.deepcopy(model).to(device)(input_ids=ids.to(device), labels=ids.to(device), use_cache=False).loss
    near = difference([loss], [whole.detach().cpu()], 1e-5)
    checks.append(("the loss of the model as transformers has it: the plain model within 1e-5", near))
    print(json.dumps(checks))


if __name__ == "__main__":
    main(sys.argv[1])
