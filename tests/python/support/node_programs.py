"""What nodes run in tests: each function is called on every rank of a process group."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe
from fused_reference import squared_error
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig
from roundpipe.data.batches import Batches
from roundpipe.data.collate import collate, count_label_tokens
from roundpipe.data.node_batches import NodeBatches
from roundpipe.distributed import joint_training
from roundpipe.distributed.groups import control_beside, timeout_of

WIDTH = 32  # torch's own vector tails round otherwise, so sizes are multiples of 16
RATES = {"lr": 1e-2, "weight_decay": 0.02}


def rank() -> int:
    """0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


# -- messages ---------------------------------------------------------------------------------------------------------


def _control() -> roundpipe._core.Control:
    group = torch.distributed.group.WORLD
    return control_beside(group, timeout_of(group))


def exchange(messages: list[list[bytes]]) -> list[list[bytes]]:
    """What a rank gets in each exchange of `messages[exchange][rank]`."""
    control = _control()
    return [control.exchange(each[rank()]) for each in messages]


def exchange_with_a_silent_rank(silent: int, how: int) -> list[str]:
    """The errors of two exchanges in which a rank ends, or stops, by the signal `how`."""
    control = _control()
    control.exchange(b"")
    if rank() == silent:
        os.kill(os.getpid(), how)
    errors = []
    for _ in range(2):
        try:
            control.exchange(b"")
        except roundpipe.RoundPipeError as error:
            errors.append(str(error))
    return errors


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One training. The rows of a step are `rows[rank]`, in each of `calls[rank]` calls; 0 calls are a node without
    rows."""

    size: int
    width: int = WIDTH
    dtype: torch.dtype = torch.float32
    devices: int = 1
    is_async: bool = True
    steps: int = 3
    microbatches: int = 2
    layers: int = 3
    rows: tuple[int, ...] = (4, 4, 4, 4)
    calls: tuple[int, ...] = (1, 1, 1, 1)
    max_grad_norm: float | None = None
    clip_by: str = "norm"
    scaled: bool = False
    infinite: tuple[tuple[int, int], ...] = ()  # (step, rank) whose loss is infinite
    frozen: bool = False
    tied: bool = False
    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()  # of the optimizer
    loss_factor: float = 1.0
    other_weights: bool = False  # on ranks but the first

    def model(self) -> nn.Sequential:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.GELU()) for _ in range(self.layers)]
        model = nn.Sequential(*layers).to(self.dtype)
        if self.frozen:
            model[1].requires_grad_(False)
            model[0][0].bias.requires_grad_(False)
        if self.tied:
            model.append(model[0])
        return model

    def batch(self, step: int, node: int, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * node + call)
        shape = 2, self.rows[node], self.width
        inputs, label = torch.randn(shape, generator=generator).to(self.dtype)
        return inputs, label

    def factor(self, step: int, node: int) -> float:
        """Of the loss."""
        return float("inf") if (step, node) in self.infinite else self.loss_factor


def train(training: Training, reached: Callable[[str, int], None] = lambda moment, step: None) -> dict[str, Any]:
    """Trains, and returns the losses, the norms, the steps that were skipped, the loss scales, and the weights.

    Args:
        reached: called with the moment, "call", "step" or "stepped", and the step's number.
    """
    roundpipe.devices(f"virtual:{training.devices},debug")
    model = training.model()
    if training.other_weights and rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    config = RoundPipeRunConfig(num_microbatch=training.microbatches)
    pipe = RoundPipe(model, name="nodes", model_run_config=config, check_loss=False)
    optimizer = getattr(roundpipe.optim, training.optimizer)(pipe, **RATES, **dict(training.options))
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2) if training.scaled else None
    said: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": []}
    for step in range(training.steps):
        factor = training.factor(step, rank())

        def loss_fn(outputs: torch.Tensor, label: torch.Tensor, factor: float = factor) -> torch.Tensor:
            loss = squared_error(outputs, label) * factor
            return loss if scaler is None else scaler.scale(loss)

        reached("call", step)
        for call in range(training.calls[rank()]):
            inputs, label = training.batch(step, rank(), call)
            said["losses"].append(float(pipe.forward_backward((inputs,), label=label, loss_fn=loss_fn)))
        if scaler is not None:
            said["scales"].append(scaler.get_scale())
        reached("step", step)
        made = pipe.step(
            optimizer,
            training.is_async,
            max_grad_norm=training.max_grad_norm,
            scaler=scaler,
            clip_by=training.clip_by,
        )
        reached("stepped", step)
        if scaler is not None or training.max_grad_norm is not None:
            said["norms"].append(float(made))
            said["skipped"].append(made.skipped)
    pipe.synchronize()
    said["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return said


def train_all(trainings: list[Training]) -> list[dict[str, Any]]:
    """One training after the other."""
    return [train(training) for training in trainings]


def train_with_a_silent_rank(training: Training, silent: int, how: int | list[str], at: tuple[str, int]) -> str:
    """The error of a training in which a rank falls silent at a moment of a step: it ends or stops itself by the signal
    `how`, or cuts its network by that command."""

    def reached(moment: str, step: int) -> None:
        if (rank(), moment, step) != (silent, *at):
            return
        if isinstance(how, int):
            os.kill(os.getpid(), how)
        else:
            subprocess.run(how, check=True)

    try:
        train(training, reached)
    except roundpipe.RoundPipeError as error:
        return str(error)
    return "no error"


def held_bytes(width: int, layers: int, **formats: Any) -> tuple[int, int, int]:
    """The number of parameters of a bf16 model; the bytes that this node holds of it and of AdamW, as told; and by how
    much the process has grown. `formats`: AdamW's."""

    def private() -> int:
        with open("/proc/self/smaps_rollup") as rollup:
            kinds = {line.split(":")[0]: int(line.split()[1]) for line in rollup if line.endswith("kB\n")}
        return 1024 * (kinds["Private_Dirty"] + kinds["Private_Clean"])

    roundpipe.devices("virtual:1,memory=250MB")
    before = private()
    model = nn.Sequential(*[nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers)])
    pipe = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    optimizer = roundpipe.optim.AdamW(pipe, **RATES, **formats)
    for _ in range(2):
        pipe.forward_backward(
            (torch.ones(1, width, dtype=torch.bfloat16),), label=None, loss_fn=lambda out, _: out.sum()
        )
        pipe.step(optimizer, is_async=formats.get("gradients") != "at_once")
    pipe.synchronize()
    memory = optimizer.host_memory()
    told = memory.weights_and_gradients + memory.masters + memory.moments
    return memory.parameters, told, private() - before


