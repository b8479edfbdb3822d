"""Other systems that train the model as transformers has it, each with the settings in which it is at its best.

All have the same loss in chunks, and 16-bit weights wherever they move. Which of a layer's activations are made again
in the backward is asked for with each lap.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from support.chunked_losses import best_chunked_loss
from support.language_models import WithLoss
from support.ports import free_port
from support.trainers import Trainer
from support.training_request import Request
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """A layer whose activations are made again, or not, as `trainer.recompute` says when it runs."""

    def __init__(self, layer: nn.Module, trainer: Trainer) -> None:
        super().__init__()
        self.layer = layer
        self._trainer = [trainer]  # no module, and no cycle that modules walk

    def forward(self, hidden: torch.Tensor, **more: Any) -> Any:
        how = self._trainer[0].recompute
        if how == "none":
            return self.layer(hidden, **more)
        if how == "layers":
            return checkpoint(self.layer, hidden, **more, use_reentrant=False)
        # Only what a reentrant checkpoint saves goes through the hooks that move it to the host.
        with torch.autograd.graph.save_on_cpu(pin_memory=hidden.device.type != "cpu"):
            return checkpoint(lambda value: self.layer(value, **more), hidden, use_reentrant=True)


class PeerTrainer(Trainer):
    """What they share."""

    def make_with_loss(self, dtype: torch.dtype) -> WithLoss:
        """The model with its chunked loss, its decoder layers recomputed as asked."""
        model = self.make_model(dtype)
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = Recomputed(layer, self)
        return WithLoss(model, best_chunked_loss(self.device)[1])

    def batches(self) -> list[torch.Tensor]:
        return list(self.ids().to(self.device).tensor_split(self.microbatches))


class Masters:
    """fp32 copies of 16-bit weights, and torch's fused AdamW over them, where the weights are."""

    def __init__(self, parameters: list[torch.Tensor], lr: float) -> None:
        self._parameters = parameters
        self._masters = [local(parameter).detach().float() for parameter in parameters]
        self.optimizer = torch.optim.AdamW(self._masters, lr=lr, weight_decay=0, fused=True)

    def step(self) -> None:
        """Updates the weights, and drops their gradients."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            master.grad = local(parameter.grad).float()
            parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                master.grad = None
                local(parameter).copy_(master)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


class MastersTrainer(PeerTrainer):
    """A loop over microbatches and an optimizer over masters: `_model` and `_masters` are made by those who derive."""

    _model: Any
    _masters: Masters

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._masters.optimizer]

    def _train(self, steps: int, is_async: bool) -> None:
        require_sync(is_async)
        batches = self.batches()
        for _ in range(steps):
            total = torch.zeros((), device=self.device)
            for index, ids in enumerate(batches):
                self.before_microbatch(is_last=index == len(batches) - 1)
                loss = self._model(ids) / len(batches)
                loss.backward()
                total += loss.detach()
            self.before_step()
            self._masters.step()
            self.losses.append(float(total))

    def before_microbatch(self, is_last: bool) -> None: ...

    def before_step(self) -> None: ...


class PlainTrainer(MastersTrainer):
    """A loop with everything on the card: 16-bit weights, fp32 masters and moments. The limit where they fit."""

    def __init__(self, request: Request, expect: bool = False) -> None:
        super().__init__(request, expect)
        self._model = self.make_with_loss(self.dtype).to(self.device)
        self._masters = Masters(list(self._model.parameters()), self.learning_rate)


class Fsdp2Trainer(MastersTrainer):
    """torch's fully_shard with its CPUOffloadPolicy on one process: weights, masters and moments on the host.

    Each decoder layer is sharded by itself. Gradients of a step's microbatches are summed in fp32 on the device and go
    to the host once. Weights have 16 bits, so that half as much is uploaded; their masters are beside FSDP2.
    """

    def __init__(self, request: Request, expect: bool = False) -> None:
        super().__init__(request, expect)
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = dist.get_default_backend_for_device(self.device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        whole = self.make_with_loss(self.dtype)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type != "cpu"),
        }
        for layer in whole.model.model.layers:
            fully_shard(layer, **options)
        self._model = fully_shard(whole, **options)
        # What is no parameter is not moved by it.
        for buffer in whole.buffers():
            buffer.data = buffer.data.to(self.device)
        self._masters = Masters(list(whole.parameters()), self.learning_rate)

    def before_microbatch(self, is_last: bool) -> None:
        self._model.set_requires_gradient_sync(is_last)

    def before_step(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # gradients on their way to the host


class Zero3Trainer(PeerTrainer):
    """DeepSpeed's ZeRO stage 3 with parameters and optimizer on the host, on one process, by its own CPU Adam."""

    def __init__(self, request: Request, expect: bool = False) -> None:
        super().__init__(request, expect)
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        import deepspeed

        model = self.make_with_loss(self.dtype)
        pinned = self.device.type != "cpu"
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": request.microbatches,
                "bf16": {"enabled": self.dtype == torch.bfloat16, "check_grad_overflow": False},
                "zero_optimization": {
                    "stage": 3,
                    "overlap_comm": True,
                    "contiguous_gradients": True,
                    "offload_param": {"device": "cpu", "pin_memory": pinned},
                    "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
                },
                "optimizer": {"type": "AdamW", "params": {"lr": self.learning_rate, "weight_decay": 0.0}},
            },
        )

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._engine.optimizer]

    def _train(self, steps: int, is_async: bool) -> None:
        require_sync(is_async)
        self._engine.set_train_batch_size(self.microbatches)  # in its microbatches, of one row by its own account
        for _ in range(steps):
            total = torch.zeros((), device=self.device)
            for ids in self.batches():
                loss = self._engine(ids)
                self._engine.backward(loss)
                self._engine.step()
                total += loss.detach() / self.microbatches
            self.losses.append(float(total))


class TrainStreamTrainer(PeerTrainer):
    """TrainStream: weights on the card as far as they fit, gradients and AdamW on the host. One microbatch a step."""

    def __init__(self, request: Request, expect: bool = False) -> None:
        super().__init__(request, expect)
        import trainstream

        model = self.make_with_loss(self.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0)
        # "auto" would leave the host out of it where the model fits: that is the plain loop's row.
        self._model, self._optimizer = trainstream.wrap(
            *(model, optimizer), device=self.device, offload=True, blocks=list(model.model.model.layers)
        )
        for buffer in self._model.buffers():
            buffer.data = buffer.data.to(self.device)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._optimizer]

    def _train(self, steps: int, is_async: bool) -> None:
        require_sync(is_async)
        if self.microbatches != 1:
            raise ValueError("[trainers] TrainStream was told of one backward a step, expected 1 microbatch")
        (ids,) = self.batches()
        for _ in range(steps):
            loss = self._model(ids)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(float(loss))
        torch.accelerator.synchronize()


PEERS: dict[str, type[PeerTrainer]] = {
    "plain": PlainTrainer,
    "fsdp2": Fsdp2Trainer,
    "zero3": Zero3Trainer,
    "trainstream": TrainStreamTrainer,
}


def require_sync(is_async: bool) -> None:
    if is_async:
        raise ValueError("[trainers] only RoundPipe has asynchronous steps, expected mode sync")
