"""What nodes run in tests of checkpoints: each function is called on every rank of a process group."""

from __future__ import annotations

import math
import os
import resource
import signal
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe
from node_programs import Tokens
from resumable import Resumable
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig

WIDTH = 512  # a weight has four of the pieces at whose ends it may be cut
LIMIT_BYTES = 100_000  # of a file, less than any part of the optimizer's state


class Counting(nn.Module):
    """Has a buffer that depends on the rows of its own node."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.total: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total += x.detach().float().sum()
        return x


@dataclass(frozen=True)
class Kind:
    """How a training is made."""

    dtype: torch.dtype = torch.float32
    moments: str = "float32"
    masters: str = "float32"
    on_disk: bool = False  # moments and masters
    optimizer: str = "AdamW"
    is_async: bool = True
    scaled: bool = False
    calls: int = 1
    counting: bool = False


class Training(Resumable):
    """A model whose rows, dropout and position differ between the nodes."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.calls = kind, kind.calls
        roundpipe.devices("virtual:2")
        torch.manual_seed(3)
        layers: list[nn.Module] = [
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.1),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(WIDTH, 8),
        ]
        if kind.counting:
            layers.insert(0, Counting())
        config = RoundPipeRunConfig(num_microbatch=2)
        rank = torch.distributed.get_rank()
        self.model = RoundPipe(nn.Sequential(*layers).to(kind.dtype), name="nodes", model_run_config=config)
        self.model.random_seed = 100 + rank
        options: dict[str, Any] = {"moments": kind.moments, "masters": kind.masters}
        if kind.on_disk:
            # A weight is divided by its four pieces.
            one_layer = 11 * WIDTH * WIDTH * math.ceil(4 / torch.distributed.get_world_size()) // 4
            options |= {"disk": tempfile.gettempdir(), "disk_memory": one_layer, "disk_holds": "masters"}
        self.optimizer = getattr(roundpipe.optim, kind.optimizer)(self.model, lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.scaler = GradScaler("cpu", init_scale=512.0, growth_interval=2) if kind.scaled else None
        self.seen = 0
        torch.manual_seed(11 + rank)

    def call(self) -> None:
        batch = torch.randn(4, WIDTH).to(self.kind.dtype)
        scale = (lambda loss: loss) if self.scaler is None else self.scaler.scale
        self.model.forward_backward((batch,), loss_fn=lambda outputs, _: scale(outputs.float().square().mean()))
        self.seen += 1

    def step(self) -> None:
        self.model.step(
            self.optimizer,
            self.kind.is_async,
            max_grad_norm=1.0,
            scaler=self.scaler,
            lr_scheduler=self.scheduler,
        )

    def own_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "rank": torch.distributed.get_rank()}

    def take(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def state(self) -> dict[str, Any]:
        """What is whole, what this rank has of each parameter's state, and what only this rank has."""
        self.model.synchronize()
        binding = self.optimizer.binding
        parts: dict[str, tuple[int, torch.Tensor]] = {}
        counters: dict[str, float] = {}
        for name, parameter in self.model.named_parameters():
            kept, remainder = binding.state(parameter)
            first, last = binding.shard(parameter)
            tensors = dict(zip("abcd", kept.tensors, strict=False))
            if remainder is not None:
                tensors["remainder"] = remainder
            for key, tensor in tensors.items():
                parts[f"{name}/{key}"] = first, tensor.detach().reshape(-1).clone()
            if last > first:
                counters[name] = kept.scalars.step
        whole: dict[str, torch.Tensor] = {
            name: value.clone() for name, value in self.model.state_dict().items() if "total" not in name
        }
        whole["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        if self.scaler is not None:
            whole["scale"] = torch.tensor(self.scaler.get_scale())
        own = {name: value.clone() for name, value in self.model.state_dict().items() if "total" in name}
        own |= {"drawn": torch.rand(4), "seen": torch.tensor(self.seen)}
        own |= {"seed": torch.tensor(self.model.random_seed), "calls": torch.tensor(self.model.calls)}
        return {"whole": whole, "parts": parts, "counters": counters, "own": own}


def train_and_save(kind: Kind, folder: str, before: int, after: int) -> list[dict[str, Any]]:
    """Saves while it trains on. Returns the state at the save and at the end."""
    training = Training(kind)
    training.run(before)
    save = training.save(folder, snapshot_memory=1)
    training.run(after)
    end = training.state()
    save.wait()
    at_rest = Training(kind)
    at_rest.run(before)
    return [at_rest.state(), end]


def load_and_train(kind: Kind, folder: str, steps: int, strict: bool = True) -> dict[str, Any]:
    """Goes on from the newest checkpoint, in as many nodes as have saved it if `strict`. Returns the state after so
    many steps."""
    training = Training(kind)
    training.run(1)  # loading replaces whatever there is
    loaded = training.load(folder, strict=strict)
    if strict:
        assert loaded.state["rank"] == torch.distributed.get_rank()
    training.run(steps)
    return training.state()


def each_of(program: str, all_arguments: list[tuple[Any, ...]]) -> list[Any]:
    """What a function of this module returns for each of them."""
    return [globals()[program](*arguments) for arguments in all_arguments]


def save_within_a_step(kind: Kind, folder: str) -> dict[str, Any]:
    """Saves between two calls of a step, and goes on."""
    training = Training(kind)
    training.run(1)
    training.call()
    training.save(folder, wait=True)
    training.call()
    training.step()
    return training.state()


def go_on_within_a_step(kind: Kind, folder: str) -> dict[str, Any]:
    """Goes on from there."""
    training = Training(kind)
    training.load(folder)
    training.call()
    training.step()
    return training.state()


def error_of_load(kind: Kind, folder: str) -> str:
    """The error of loading the newest checkpoint."""
    training = Training(kind)
    try:
        training.load(folder)
    except (ValueError, roundpipe.RoundPipeError) as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def step_of_load(kind: Kind, folder: str) -> int:
    """The step of the newest checkpoint that is whole."""
    return Training(kind).load(folder).step


def save_with_a_limit(kind: Kind, folder: str, limited: int, is_killed: bool) -> list[str]:
    """A good save, then one for which a rank's disk is full, or in which the rank is killed while it writes. Returns
    the errors of the second and of a third one."""
    training = Training(kind)
    training.run(1)
    training.save(folder, wait=True)
    training.run(1)
    rank = torch.distributed.get_rank()
    if rank == limited:
        # The kernel ends the process that writes beyond the limit, unless the signal is ignored, as Python does.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))
    errors = []
    for _ in range(2):
        try:
            training.save(folder, wait=True)
            errors.append("")
        except (ValueError, OSError, roundpipe.RoundPipeError) as error:
            errors.append(f"{type(error).__name__} {error}")
        if is_killed:
            break
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        training.run(1)
    return errors


def _other_folders(training: Training, folder: str) -> None:
    training.save(os.path.join(folder, str(torch.distributed.get_rank())), wait=True)


def _other_steps(training: Training, folder: str) -> None:
    training.save(folder, step=5 + torch.distributed.get_rank(), wait=True)


def _other_options(training: Training, folder: str) -> None:
    training.optimizer.param_groups[0]["lr"] *= 1 + torch.distributed.get_rank()
    training.save(folder, wait=True)


def _value_without_a_format(training: Training, folder: str) -> None:
    state = {"of": object() if torch.distributed.get_rank() else 1}
    roundpipe.save_checkpoint(folder, training.model, training.optimizer, state=state, wait=True)


def _only_one_rank(training: Training, folder: str) -> None:
    if torch.distributed.get_rank() == 0:
        training.save(folder, wait=True)
    else:
        training.run(1)


def _step_that_is_there(training: Training, folder: str) -> None:
    training.save(folder, wait=True)
    training.save(folder, wait=True)


def errors_of_saves(folder: str) -> dict[str, str]:
    """The errors of wrong saves, each of a training of its own."""
    found = {}
    for save in (
        _other_folders,
        _other_steps,
        _other_options,
        _value_without_a_format,
        _only_one_rank,
        _step_that_is_there,
    ):
        training = Training(Kind())
        training.run(1)
        place = os.path.join(folder, save.__name__)
        try:
            save(training, place)
            found[save.__name__] = "no error"
        except (ValueError, roundpipe.RoundPipeError) as error:
            found[save.__name__] = f"{type(error).__name__} {error}"
    return found


def step_of_saved_gradients(folder: str, loads: bool) -> dict[str, torch.Tensor]:
    """Weights after a step of a language model whose gradients were saved before it, or were loaded."""
    roundpipe.devices("virtual:1")
    tokens = Tokens((((5,),), ((7,),)))
    model = tokens.model()
    pipe = roundpipe.wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    optimizer = roundpipe.optim.SGD(pipe, lr=1.0)
    if loads:
        roundpipe.load_checkpoint(folder, pipe, optimizer)
    else:
        for batch in tokens.batches(torch.distributed.get_rank()):
            pipe.forward_backward(input_kwargs=batch)
        roundpipe.save_checkpoint(folder, pipe, optimizer, wait=True)
    pipe.step(optimizer, is_async=False)
    pipe.synchronize()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