def held_bytes_at_once(width: int, layers: int) -> tuple[int, int, int]:
    return held_bytes(width, layers, gradients="at_once")


# -- programs that differ ---------------------------------------------------------------------------------------------


def _pipe(layers: int = 2, dtype: torch.dtype = torch.float32, **options: Any) -> RoundPipe:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]).to(dtype)
    return RoundPipe(model, **options)


def _frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank():
        model[1].requires_grad_(False)
    RoundPipe(model)


def _tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank():
        model[1].weight = model[0].weight
    RoundPipe(model)


def _other_strides() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if rank():
        model[1].weight.data = model[1].weight.data.t().contiguous().t()
    RoundPipe(model)


def _other_version() -> None:
    if rank():
        joint_training.package_version = lambda: "0.0.7"
    _pipe()


def _stepped(**options: Any) -> None:
    """A step whose optimizer or options differ."""
    pipe = _pipe()
    mine = {name: values[rank()] for name, values in options.items()}
    made = {name: mine.pop(name) for name in ("lr", "moments", "masters", "gradients", "kind") if name in mine}
    optimizer = made.pop("kind", roundpipe.optim.AdamW)(pipe, **{"lr": 0.1, **made})
    if "late_lr" in mine:
        optimizer.param_groups[0]["lr"] = mine.pop("late_lr")
    pipe.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.step(optimizer, **mine)


def _measured() -> None:
    pipe = _pipe()
    optimizer = roundpipe.optim.SGD(pipe, lr=0.1, gradients="at_once")
    pipe.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.measure_gradients(optimizer)


