"""One training run of a language model, in a process of its own: `python training_run.py JSON` prints its figures.

The process imports the `roundpipe` that is first on its path: ours, or another release of the same interface. So the
"chain" of a model's parts is trained by what both have in common; "followed" is our way for a model as it is.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import psutil
import torch
from support.language_models import as_chain, qwen3
from support.process_memory import peak_resident_bytes
from support.training_request import Request, Result
from torch import nn


def _plain_loss(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _chunked_loss(peer: bool) -> Any:
    if not peer:
        return _plain_loss
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss  # only in the peer

    return ChunkedCompileLinearForCausalLMLoss


class _Trainer:
    """One batch, trained again and again."""

    def __init__(self, request: Request) -> None:
        import roundpipe

        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if request.memory_bytes and accelerator is not None:
            module = torch.get_device_module(accelerator)
            total_bytes = module.mem_get_info(0)[1]
            module.set_per_process_memory_fraction(min(1.0, request.memory_bytes / total_bytes), 0)
        if not request.peer:
            roundpipe.devices(request.device)
        dtype = torch.float32 if accelerator is None else torch.bfloat16
        model = qwen3(request.shape, request.tokens, dtype, accelerator or torch.device("cpu"))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        ids = torch.randint(
            model.config.vocab_size, (request.rows, request.tokens), generator=torch.Generator().manual_seed(1)
        )
        config = roundpipe.RoundPipeRunConfig(num_microbatch=request.microbatches, recompute_grain=request.grain)
        self.followed = request.way == "followed"
        if self.followed:
            self.model = roundpipe.wrap_model_to_roundpipe(model, model_run_config=config)
            self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-5, weight_decay=0)
            self.call: dict[str, Any] = {"input_kwargs": {"input_ids": ids, "labels": ids}}
        else:
            chain = as_chain(model, _chunked_loss(request.peer))
            self.model = roundpipe.RoundPipe(chain, optim_dtype=torch.float32, model_run_config=config)
            self.optimizer = roundpipe.optim.Adam(self.model.optim_parameters(), lr=1e-5, decoupled_weight_decay=True)
            share = 1 / request.microbatches
            self.call = {"input_args": (ids, ids), "loss_fn": lambda loss, _: loss * share}
        self.losses: list[float] = []

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, is_async: bool) -> None:
        for _ in range(steps):
            self.losses.append(float(self.model.forward_backward(**self.call)))
            self.model.step(self.optimizer if self.followed else self._update, is_async=is_async)
        self.model.synchronize()


def run(request: Request) -> Result:
    """Trains in this process."""
    available_bytes = psutil.virtual_memory().available
    trainer = _Trainer(request)
    result = Result(parameters=trainer.parameters, losses=trainer.losses)
    for mode in request.modes:
        trainer.train(request.warm_up, mode == "async")
        start = time.perf_counter()
        trainer.train(request.steps, mode == "async")
        seconds = time.perf_counter() - start
        result.tokens_per_s[mode] = request.steps * request.rows * request.tokens / seconds
    result.machine_bytes = available_bytes - psutil.virtual_memory().available
    result.resident_bytes = peak_resident_bytes()
    if trainer.followed:
        result.host_memory_bytes = trainer.optimizer.host_memory().total
    if torch.accelerator.is_available():
        result.device_peak_bytes = torch.accelerator.max_memory_allocated()
    elif not request.peer:
        import roundpipe

        result.device_peak_bytes = max(entry["peak_bytes"] for entry in roundpipe.devices().memory_report())
    return result


if __name__ == "__main__":
    print(json.dumps(asdict(run(Request(**json.loads(sys.argv[1]))))))
