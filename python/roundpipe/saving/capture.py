"""The state of a training at one moment: which tensors it has, under which names, and everything beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from roundpipe import _core
from roundpipe.call.run_config import resolve
from roundpipe.compatibility import package_version
from roundpipe.device.pool import devices
from roundpipe.distributed.ranks import Ranks
from roundpipe.model.facade import ModelFacade
from roundpipe.model.published_attributes import source_of_names
from roundpipe.saving.names import ModelNames, names_of
from roundpipe.saving.random_states import random_states
from roundpipe.step.fused_optimizer import BoundOptimizer
from roundpipe.step.fused_steps import FusedSteps
from roundpipe.step.scaler import GradScaler
from roundpipe.step.torch_steps import TorchSteps

WEIGHTS, BUFFERS, PREVIOUS, OPTIMIZER, GRADIENTS = "model", "buffers", "previous", "optimizer", "gradients"


@dataclass
class Capture:
    """The state of a training, some of it still in motion. Of several ranks, the first has what is whole, and each has
    what only it has.

    Attributes:
        names: of the model's contents.
        contents: what is written; complete after `finish`.
        size: how many processes train together.
        state: for `state.json`: what is the same on all ranks.
        own_state: what only this rank has; `state` itself for a process that trains alone.
        snapshot: of a fused optimizer's blocks.
        late: completes `state` once the queued steps are over.
    """

    names: ModelNames
    rank: int = 0
    size: int = 1
    state: dict[str, Any] = field(default_factory=dict)
    own_state: dict[str, Any] = field(default_factory=dict)
    snapshot: _core.Snapshot | None = None
    late: list[tuple[_core.FunctionRun, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.contents = _core.Contents(self.rank, self.size, self.names.adapter is not None)
        self.encoder, self.own_encoder = self.contents.encoder, self.contents.own_encoder
        if self.size == 1:
            self.own_state = self.state

    def finish(self) -> None:
        """Waits for what is in motion, and completes the contents. Not on the caller's thread.

        Raises:
            Exception: whatever a running step or call raised; there is no state to save then.
        """
        for update, complete in self.late:
            update.wait()
            update.result()
            complete()
        if self.snapshot is not None:
            counters, strides = self.contents.take_snapshot()
            if self.size > 1:
                self.own_state["strides"] = strides
            self.own_state["counters"] = counters
        self.contents.set_states(self.state, self.own_state)

    # -- what is taken on the caller's thread -----------------------------------------------------------------------

    def take_fused(self, group: FusedSteps, optimizer: Any, memory: _core.SnapshotMemory) -> None:
        """Takes the state of a fused optimizer and what it trains, without waiting for a step."""
        binding = group.binding
        hypers = optimizer.hyperparameters_by_parameter()
        places = []
        for name, parameter in self.names.parameters.items():
            moments = optimizer.names_of_state(hypers[parameter], parameter) if parameter in hypers else []
            places.append((*binding.place(parameter), name, self.names.file_name(name), moments))
        self.state["optimizer"] = self._groups(optimizer, optimizer.format_name)
        if self.size > 1:
            trained = {name: parameter for name, parameter in self.names.parameters.items() if parameter in hypers}
            self.own_state["ranges"] = {name: list(binding.shard(parameter)) for name, parameter in trained.items()}
            self.own_state["strides"] = {}
        self.snapshot = _core.Snapshot.of(binding, memory, with_weights=self.rank == 0)
        self.contents.set_snapshot(self.snapshot, places)
        for name, parameter in self.names.parameters.items():
            if self.rank == 0 and not binding.trains_beside(parameter) and name not in self.names.outside:
                self.contents.add(WEIGHTS, self.names.file_name(name), parameter.detach())
        self._take_shown_gradients()

    def take_torch(self, group: TorchSteps, optimizer: torch.optim.Optimizer | None) -> None:
        """Takes the state of torch's optimizer and what it trains. REQUIRES: no step function is running."""
        group.take_writes()
        # A model's own parameters may still show weights from before those that calls read.
        read: dict[int, torch.Tensor] = {}
        for pipeline in group.models.pipelines:
            for block, values in zip(pipeline.block_parameters(), pipeline.weights_read_by_calls(), strict=True):
                read.update((id(parameter), value) for parameter, value in zip(block, values, strict=True))
        unpublished = group.unpublished
        for name, parameter in self.names.parameters.items():
            if name in self.names.outside:
                continue
            weights = read.get(id(parameter), parameter.detach())
            copy = group.copy_of(parameter)
            if copy is None:
                if self.rank == 0:
                    self.contents.add(WEIGHTS, self.names.file_name(name), weights)
                continue
            self.contents.add(WEIGHTS, self.names.file_name(name), weights, copy.detach())
            self.contents.add(OPTIMIZER, f"{name}/copy", copy.detach())
            if unpublished:
                self.contents.add(PREVIOUS, name, weights)
            if copy.landed_grad is not None:
                self.contents.add(OPTIMIZER, f"{name}/copy_grad", copy.landed_grad)
        if optimizer is not None:
            entry = self._groups(optimizer, "torch")
            entry["state_dict"] = self.encoder.encode(optimizer.state_dict()["state"], "optimizer", copies=False)
            self.state["optimizer"] = entry
        self._take_shown_gradients()
        if group.models.has_gradients():
            group.models.drain()
            by_id = self.names.by_id()
            shown = {name for name, parameter in self.names.parameters.items() if parameter.grad is not None}
            for pipeline in group.models.pipelines:
                for block, sums in zip(pipeline.block_parameters(), pipeline.summed_gradients(), strict=True):
                    for parameter, gradient in zip(block, sums, strict=True):
                        name = by_id[id(parameter)]
                        if gradient is not None and name not in shown:
                            self.contents.add(GRADIENTS, name, gradient)

    def _take_shown_gradients(self) -> None:
        for name, parameter in self.names.parameters.items():
            if parameter.grad is not None:
                self.contents.add(GRADIENTS, name, parameter.grad.detach().clone())

    def _groups(self, optimizer: torch.optim.Optimizer, moments: str) -> dict[str, Any]:
        names = self.names.by_id()
        groups = []
        for index, options in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in options.items() if key not in ("params", "param_names")}
            groups.append(
                {
                    "options": self.encoder.encode(plain, f"optimizer.param_groups[{index}]"),
                    "params": [names.get(id(parameter)) for parameter in options["params"]],
                }
            )
        return {"class": type(optimizer).__name__, "moments": moments, "param_groups": groups}

    def take_scaler(self, scaler: GradScaler) -> None:
        """Takes a scaler's state after the queued steps."""
        resume = scaler.resume_state()
        state: dict[str, Any] = {}

        def read() -> bool:
            state.update(scaler.state_dict())
            return False

        def complete() -> None:
            self.state["scaler"] = self.encoder.encode({"state": state, "resume": resume}, "scaler")

        self.late.append((_core.after_step_functions(read), complete))

    def take_schedulers(self, schedulers: Sequence[Any]) -> None:
        """Encodes the states of learning-rate schedulers."""
        self.state["lr_schedulers"] = [
            _encoded(self.encoder, value, f"lr_schedulers[{index}]") for index, value in enumerate(schedulers)
        ]

    def take_objects(self, objects: Mapping[str, Any]) -> None:
        """Encodes objects with a `state_dict`, or plain values, by name."""
        self.own_state["state"] = {
            name: _encoded(self.own_encoder, value, f"state.{name}") for name, value in objects.items()
        }