def _changed_late(change: Callable[[nn.Module], None]) -> None:
    """Two steps: before the first, both ranks change their models alike, and before the second, one rank alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = RoundPipe(model)
    optimizer = roundpipe.optim.SGD(pipe, lr=0.1)
    for ranks in ((0, 1), (1,)):
        pipe.synchronize()
        if rank() in ranks:
            change(model)
        pipe.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.step(optimizer)
        model.requires_grad_(True)


def _models_in_another_order() -> None:
    for name in ("first", "second")[:: -1 if rank() else 1]:
        _pipe(name=name)


def _another_number_of_models() -> None:
    pipe = _pipe()
    if rank():
        roundpipe.optim.SGD(pipe, lr=0.1)
    else:
        _pipe()


def _torch_optimizer() -> None:
    pipe = _pipe()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def _step_function() -> None:
    _pipe().step(lambda: None)


def _optim_parameters() -> None:
    list(_pipe().optim_parameters())


def _state_dict() -> None:
    roundpipe.optim.SGD(_pipe(), lr=0.1).state_dict()


def _load_state_dict() -> None:
    roundpipe.optim.SGD(_pipe(), lr=0.1).load_state_dict({})


def _running_norm(norm: nn.Module) -> None:
    pipe = RoundPipe(nn.Sequential(nn.Linear(4, 4), norm))
    pipe.step(roundpipe.optim.SGD(pipe, lr=0.1))


def _wrong_group() -> None:
    _pipe(process_group="gloo")


def _foreign_group() -> None:
    group = torch.distributed.new_group([0])
    if rank():
        _pipe(process_group=group)
    raise ValueError("rank 0 is in it")


def _destroyed_group() -> None:
    pipe = _pipe()
    roundpipe.optim.SGD(pipe, lr=0.1)
    group = torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
    _pipe(process_group=group)


def _other_mapped_file() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(torch.full((16,), float(rank())).numpy().tobytes())
        file.flush()
        weight = roundpipe._core.map_file(file.name).view(torch.float32).view(4, 4)
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        RoundPipe(nn.Sequential(layer, nn.Linear(4, 4)))


class NoExchange(torch.distributed.ProcessGroup):
    """A backend that lacks what a step needs."""

    def __init__(self, store: Any, group_rank: int, size: int, timeout: Any) -> None:
        super().__init__(group_rank, size)


def _lame_backend() -> None:
    torch.distributed.Backend.register_backend("lame", NoExchange, devices=["cpu"])
    group = torch.distributed.new_group(backend="lame")
    _pipe(process_group=group)


WRONG = {
    "layers": lambda: _pipe(2 + rank()),
    "dtypes": lambda: _pipe(dtype=(torch.float32, torch.bfloat16)[rank()]),
    "frozen": _frozen,
    "tied": _tied,
    "strides": _other_strides,
    "version": _other_version,
    "order": _models_in_another_order,
    "number": _another_number_of_models,
    "torch optimizer": _torch_optimizer,
    "step function": _step_function,
    "optim_parameters": _optim_parameters,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    "batch norm": lambda: _running_norm(nn.BatchNorm1d(4)),
    "instance norm": lambda: _running_norm(nn.InstanceNorm1d(4, track_running_stats=True)),
    "wrong group": _wrong_group,
    "foreign group": _foreign_group,
    "destroyed group": _destroyed_group,
    "mapped file": _other_mapped_file,
    "lame backend": _lame_backend,
    "lr": lambda: _stepped(lr=(0.1, 0.2)),
    "late lr": lambda: _stepped(late_lr=(0.1, 0.2)),
    "kind": lambda: _stepped(kind=(roundpipe.optim.AdamW, roundpipe.optim.Adam)),
    "moments": lambda: _stepped(moments=("float32", "8bit")),
    "masters": lambda: _stepped(masters=("float32", "24bit")),
    "gradients": lambda: _stepped(gradients=("weights", "at_once"), is_async=(False, False)),
    "clip_by": lambda: _stepped(
        gradients=("at_once", "at_once"),
        is_async=(False, False),
        max_grad_norm=(math.inf, math.inf),
        clip_by=("last_norm", "norm"),
    ),
    "two passes": lambda: _stepped(
        gradients=("at_once", "at_once"),
        is_async=(False, False),
        max_grad_norm=(1.0, 1.0),
        clip_by=("measured_norm", "measured_norm"),
    ),
    "measure_gradients": _measured,
    "frozen late": lambda: _changed_late(lambda model: model[1].requires_grad_(False)),
    "written late": lambda: _changed_late(lambda model: nn.init.ones_(model[1].weight)),
    "is_async": lambda: _stepped(is_async=(True, False)),
    "max_grad_norm": lambda: _stepped(max_grad_norm=(None, 1.0)),
}


def error_of(name: str) -> str:
    """What a program of `WRONG` raises."""
    roundpipe.devices("virtual:1")
    try:
        WRONG[name]()
    except (ValueError, roundpipe.RoundPipeError) as error:
        return str(error)
    return "no error"


def differing_batches(seeds: list[int]) -> str:
    """The error of batches with another seed on each node."""
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), name="model")
    samples = [{"input_ids": list(range(4))} for _ in range(4)]
    batches = Batches(samples, batch_tokens=8, max_length=4, pad_token_id=0, seed=seeds[rank()])
    try:
        list(NodeBatches(model, batches))
    except ValueError as error:
        return str(error)
    return "no error"


def shared_batches(packed: bool, taken: int) -> tuple[list[Any], dict[str, Any]]:
    """This node's rows of batches after the first `taken`, and the position then."""
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), name="model")
    samples = [{"input_ids": list(range(1, 2 + number))} for number in range(1, 9)]
    batches = NodeBatches(model, Batches(samples, batch_tokens=20, max_length=9, pad_token_id=0, packed=packed, seed=3))
    iterator = iter(batches)
    for _ in range(taken):
        next(iterator)
    again = NodeBatches(model, Batches(samples, batch_tokens=20, max_length=9, pad_token_id=0, packed=packed, seed=3))
    again.load_state_dict(batches.state_dict())
    return list(again), again.state_dict()


