"""What a model with a fused optimizer has to equal bit for bit: a loop over plain layers and fp32 masters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe
from reference_loops import Seeds, TiedGradients, assert_same, run_layers, seeds_of
from roundpipe import RoundPipe, RoundPipeRunConfig


def nearest(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights of an fp32 master: bf16 rounds ties away from zero, fp16 to even."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.detach().contiguous().view(torch.int32) + 0x8000
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """() fp32, summed in fp64."""
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()


def squared_error(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return ((outputs.float() - label.float()) ** 2).mean()


class PlainTraining:
    """Plain layers with torch's optimizer over fp32 masters, trained on the batches of one node or of several.

    The gradients of several nodes are added in fp32 in the order of the nodes, multiplied by a factor, and rounded.

    Args:
        model: the layers; changed.
        make_optimizer: takes the masters with their names.
        microbatches: of each call.
        nodes: how many there are.
    """

    def __init__(
        self,
        model: nn.Sequential,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        microbatches: int = 2,
        nodes: int = 1,
    ) -> None:
        self.model = model
        self.microbatches = microbatches
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float().clone()) for _, p in self.named]
        self.optimizer = make_optimizer([(name, m) for (name, _), m in zip(self.named, self.masters, strict=True)])
        self.read = [m.detach().clone() for m in self.masters]  # what calls read
        self.made = [m.detach().clone() for m in self.masters]  # the newest
        self.nodes = nodes
        self.last_norm: torch.Tensor | None = None
        self._start_over()

    def _start_over(self) -> None:
        # For each node, gradients as they are on the host.
        self.sums: list[list[torch.Tensor | None]] = [[None] * len(self.masters) for _ in range(self.nodes)]

    def call(
        self,
        inputs: torch.Tensor,
        label: torch.Tensor,
        seeds: Seeds,
        factor: float = 1.0,
        scale: float = 1.0,
        node: int = 0,
    ) -> torch.Tensor:
        """One batch of a node, and its loss. `factor` multiplies the loss, and `scale` then the product."""
        with torch.no_grad():
            for (_, p), master in zip(self.named, self.read, strict=True):
                p.copy_(nearest(master, p.dtype))
        sums = [None if s is None else s.clone() for s in self.sums[node]]
        layers = list(self.model)
        tied = TiedGradients(layers)
        total = torch.zeros(())
        parts = zip(inputs.tensor_split(self.microbatches), label.tensor_split(self.microbatches), seeds, strict=True)
        for part, target, seed in parts:
            self.model.zero_grad()
            with torch.random.fork_rng(devices=[]):
                outputs = run_layers(layers, (part,), {}, seed, tied)
                torch.manual_seed(seed[-1])
                part_loss = squared_error(outputs, target) * factor * scale
                part_loss.backward()
            total = total + part_loss.detach()
            for i, (_, p) in enumerate(self.named):
                if p.grad is not None:
                    wide = p.grad.float()
                    sums[i] = wide if sums[i] is None else sums[i] + wide  # type: ignore[operator]
            tied.collect()
        sums = [tied.total(p, total) for (_, p), total in zip(self.named, sums, strict=True)]
        # Rounded once on the way to the host.
        self.sums[node] = [
            None if s is None else s.to(p.dtype).float() for (_, p), s in zip(self.named, sums, strict=True)
        ]
        return total

    def landed(self, gradient_factor: float) -> list[torch.Tensor | None]:
        """Each parameter's gradient, over all nodes."""
        if self.nodes == 1:
            return self.sums[0]
        return [self._over_nodes(i, p.dtype, gradient_factor) for i, (_, p) in enumerate(self.named)]

    def _over_nodes(self, parameter: int, dtype: torch.dtype, gradient_factor: float) -> torch.Tensor | None:
        parts = [sums[parameter] for sums in self.sums]
        if all(part is None for part in parts):
            return None
        total = torch.zeros_like(self.masters[parameter])
        for part in parts:
            total = total + (torch.zeros_like(total) if part is None else part)
        return (total * gradient_factor).to(dtype).float()

    def step(
        self,
        is_async: bool,
        max_grad_norm: float | None = None,
        scale: float | None = None,
        gradient_factor: float = 1.0,
        by_last_norm: bool = False,
    ) -> tuple[float, bool]:
        """A step; returns the gradients' norm, and whether the step was skipped. `scale`: that of the losses.
        `by_last_norm`: clips by the norm of the step before, and the first step not at all."""
        # Asynchronous calls read what was the newest before this step.
        if is_async:
            self.read = [m.clone() for m in self.made]
        landed = self.landed(gradient_factor)
        gradients = [g for g in landed if g is not None]
        if scale is not None:
            inverse = torch.tensor(1.0 / scale)
            gradients = [g * inverse for g in gradients]
        norm = norm_of(gradients) if gradients else torch.zeros(())
        skipped = scale is not None and not bool(torch.isfinite(norm))
        if max_grad_norm is not None:
            compared = self.last_norm if by_last_norm else norm
            if compared is not None:
                factor = (max_grad_norm / (compared + 1e-6)).clamp(max=1.0)
                gradients = [g * factor for g in gradients]
        self.last_norm = norm
        rest = iter(gradients)
        for master, present in zip(self.masters, landed, strict=True):
            master.grad = None if present is None else next(rest)
        if not skipped:
            self.optimizer.step()
        self._start_over()
        self.made = [m.detach().clone() for m in self.masters]
        if not is_async:
            self.read = [m.clone() for m in self.made]
        return float(norm), skipped

    def weights(self) -> dict[str, torch.Tensor]:
        """The newest, by name."""
        pairs = zip(self.named, self.masters, strict=True)
        return {name: nearest(master, p.dtype).view(p.shape) for (name, p), master in pairs}