def _encoded(encoder: _core.StateEncoder, value: Any, path: str) -> dict[str, Any]:
    if hasattr(value, "state_dict"):
        return {"state_dict": encoder.encode(value.state_dict(), path)}
    return {"value": encoder.encode(value, path)}


def begin(model: ModelFacade, step: int, ranks: Ranks) -> Capture:
    """Takes what every checkpoint has: names, buffers, counters, random states, configuration and versions."""
    names = names_of(model)
    capture = Capture(names, ranks.rank, ranks.size)
    group = model._step_group
    for pipeline in group.models.pipelines:
        pipeline.wait_buffers()
    for name, buffer in names.buffers.items():
        apart = names.adapter is not None or ranks.rank > 0
        capture.contents.add(BUFFERS if apart else WEIGHTS, names.file_name(name), buffer.detach().clone())
    capture.own_state.update(
        pipelines={
            path: {
                "calls": pipe._pipeline.calls,
                "random_seed": pipe._pipeline.random_seed,
                "num_microbatch": _microbatches(pipe),
                "chunk_logit_bytes": chunk_logit_bytes(pipe),
                "arithmetic": arithmetic_of(pipe),
            }
            for path, pipe in group.models.pipes()
        },
        random=capture.own_encoder.encode(random_states(), "random"),
    )
    if group.joint is not None:
        capture.own_state["loss_counts"] = group.joint.counts.state()
    capture.state.update(
        step=step,
        steps=group.steps,
        versions=_versions(),
        devices=len(devices()),
        fp16_accumulation=devices().fp16_accumulation,
        dtypes={name: str(parameter.dtype).removeprefix("torch.") for name, parameter in names.parameters.items()},
        outside={
            name: _core.sampled_checksum(parameter)
            for name, parameter in names.parameters.items()
            if name in names.outside
        },
        tied=dict(_tied(model, names)),
    )
    for name, text in _configurations(source_of_names(model), names.adapter).items():
        capture.contents.add_file(name, text)
    return capture