# -- losses over the tokens of all nodes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Batches of a language model: `lengths[rank][call]` are the lengths of a call's rows. `items` gives the calls
    `num_items_in_batch`."""

    lengths: tuple[tuple[tuple[int, ...], ...], ...]
    items: bool = False
    microbatches: int = 1

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).train()

    def batches(self, node: int) -> list[dict[str, Any]]:
        texts = torch.Generator().manual_seed(node)
        made = [
            collate([{"input_ids": torch.randint(64, (length,), generator=texts)} for length in call], pad_token_id=0)
            for call in self.lengths[node]
        ]
        if self.items:
            count = sum(count_label_tokens(batch["labels"]) for batch in made)
            made = [{**batch, "num_items_in_batch": count} for batch in made]
        return made


def train_on_tokens(tokens: Tokens) -> dict[str, Any]:
    """Makes a step, and returns the losses and the weights."""
    roundpipe.devices("virtual:1,debug")
    model = tokens.model()
    config = RoundPipeRunConfig(num_microbatch=tokens.microbatches)
    pipe = roundpipe.wrap_model_to_roundpipe(model, model_run_config=config)
    optimizer = roundpipe.optim.SGD(pipe, lr=1.0)
    losses = [float(pipe.forward_backward(input_kwargs=batch)) for batch in tokens.batches(rank())]
    pipe.step(optimizer, is_async=False)
    pipe.synchronize()
    return {"losses": losses, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


def _own_loss(pipe: Any, **more: Any) -> None:
    pipe.forward_backward(input_kwargs={**SHORT.batches(rank())[0], **more})


def _users_loss(pipe: Any) -> None:
    pipe.forward_backward(input_kwargs=SHORT.batches(rank())[0], loss_fn=lambda outputs, _: outputs.loss)


def _both_on_a_rank(pipe: Any) -> None:
    _own_loss(pipe)
    _users_loss(pipe)


def _both_on_two_ranks(pipe: Any) -> None:
    (_own_loss, _users_loss)[rank()](pipe)


def _backward(pipe: Any) -> None:
    pipe(**SHORT.batches(rank())[0]).loss.backward()


def _both_ways_on_a_rank(pipe: Any) -> None:
    _own_loss(pipe)
    _backward(pipe)


def _both_ways_on_two_ranks(pipe: Any) -> None:
    (_own_loss, _backward)[rank()](pipe)


def _items_on_a_rank(pipe: Any) -> None:
    _own_loss(pipe, **({"num_items_in_batch": 4} if rank() else {}))


def _items_of_all_ranks(pipe: Any) -> None:
    _own_loss(pipe, num_items_in_batch=sum(count_label_tokens(SHORT.batches(r)[0]["labels"]) for r in range(2)))


def _failed_call(pipe: Any) -> None:
    with suppress(IndexError):
        _own_loss(pipe, **({"input_ids": torch.full((1, 7), 64)} if rank() else {}))


SHORT = Tokens((((5,),), ((7,),)))
WRONG_LOSSES = {
    "both on a rank": _both_on_a_rank,
    "both on two ranks": _both_on_two_ranks,
    "both ways on a rank": _both_ways_on_a_rank,
    "both ways on two ranks": _both_ways_on_two_ranks,
    "items on a rank": _items_on_a_rank,
    "items of all ranks": _items_of_all_ranks,
    "failed call": _failed_call,
}


def go_on_after(name: str) -> dict[str, Any]:
    """What a step of `WRONG_LOSSES` raises, and the weights after a good step that follows."""
    roundpipe.devices("virtual:1,debug")
    model = SHORT.model()
    pipe = roundpipe.wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    optimizer = roundpipe.optim.SGD(pipe, lr=1.0)
    error = "no error"
    try:
        WRONG_LOSSES[name](pipe)
        pipe.step(optimizer, is_async=False)
    except (ValueError, roundpipe.RoundPipeError) as raised:
        error = str(raised)
    optimizer.zero_grad()
    _own_loss(pipe)
    pipe.step(optimizer, is_async=False)
    pipe.synchronize()
    return {"error": error, "weights": {name: p.detach().clone() for name, p in model.named_parameters()}}


# -- other ways to wrap -----------------------------------------------------------------------------------------------


def _one_step(pipe: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = roundpipe.optim.SGD(pipe, lr=0.1)
    pipe.forward_backward((torch.full((2, 4), 1.0 + rank()),), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.step(optimizer)
    pipe.synchronize()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def members_of_a_group() -> tuple[int, int] | None:
    """The node's rank and how many there are, for a model of ranks 0 and 2."""
    roundpipe.devices("virtual:1")
    group = torch.distributed.new_group([0, 2])
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = RoundPipe(model, process_group=False if rank() == 1 else group)
    _one_step(pipe, model)
    found = roundpipe.distributed.nodes_of(pipe)
    return None if found is None else (found.rank, found.size)