class FusedPair:
    """The same model in the pipeline with a fused optimizer, and as plain layers with torch's over fp32 masters.

    Args:
        make: `(parameters or model, **)` -> optimizer, called with `ours` = True for the model.
    """

    def __init__(
        self,
        model: nn.Sequential,
        make_ours: Callable[[RoundPipe], torch.optim.Optimizer],
        make_theirs: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        microbatches: int = 2,
    ) -> None:
        self.plain = PlainTraining(copy.deepcopy(model), make_theirs, microbatches)
        self.theirs = self.plain.optimizer
        self.model = model
        self.pipe = RoundPipe(
            model, name="fused", model_run_config=RoundPipeRunConfig(num_microbatch=microbatches), check_loss=False
        )
        self.ours = make_ours(self.pipe)

    def call(self, inputs: torch.Tensor, label: torch.Tensor) -> None:
        """One batch through both; the losses are the same bits."""
        seeds = seeds_of(self.pipe, self.pipe.calls, self.plain.microbatches)
        loss = self.pipe.forward_backward((inputs,), label=label, loss_fn=squared_error)
        assert_same(loss, self.plain.call(inputs, label, seeds), "loss")

    def step(self, is_async: bool, schedulers: Any = (None, None), max_grad_norm: float | None = None) -> None:
        """A step of both, with the same norm. `schedulers`: ours and theirs."""
        step = self.pipe.step(self.ours, is_async, max_grad_norm=max_grad_norm, lr_scheduler=schedulers[0])
        norm, _ = self.plain.step(is_async, max_grad_norm)
        assert isinstance(step, roundpipe.Step)
        assert max_grad_norm is None or float(step) == step.item() == step.grad_norm == norm
        if schedulers[1] is not None:
            schedulers[1].step()

    def compare(self) -> None:
        """Weights and masters, bit for bit; afterwards calls of both read the newest."""
        self.pipe.synchronize()
        self.plain.read = [m.clone() for m in self.plain.made]
        own = dict(self.model.named_parameters())
        state = self.ours.state_dict()["state"]
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        index = {id(p): i for i, p in enumerate(p for g in self.ours.param_groups for p in g["params"])}
        for (name, p), master in zip(self.plain.named, self.plain.masters, strict=True):
            assert name in names
            assert_same(own[name].detach(), nearest(master, p.dtype).view(p.shape), f"weight {name}")
            kept = state.get(index[id(own[name])], {})
            if p.dtype == torch.bfloat16:
                joined = torch.empty_like(own[name], dtype=torch.float32)
                roundpipe._core.join(own[name].detach(), kept["master_remainder"], joined)
                assert_same(joined, master.detach(), f"master of {name}")
            elif p.dtype == torch.float16:
                assert_same(kept["master"], master.detach(), f"master of {name}")