def _tied(model: ModelFacade, names: ModelNames) -> Iterator[tuple[str, str]]:
    first = names.by_id()
    for name, parameter in model._step_group.models.named_parameters():
        if first[id(parameter)] != name:
            yield name, first[id(parameter)]


def _microbatches(pipe: Any) -> int | None:
    """The number of microbatches in force; None while it is still to be chosen."""
    config = resolve(None, pipe._run_config, devices=len(devices()), chosen=pipe._auto_microbatches)
    return None if config.num_microbatch_is_open else config.num_microbatch


def chunk_logit_bytes(pipe: Any) -> int | None:
    """Bytes of logits in a chunk of the loss; None if it does not choose its chunks."""
    followed = object.__getattribute__(pipe, "__dict__").get("_language_model")
    return None if followed is None else followed.chunk_logit_bytes(devices().torch_devices[0])


def arithmetic_of(pipe: Any) -> str | None:
    """In which what is native of a followed model computes; None for others."""
    followed = object.__getattribute__(pipe, "__dict__").get("_language_model")
    return None if followed is None else followed.arithmetic


def _versions() -> dict[str, str]:
    found = {"roundpipe": package_version(), "torch": torch.__version__, "python": sys.version.split()[0]}
    for package in ("transformers", "peft"):
        if package in sys.modules:
            try:
                found[package] = version(package)
            except PackageNotFoundError:
                continue
    return found


def _configurations(source: Any, adapter: str | None) -> dict[str, str]:
    """The files by which transformers, or peft, recognises the folder."""
    if adapter is not None:
        config = source.peft_config[adapter].to_dict()
        config["inference_mode"] = True
        plain = {key: _plain(value) for key, value in config.items()}
        return {"adapter_config.json": json.dumps(plain, indent=2, sort_keys=True)}
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(source, transformers.PreTrainedModel):
        return {}
    config = source.config.to_diff_dict()
    config["architectures"] = [type(source).__name__]
    config["dtype"] = str(source.dtype).removeprefix("torch.")
    files = {"config.json": json.dumps(config, indent=2, sort_keys=True)}
    if getattr(source, "generation_config", None) is not None:
        files["generation_config.json"] = source.generation_config.to_json_string()
    return files


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def optimizer_kind(model: ModelFacade, optimizer: Any) -> str | None:
    """Returns "fused", "torch" or None for the optimizer that is to be saved or loaded with a model.

    Raises:
        ValueError: it is no optimizer, or not this model's.
    """
    group = model._step_group
    if optimizer is None:
        if isinstance(group, FusedSteps):
            raise ValueError(
                "[checkpoint] the model has a roundpipe.optim optimizer and none was given, expected it as the third "
                "argument, since its state belongs to the training"
            )
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"[checkpoint] optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    if isinstance(group, FusedSteps):
        if not isinstance(optimizer, BoundOptimizer) or optimizer.binding is not group.binding:
            raise ValueError(
                "[checkpoint] the optimizer was not made for this model (or another one was made since), expected the "
                "one that steps it"
            )
        return "fused"
    if group.nodes is not None:
        raise ValueError(
            f"[checkpoint] {type(optimizer).__name__} of torch does not step a model that {group.nodes.size} nodes "
            "train, expected an optimizer of roundpipe.optim, or none"
        )
    return "torch"
