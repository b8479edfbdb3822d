"""One interface to whatever trains a language model: RoundPipe, ours or another release, and other systems.

All start from the same weights and train the same batches with AdamW in fp32, on the host but for the plain loop. A
system is imported when its trainer is made, so that its absence shows there.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from support.flops import StepFlops, step_flops
from support.language_models import WithLoss, as_chain, language_model, with_adapters
from support.training_request import Recompute, Request
from torch import nn

OUR_PACKAGE = Path(__file__).parents[2] / "python" / "roundpipe"


class Trainer(ABC):
    """A model, an optimizer and a batch, which is trained again and again.

    Attributes:
        parameters: how many numbers the model has.
        flops: of its steps.
        losses: of all steps so far.
        step_seconds: of the steps since it was last emptied, where a system says them.
        expected_loss: of the plain model for the first row, if `expect` was set.
    """

    def __init__(self, request: Request, expect: bool = False) -> None:
        self._request = request
        self._expect = expect
        self.device = accelerator() or torch.device("cpu")
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.expected_loss: float | None = None
        self.learning_rate = 1e-5
        self.recompute: Recompute = "layers"
        self.set_batch(request.rows, request.tokens, request.microbatches)

    def make_model(self, dtype: torch.dtype) -> Any:
        asked = self._request
        model = language_model(asked.shape, asked.tokens, self.dtype, self.device, asked.layers, asked.shared_base).to(
            dtype
        )
        if asked.lora_rank:
            model = with_adapters(model, asked.lora_rank)
        model.train()
        self.vocabulary = model.config.vocab_size
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops: StepFlops = step_flops(model)
        if self._expect:
            self.expected_loss = plain_loss_of(model, self.ids()[:1], self.device)
        cap_memory(asked.memory_bytes)
        return model

    def set_batch(self, rows: int, tokens: int, microbatches: int) -> None:
        """From the next step on; the same tokens for the same sizes."""
        self.rows, self.tokens, self.microbatches = rows, tokens, microbatches

    def ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocabulary, (self.rows, self.tokens), generator=generator)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Whose learning rates are set before steps."""
        return []

    def train(self, steps: int, is_async: bool) -> None:
        """That many steps, whose updates are in the weights when it returns."""
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
        self._train(steps, is_async)

    @abstractmethod
    def _train(self, steps: int, is_async: bool) -> None: ...

    def host_memory_bytes(self) -> int:
        """Of arena and optimizer by their own account; 0: they have none."""
        return 0

    def uploaded_bytes(self) -> int:
        """From the host to all devices so far, by the system's own account; 0: it has none."""
        return 0


class RoundPipeTrainer(Trainer):
    """The `roundpipe` that is first on the path. A "chain" is trained by what both releases have in common."""

    def __init__(self, request: Request, expect: bool = False) -> None:
        super().__init__(request, expect)
        import roundpipe

        if not request.peer:
            roundpipe.devices(request.device)
        elif Path(roundpipe.__file__).is_relative_to(OUR_PACKAGE):
            raise ImportError(f"[trainers] expected another release of roundpipe, got ours: {roundpipe.__file__}")
        model = self.make_model(self.dtype)
        self._config = lambda: roundpipe.RoundPipeRunConfig(
            num_microbatch=self.microbatches, recompute_grain=request.grain
        )
        self._followed = request.way == "followed"
        if self._followed:
            self._model = roundpipe.wrap_model_to_roundpipe(
                model, model_run_config=self._config(), arithmetic=request.arithmetic
            )
            self._optimizer = roundpipe.optim.AdamW(
                self._model, lr=self.learning_rate, weight_decay=0, moments=request.moments
            )
        else:
            chain = as_chain(model, _chunked_loss() if request.peer else plain_loss)
            self._model = roundpipe.RoundPipe(chain, optim_dtype=torch.float32, model_run_config=self._config())
            parameters = self._model.optim_parameters()
            self._optimizer = roundpipe.optim.Adam(parameters, lr=self.learning_rate, decoupled_weight_decay=True)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer]

    def _call(self) -> dict[str, Any]:
        ids = self.ids()
        if self._followed:
            return {"input_kwargs": {"input_ids": ids, "labels": ids}}
        share = 1 / self.microbatches
        return {"input_args": (ids, ids), "loss_fn": lambda loss, _: loss * share}

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _train(self, steps: int, is_async: bool) -> None:
        call = self._call() | {"run_config": self._config()}
        for _ in range(steps):
            start = time.perf_counter()
            self.losses.append(float(self._model.forward_backward(**call)))
            self._model.step(self._optimizer if self._followed else self._update, is_async=is_async)
            self.step_seconds.append(time.perf_counter() - start)
        self._model.synchronize()

    def host_memory_bytes(self) -> int:
        return self._optimizer.host_memory().total if self._followed else 0

    def uploaded_bytes(self) -> int:
        import roundpipe

        return (
            sum(device["uploaded_bytes"] for device in roundpipe.devices().transfer_report()) if self._followed else 0
        )


def import_system(request: Request) -> None:
    """Imports what trains `request`, which takes seconds and next to no memory. Call it before `make_trainer`."""
    if request.peer:
        only_the_path()
    modules = {"fsdp2": "torch.distributed.fsdp", "zero3": "deepspeed", "trainstream": "trainstream"}
    if request.way == "zero3" and accelerator() is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if request.way != "plain":
        importlib.import_module(modules.get(request.way, "roundpipe"))


def make_trainer(request: Request, expect: bool = False) -> Trainer:
    """The trainer of `request.way`; with `expect`, it says the plain model's loss, too."""
    if request.way in ("followed", "chain"):
        return RoundPipeTrainer(request, expect)
    from support.peer_trainers import PEERS

    return PEERS[request.way](request, expect)


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch sees, if any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def cap_memory(memory_bytes: int) -> None:
    """Caps what torch's allocator may take of the first card; nothing for 0 or without one."""
    device = accelerator()
    if memory_bytes and device is not None:
        module = torch.get_device_module(device)
        module.set_per_process_memory_fraction(min(1.0, memory_bytes / module.mem_get_info(0)[1]), 0)


@torch.no_grad()
def plain_loss_of(model: Any, ids: torch.Tensor, device: torch.device) -> float:
    """Of transformers' model, by itself on copies of its weights on `device`."""
    from support.chunked_losses import recomputed_loss

    whole = WithLoss(model.get_base_model() if hasattr(model, "get_base_model") else model, recomputed_loss)
    there = {name: tensor.to(device) for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
    loss = float(torch.func.functional_call(whole, there, (ids.to(device),)))
    del there
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return loss


def only_the_path() -> None:
    """Lets imports follow the path alone: the finder of an editable install, such as ours, would go before it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]


def plain_loss(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _chunked_loss() -> Any:
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss  # only in the peer

    return ChunkedCompileLinearForCausalLMLoss