def members_of_overlapping_groups() -> list[tuple[int, int]]:
    """The node's rank and how many there are, for models of ranks 0 and 1, and then of ranks 1 and 2."""
    roundpipe.devices("virtual:1")
    found = []
    for ranks in ([0, 1], [1, 2]):
        group = torch.distributed.new_group(ranks)
        if rank() in ranks:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            pipe = RoundPipe(model, process_group=group)
            _one_step(pipe, model)
            nodes = roundpipe.distributed.nodes_of(pipe)
            assert nodes is not None
            found.append((nodes.rank, nodes.size))
    return found


def connections_after_trainings(folder: str) -> list[int]:
    """How many files are open after each of some trainings that were saved, whose models are gone. The last one has
    two optimizers."""
    roundpipe.devices("virtual:1")
    found = []
    for training, optimizers in enumerate((1, 1, 2)):
        pipe = _pipe()
        for _ in range(optimizers):
            optimizer = roundpipe.optim.SGD(pipe, lr=0.1)
        pipe.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.square().mean())
        pipe.step(optimizer)
        roundpipe.save_checkpoint(folder, pipe, optimizer, step=training + 1, wait=True)
        del pipe, optimizer
        gc.collect()
        found.append(_open_files())
        torch.distributed.barrier()  # connections to a node that has ended close
    return found


def _open_files() -> int:
    """Without the group's store, a file that the ranks' signs of life open again and again."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself, or closed since
            count += not os.readlink(f"/proc/self/fd/{number}").endswith("/store")
    return count


class OnTheHost(nn.Module):
    """A model whose root, with a parameter of its own, runs on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("shift", torch.randn(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value)
        return value * self.scale + self.shift


def wrapped_part_by_part() -> dict[str, torch.Tensor]:
    """The weights after a step; each rank begins with others."""
    roundpipe.devices("virtual:1")
    torch.manual_seed(rank())
    model = OnTheHost()
    pipe = roundpipe.wrap_model_to_roundpipe(model, upper_threshold=100)
    assert isinstance(pipe, roundpipe.AutoRoundPipe)
    return {**_one_step(pipe, model), "shift": model.shift.clone()}


def adapters_added_late(targets: list[str]) -> dict[str, torch.Tensor]:
    """The adapters after a step; each rank draws others."""
    import peft

    roundpipe.devices("virtual:1")
    pipe = roundpipe.wrap_model_to_roundpipe(SHORT.model())
    torch.manual_seed(rank())
    adapted = peft.get_peft_model(pipe, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    optimizer = roundpipe.optim.AdamW(adapted, lr=0.1)
    _own_loss(pipe)
    pipe.step(optimizer)
    pipe.synchronize()
    return {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
