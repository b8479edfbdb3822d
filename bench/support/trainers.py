"""One interface to whatever trains a language model: RoundPipe, ours or another release, and other systems.

All start from the same weights and train the same batches, full fine-tuning with AdamW in fp32 on the host, which is
what offloading is about. A system is imported when its trainer is made, so that its absence shows there.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from support.language_models import as_chain, qwen3
from support.ports import free_port
from support.training_request import Request
from torch import nn

LR = 1e-5
OUR_PACKAGE = Path(__file__).parents[2] / "python" / "roundpipe"


class Trainer(ABC):
    """A model, an optimizer and a batch, which is trained again and again.

    Attributes:
        parameters: how many numbers the model has.
        losses: of all steps so far.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.device = accelerator() or torch.device("cpu")
        cap_memory(request.memory_bytes)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.losses: list[float] = []
        self.set_batch(request.rows, request.tokens, request.microbatches)

    def make_model(self, dtype: torch.dtype) -> Any:
        model = qwen3(self._request.shape, self._request.tokens, self.dtype, self.device).to(dtype)
        self.vocabulary = model.config.vocab_size
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    def set_batch(self, rows: int, tokens: int, microbatches: int) -> None:
        """From the next step on; the same tokens for the same sizes."""
        self.rows, self.tokens, self.microbatches = rows, tokens, microbatches

    def ids(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.vocabulary, (self.rows, self.tokens), generator=generator)

    @abstractmethod
    def train(self, steps: int, is_async: bool) -> None:
        """That many steps, whose updates are in the weights when it returns."""

    def host_memory_bytes(self) -> int:
        """Of arena and optimizer by their own account; 0: they have none."""
        return 0


class RoundPipeTrainer(Trainer):
    """The `roundpipe` that is first on the path. A "chain" is trained by what both releases have in common."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if request.peer:
            only_the_path()
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
            self._model = roundpipe.wrap_model_to_roundpipe(model, model_run_config=self._config())
            self._optimizer = roundpipe.optim.AdamW(self._model, lr=LR, weight_decay=0)
        else:
            chain = as_chain(model, _chunked_loss() if request.peer else plain_loss)
            self._model = roundpipe.RoundPipe(chain, optim_dtype=torch.float32, model_run_config=self._config())
            parameters = self._model.optim_parameters()
            self._optimizer = roundpipe.optim.Adam(parameters, lr=LR, decoupled_weight_decay=True)

    def _call(self) -> dict[str, Any]:
        ids = self.ids()
        if self._followed:
            return {"input_kwargs": {"input_ids": ids, "labels": ids}}
        share = 1 / self.microbatches
        return {"input_args": (ids, ids), "loss_fn": lambda loss, _: loss * share}

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def train(self, steps: int, is_async: bool) -> None:
        call = self._call() | {"run_config": self._config()}
        for _ in range(steps):
            self.losses.append(float(self._model.forward_backward(**call)))
            self._model.step(self._optimizer if self._followed else self._update, is_async=is_async)
        self._model.synchronize()

    def host_memory_bytes(self) -> int:
        return self._optimizer.host_memory().total if self._followed else 0


class Fsdp2Trainer(Trainer):
    """torch's fully_shard with its CPUOffloadPolicy on one process: fp32 weights, gradients and moments on the host.

    Each decoder layer is checkpointed and sharded by itself. Gradients of a step's microbatches are summed on the
    device and go to the host once, and the optimizer is torch's fused AdamW, the quickest that torch has there.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = dist.get_default_backend_for_device(self.device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        model = self.make_model(torch.float32)
        checkpoint_layers(model)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type != "cpu"),
        }
        for layer in model.model.layers:
            fully_shard(layer, **options)
        self._model = fully_shard(model, **options)
        # What is no parameter is not moved by it.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0, fused=True)

    def train(self, steps: int, is_async: bool) -> None:
        require_sync(is_async)
        batches = self.ids().to(self.device).tensor_split(self.microbatches)
        for _ in range(steps):
            total = torch.zeros((), device=self.device)
            for index, ids in enumerate(batches):
                self._model.set_requires_gradient_sync(index == len(batches) - 1)
                loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
                loss.backward()
                total += loss.detach()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(float(total))


class Zero3Trainer(Trainer):
    """DeepSpeed's ZeRO stage 3 with parameters and optimizer on the host, on one process, by its own CPU Adam."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        if self.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        import deepspeed

        model = self.make_model(self.dtype)
        checkpoint_layers(model)
        pinned = self.device.type != "cpu"
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": request.microbatches,
                "bf16": {"enabled": self.dtype == torch.bfloat16},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "cpu", "pin_memory": pinned},
                    "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
                },
                "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
            },
        )

    def train(self, steps: int, is_async: bool) -> None:
        require_sync(is_async)
        self._engine.set_train_batch_size(self.microbatches)  # in its microbatches, of one row by its own account
        for _ in range(steps):
            total = torch.zeros((), device=self.device)
            for ids in self.ids().to(self.device).tensor_split(self.microbatches):
                loss = self._engine(input_ids=ids, labels=ids, use_cache=False).loss
                self._engine.backward(loss)
                self._engine.step()
                total += loss.detach() / self.microbatches
            self.losses.append(float(total))


def make_trainer(request: Request) -> Trainer:
    """The trainer of `request.way`."""
    kinds = {"followed": RoundPipeTrainer, "chain": RoundPipeTrainer, "fsdp2": Fsdp2Trainer, "zero3": Zero3Trainer}
    return kinds[request.way](request)


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch sees, if any."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def cap_memory(memory_bytes: int) -> None:
    """Caps what torch's allocator may take of the first card; nothing for 0 or without one."""
    device = accelerator()
    if memory_bytes and device is not None:
        module = torch.get_device_module(device)
        module.set_per_process_memory_fraction(min(1.0, memory_bytes / module.mem_get_info(0)[1]), 0)


def checkpoint_layers(model: Any) -> None:
    """Lets each decoder layer be recomputed in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)


def only_the_path() -> None:
    """Lets imports follow the path alone: the finder of an editable install, such as ours, would go before it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]


def require_sync(is_async: bool) -> None:
    if is_async:
        raise ValueError("[trainers] only RoundPipe has asynchronous steps, expected mode sync")


def plain_loss(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def _chunked_loss() -> Any:
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss  # only in the peer

    return ChunkedCompileLinearForCausalLMLoss
