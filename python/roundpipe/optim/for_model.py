"""Optimizers that take a model in the pipeline instead of parameters."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from roundpipe import _core
from roundpipe.model.facade import facade_in
from roundpipe.model.memory.budget import budget_of
from roundpipe.model.memory.host import HostMemory
from roundpipe.model.published_attributes import source_of_names
from roundpipe.model.step.fused_optimizer import (
    MOMENTS,
    BoundOptimizer,
    DiskHolds,
    Formats,
    Gradients,
    Masters,
    Moments,
    core_rule,
)
from roundpipe.optim.parameter_groups import parameter_groups

# Names in a state_dict of the part of the fp32 master that a weight lacks: all of it for fp16.
_REMAINDERS = {torch.int16: "master_remainder", torch.int8: "master_remainder", torch.float32: "master"}


class ForModel(BoundOptimizer):
    """Lets a torch optimizer take a RoundPipe model as its first argument; put it before the torch optimizer among the
    bases. `model.step(optimizer)` then updates the model's layers in place.

    Args:
        params: a model in the pipeline, or any value that the torch optimizer takes.
        *args: the torch optimizer's arguments.
        groups: with a model: one dict for each group of parameters that has its own options. "params" is a name or
            a pattern like "*.bias", a compiled regular expression, a function (name, parameter) -> bool, a parameter,
            or a list of these; the other entries are options of the optimizer.
        decay_norms_and_biases: with a model: False sets `weight_decay` to 0 for norms and biases, as transformers'
            Trainer does, except in groups that set `weight_decay`.
        moments: with a model: "8bit" keeps the moments of Adam and AdamW in one byte each.
        masters: with a model: "24bit" keeps what the fp32 masters of bf16 weights have beyond them in one byte each,
            not two: masters are then rounded by chance to 24 bits, with their exact values as the mean.
        gradients: with a model: "float32" keeps the gradients of 16-bit weights in fp32 on the host, to sum them over
            several calls before a step. "at_once" uses each gradient as soon as it is on the host and has room for
            those of a few layers only: each `forward_backward` is then followed by `model.step(optimizer,
            is_async=False)`, without a scaler, and with another `clip_by` than "norm" if gradients are clipped.
        disk: with a model: a folder on a disk that holds the moments for which there is no memory. What is written
            there is gone with the process. The bits are the same.
        disk_memory: with `disk`: what the moments, and the masters with "masters", may take of host memory, such as
            "20GB"; None: the least with which the disk and the updates work side by side, three times those of the
            largest layer.
        disk_holds: with `disk`: "masters" lets it hold what the fp32 masters have beyond 16-bit weights as well: less
            host memory, and more that each step reads and writes.
        **kwargs: the torch optimizer's arguments.

    Raises:
        ValueError: a group matches no parameter, a parameter is in two groups, or an option does not fit.
    """

    counters: ClassVar[dict[str, float | None]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = next((b for b in cls.__mro__[1:] if "__init__" in vars(b) and not issubclass(b, ForModel)), None)
        if base is None or base is torch.optim.Optimizer:
            return
        taken = list(inspect.signature(base).parameters.values())
        ours = inspect.signature(ForModel.__init__).parameters.values()
        added = [p for p in ours if p.kind is inspect.Parameter.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([*taken, *added])  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Any,
        *args: Any,
        groups: Iterable[dict[str, Any]] | None = None,
        decay_norms_and_biases: bool = True,
        moments: Moments = "float32",
        masters: Masters = "float32",
        gradients: Gradients = "weights",
        disk: str | os.PathLike[str] | None = None,
        disk_memory: int | str | None = None,
        disk_holds: DiskHolds = "moments",
        **kwargs: Any,
    ) -> None:
        self.binding: _core.ModelOptimizer | None = None
        model = facade_in(params)
        formats = Formats(moments, masters, gradients)
        if model is None:
            on_disk = disk or disk_memory or disk_holds != "moments"
            if groups is not None or not decay_norms_and_biases or formats != Formats() or on_disk:
                raise ValueError(
                    "[optim] groups, decay_norms_and_biases, moments, masters, gradients and disk are for a RoundPipe "
                    f"model, and the first argument is a {type(params).__name__}; wrap the model, or give torch's "
                    "parameter groups"
                )
            super().__init__(params, *args, **kwargs)
            return
        formats.check()
        if disk is not None and not os.fspath(disk).strip():
            raise ValueError(f"[optim] disk is {disk!r}, expected a folder on a disk, or None for all in memory")
        self.disk = _core.DiskOptions(
            "" if disk is None else os.fspath(disk), budget_of(disk_memory, "disk_memory") or 0, disk_holds
        )
        named = model._step_group.models.trainable_parameters()
        if not named:
            raise ValueError("[optim] the model has no trainable parameter; set requires_grad of what is to be trained")
        modules = source_of_names(model).modules()
        super().__init__(parameter_groups(named, groups, decay_norms_and_biases, modules), *args, **kwargs)
        self.state.clear()
        for index, options in enumerate(self.param_groups):
            unknown = set(options) - set(self.defaults) - {"params"}
            if unknown:
                raise ValueError(
                    f"[optim] groups[{index}] has {', '.join(map(repr, sorted(unknown)))}, expected options of "
                    f"{type(self).__name__}: {', '.join(self.defaults)}"
                )
            if options.get("differentiable"):
                raise ValueError("[optim] differentiable=True is not for a RoundPipe model; give False")
        self.format_name = moments
        self.core_format = MOMENTS[moments]
        for hyper in self.core_groups():
            _core.state_names(self.algorithm, hyper, self.core_format, (1,))
        nodes = model._step_group.nodes
        model._step_group.models.fused.require_room(
            f"the model with {type(self).__name__}",
            core_rule(self, formats),
            [options["params"] for options in self.param_groups],
            1 if nodes is None else nodes.size,
        )
        self._group = model._bind_optimizer(self, formats)
        self.binding = self._group.binding

    def hyperparameters_by_parameter(self) -> dict[torch.nn.Parameter, _core.Hyperparameters]:
        """The current hyperparameters of each parameter in the groups."""
        return {
            parameter: hyper
            for group, hyper in zip(self.param_groups, self.core_groups(), strict=True)
            for parameter in group["params"]
        }

    def host_memory(self) -> HostMemory:
        """The host memory of the model and this optimizer; gradients count once the first ones have landed.

        Raises:
            ValueError: the optimizer was not made for a RoundPipe model.
        """
        if self.binding is None:
            raise ValueError("[optim] host_memory() is for an optimizer that was made for a RoundPipe model")
        size = self.binding.host_bytes(self.core_groups())
        return HostMemory(
            size.parameters,
            size.weights_and_gradients,
            size.masters,
            size.moments,
            size.moments_on_disk,
            size.masters_on_disk,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; for a model, the gradients that no step has consumed yet, without waiting."""
        if self.binding is None:
            super().zero_grad(set_to_none)
        else:
            self._group.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does; a model's optimizer gets its groups only when it is made."""
        if self.binding is not None:
            raise ValueError(
                "[optim] a model's optimizer cannot be given more parameters; make a new one with groups=..."
            )
        super().add_param_group(param_group)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state in torch's layout. For a model's 16-bit parameters it also holds the difference between fp32 master
        and weight ("master_remainder") or the master itself ("master"), so that a run resumes exactly. As in torch, the
        tensors are the ones in use: copy them before the next step, or save them at once. What is on a disk is copied
        into memory, all of it; `roundpipe.save_checkpoint` needs no room for that.

        Raises:
            ValueError: several nodes have the state together.
        """
        if self.binding is None:
            return super().state_dict()
        self._refuse_parts("state_dict")
        self._group.synchronize()
        self.state = defaultdict(dict)
        for group, hyper in zip(self.param_groups, self.core_groups(), strict=True):
            for parameter in group["params"]:
                kept, remainder = self.binding.state(parameter)
                entry = self.state[parameter]
                if kept.tensors or kept.scalars.step:
                    for name in self.counters_of(hyper):
                        entry[name] = torch.tensor(getattr(kept.scalars, name), dtype=torch.float32)
                    entry.update(zip(self.names_of_state(hyper, parameter), kept.tensors, strict=True))
                if remainder is not None:
                    entry[_REMAINDERS[remainder.dtype]] = remainder
                if not entry:
                    del self.state[parameter]
        packed = super().state_dict()
        if self.binding.last_norm is not None:
            packed["last_norm"] = self.binding.last_norm
        self.state = defaultdict(dict)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does. For a model's optimizer, load the model's weights first. Without masters in the
        state (torch's own format), training resumes from the weights.

        Raises:
            ValueError: the state does not fit, or several nodes have the state together; nothing has been changed.
        """
        if self.binding is None:
            super().load_state_dict(state_dict)
            return
        self._refuse_parts("load_state_dict")
        self._group.synchronize()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(saved) != len(parameters):
            raise ValueError(
                f"[optim] the state has {len(saved)} parameters, expected {len(parameters)}; load one that was saved "
                "for this model and these groups"
            )
        entries = [state_dict["state"].get(index, {}) for index in saved]
        states = dict(zip(parameters, entries, strict=True))
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        try:
            hypers = self.hyperparameters_by_parameter()
            for parameter, hyper in hypers.items():
                self._unpacked(parameter, states[parameter], hyper, check_only=True)
        except ValueError:
            self.param_groups = before
            raise
        with torch.no_grad():
            # Replaces states one by one, so that memory never holds two whole states.
            for parameter, hyper in hypers.items():
                self.binding.set_state(parameter, *self._unpacked(parameter, states[parameter], hyper))
                dtype = self.binding.remainder_dtype(parameter)
                if dtype is None:
                    continue
                name = _REMAINDERS[dtype]
                if name in states[parameter]:
                    self.binding.set_remainder(parameter, states[parameter][name])
                else:
                    self.binding.restart_master(parameter)
        self.binding.last_norm = state_dict.get("last_norm")
        self.binding.accept_weights()

    def _refuse_parts(self, what: str) -> None:
        nodes = self._group.nodes
        if nodes is not None:
            raise ValueError(
                f"[optim] {what}() of an optimizer of {nodes.size} nodes, each of which has a part of the state, "
                "expected one that has all of it; use roundpipe.save_checkpoint and load_checkpoint instead"
            )

    def counters_of(self, hyper: _core.Hyperparameters) -> dict[str, float | None]:
        """The numbers that a group's parameters have as state, see `counters`."""
        return self.counters

    def names_of_state(self, hyper: _core.Hyperparameters, parameter: torch.Tensor) -> list[str]:
        """The names of a parameter's state tensors, in the engine's order."""
        return _core.state_names(self.algorithm, hyper, self.core_format, tuple(parameter.shape))

    def _unpacked(
        self, parameter: torch.Tensor, state: dict[str, Any], hyper: _core.Hyperparameters, check_only: bool = False
    ) -> tuple[_core.Scalars, list[torch.Tensor]]:
        """Checks a saved state and returns it in new tensors; `check_only` leaves out their values."""
        scalars = _core.Scalars()
        names = self.names_of_state(hyper, parameter)
        present = [name for name in names if state.get(name) is not None]
        if not present and not state.get("step"):
            return scalars, []
        if len(present) != len(names):
            raise ValueError(
                f"[optim] the state of a parameter of shape {tuple(parameter.shape)} has {', '.join(state)}, expected "
                f"{', '.join(names)}; load one that the same kind of optimizer has saved"
            )
        counters = self.counters_of(hyper)
        for name in counters:
            setattr(scalars, name, float(state[name]))
        if not counters:
            scalars.step = 1.0  # a momentum buffer exists, so there was a step
        made = _core.make_state(self.algorithm, hyper, self.core_format, parameter).tensors
        for name, tensor in zip(names, made, strict=True):
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"[optim] {name} of a parameter of shape {tuple(parameter.shape)} is {tuple(state[name].shape)}, "
                    f"expected {tuple(tensor.shape)}; load the state of this model"
                )
            if not check_only:
                tensor.copy_(state[name])
        return scalars, made
