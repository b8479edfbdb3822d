"""Training loops written out by hand, slow and obvious: what the pipeline has to equal bit for bit.

A batch is cut with `torch.tensor_split`; the microbatches run one after the other through the layers of a plain
model. Before each layer and before the loss, values and gradients are laid out by the documented rule. Nothing here
uses the pipeline, except to ask it for the documented seeds.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _core, devices

Seeds = list[list[int]]  # [microbatch][layer, the loss last]
Loss = Callable[[Any, Any], torch.Tensor]
BASE_SEED = 20


def cut(tree: Any, count: int) -> list[Any]:
    """`count` microbatches of a pytree: tensors with dimensions along dim 0, everything else repeated."""

    def parts(leaf: Any) -> list[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return [leaf] if count == 1 else list(torch.tensor_split(leaf, count))
        return [leaf] * count

    leaves, spec = pytree.tree_flatten(tree)
    columns = [parts(leaf) for leaf in leaves]
    return [pytree.tree_unflatten([column[m] for column in columns], spec) for m in range(count)]


def seeds_of(pipe: RoundPipe, call: int, microbatches: int) -> Seeds:
    """The seeds of one pipelined call, by the documented rule."""
    return [[pipe.layer_seed(call, m, layer) for layer in range(pipe.num_layers + 1)] for m in range(microbatches)]


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the tensor does beyond a layer boundary, by the rule of docs/exactness.md."""
    core = tensor.detach()
    for dim in range(core.dim()):
        if core.stride(dim) == 0 and core.size(dim) > 1:
            core = core.narrow(dim, 0, 1)
    span = 1 + sum((n - 1) * stride for n, stride in zip(core.shape, core.stride(), strict=True)) if core.numel() else 0
    if span > 2 * core.numel():
        copy = torch.empty_like(core)
    else:
        lead = core.data_ptr() % 64 // core.element_size()
        memory = torch.empty(lead + span, dtype=core.dtype)
        # Not a view, which a layer could not write to.
        copy = memory.new_empty(0).set_(memory.untyped_storage(), lead, core.shape, core.stride())
    copy.copy_(core)
    return copy if core.shape == tensor.shape else copy.expand_as(tensor)


class Crossing(torch.autograd.Function):
    """A layer boundary: value and gradient are laid out anew."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return laid_out(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        # Kept, so that autograd does not add other gradients into its memory.
        ctx.handed_down = laid_out(gradient)
        return ctx.handed_down


def crossed(tree: Any) -> Any:
    """The pytree beyond a layer boundary. A tensor that is in it twice is still one tensor."""
    done: dict[int, Any] = {}

    def cross(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in done:
            done[id(leaf)] = Crossing.apply(leaf) if leaf.requires_grad else laid_out(leaf)
        return done.get(id(leaf), leaf)

    return pytree.tree_map(cross, tree)


def wide(gradient: torch.Tensor) -> torch.Tensor:
    """16-bit gradients are summed in fp32."""
    return gradient.float() if gradient.dtype.itemsize < 4 else gradient


def groups_of(microbatches: int, groups: int) -> list[int]:
    """The gradient group of each microbatch."""
    parts = torch.arange(microbatches).tensor_split(min(groups, microbatches))
    return [group for group, part in enumerate(parts) for _ in part]


class GroupedSum:
    """Sums over consecutive groups, one after the other, and then over the groups."""

    def __init__(self) -> None:
        self.groups: dict[int, torch.Tensor] = {}

    def add(self, group: int, term: torch.Tensor) -> None:
        self.groups[group] = self.groups[group] + wide(term) if group in self.groups else wide(term)

    def total(self) -> torch.Tensor:
        return functools.reduce(torch.add, [self.groups[group] for group in sorted(self.groups)])


class GroupedGradients:
    """Gradients by the rule of docs/exactness.md: the first group goes on from what was there, the others begin at
    zero; their sums are added in order, and rounded once."""

    def __init__(self, layers: Iterable[nn.Module], groups: int, microbatches: int, without: Iterable[Any]) -> None:
        own = {parameter for layer in layers for parameter in layer.parameters()} - set(without)
        self.group = groups_of(microbatches, groups)
        self.sums = {parameter: GroupedSum() for parameter in own}
        for parameter, sums in self.sums.items():
            if parameter.grad is not None:
                sums.add(0, parameter.grad)
            parameter.grad = None

    def collect(self, microbatch: int) -> None:
        for parameter, sums in self.sums.items():
            if parameter.grad is not None:
                sums.add(self.group[microbatch], parameter.grad)
            parameter.grad = None

    def add(self) -> None:
        for parameter, sums in self.sums.items():
            if sums.groups:
                parameter.grad = sums.total().to(parameter.dtype)


class TiedGradients:
    """Gradients of parameters that several layers share, by the rule of docs/exactness.md: each layer has one sum over
    the microbatches, and those are added from the last layer to the first, then to what was there."""

    def __init__(self, layers: Iterable[nn.Module], groups: int = 1, microbatches: int = 1) -> None:
        self.group = groups_of(microbatches, groups)
        users: dict[nn.Parameter, list[int]] = {}
        for index, layer in enumerate(layers):
            for parameter in layer.parameters():
                users.setdefault(parameter, []).append(index)
        self.own: dict[nn.Parameter, dict[int, torch.Tensor]] = {
            parameter: {index: parameter.detach().clone().requires_grad_() for index in indices}
            for parameter, indices in users.items()
            if len(indices) > 1 and parameter.requires_grad
        }
        self.sums: dict[nn.Parameter, dict[int, GroupedSum]] = {}

    def run(self, index: int, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer, with a copy of its own of each parameter that it shares."""
        mine = {
            name: self.own[parameter][index] for name, parameter in layer.named_parameters() if parameter in self.own
        }
        return torch.func.functional_call(layer, mine, args, kwargs) if mine else layer(*args, **kwargs)

    def collect(self, microbatch: int = 0) -> None:
        """Takes the gradients of a microbatch into the sums; without groups, it need not be said which."""
        for parameter, copies in self.own.items():
            sums = self.sums.setdefault(parameter, {})
            for index, copy_ in copies.items():
                if copy_.grad is not None:
                    sums.setdefault(index, GroupedSum()).add(self.group[microbatch], copy_.grad)
                copy_.grad = None

    def total(self, parameter: nn.Parameter, before: torch.Tensor | None) -> torch.Tensor | None:
        """What the layers' sums come to, added to what was there before."""
        sums = self.sums.get(parameter, {})
        if not sums:
            return before
        together = functools.reduce(torch.add, [sums[index].total() for index in sorted(sums, reverse=True)])
        return together if before is None else before + together

    def add(self) -> None:
        """Into the shared parameters' `.grad`, once, at the end."""
        for parameter in self.own:
            total = self.total(parameter, parameter.grad)
            parameter.grad = total if total is None else total.to(parameter.dtype)


def grouped_gradients(
    layers: Sequence[nn.Module], groups: int, microbatches: int, tied: TiedGradients | None
) -> GroupedGradients | None:
    """None where the rule is what autograd does."""
    narrow = any(parameter.dtype.itemsize < 4 for layer in layers for parameter in layer.parameters())
    return GroupedGradients(layers, groups, microbatches, tied.own if tied else []) if groups > 1 or narrow else None


def run_layers(
    layers: Sequence[nn.Module], args: Any, kwargs: Any, seeds: list[int], tied: TiedGradients | None = None
) -> Any:
    def run(index: int, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(seeds[index])
        return crossed(tied.run(index, layers[index], *args, **kwargs) if tied else layers[index](*args, **kwargs))

    args, kwargs = crossed((tuple(args), kwargs))
    value = run(0, *args, **kwargs)
    for index in range(1, len(layers)):
        value = run(index, value)
    return value


def fused_loop(
    layers: Sequence[nn.Module],
    args: Any,
    kwargs: Any,
    label: Any,
    loss_fn: Loss,
    seeds: Seeds,
    by_microbatch: bool = False,
    groups: int = 1,
) -> torch.Tensor:
    """`forward_backward`: forward, loss and backward, one microbatch after the other. Returns the sum of the losses.
    `by_microbatch`: gradients of shared parameters are added microbatch by microbatch, as autograd does. `groups`: of
    gradients; with more than one, or 16-bit ones, sums are not left to autograd."""
    count = len(seeds)
    losses = []
    tied = None if by_microbatch else TiedGradients(layers, groups, count)
    grouped = grouped_gradients(layers, groups, count, tied)
    with torch.random.fork_rng(devices=[]):
        parts = zip(cut((args, kwargs), count), cut(label, count), seeds, strict=True)
        for microbatch, ((part, named), target, seed) in enumerate(parts):
            outputs = run_layers(layers, part, named, seed, tied)
            torch.manual_seed(seed[len(layers)])
            loss = loss_fn(outputs, crossed(target))
            loss.backward()
            losses.append(loss.detach())
            for sums in filter(None, (tied, grouped)):
                sums.collect(microbatch)
    for sums in filter(None, (tied, grouped)):
        sums.add()
    return sum(losses[1:], losses[0])


def split_loop(
    layers: Sequence[nn.Module],
    args: Any,
    kwargs: Any,
    label: Any,
    loss_fn: Loss,
    seeds: Seeds,
    by_microbatch: bool = False,
    groups: int = 1,
) -> torch.Tensor:
    """`loss_fn(model(batch), label).backward()`: the loss sees the merged outputs, the backward goes on microbatch by
    microbatch. `by_microbatch`, `groups`: see `fused_loop`."""
    count = len(seeds)
    parts = []
    tied = None if by_microbatch else TiedGradients(layers, groups, count)
    grouped = grouped_gradients(layers, groups, count, tied)
    with torch.random.fork_rng(devices=[]):
        for (part, named), seed in zip(cut((args, kwargs), count), seeds, strict=True):
            parts.append(pytree.tree_flatten(run_layers(layers, part, named, seed, tied)))
    merged = []
    for values in zip(*(leaves for leaves, _ in parts), strict=True):
        if isinstance(values[0], torch.Tensor):
            value = torch.cat([v.detach() for v in values]) if count > 1 else laid_out(values[0])
            merged.append(value.requires_grad_(values[0].requires_grad))
        else:
            merged.append(values[0])
    gradients: list[Any] = [None] * len(merged)
    for index, value in enumerate(merged):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            # Not .grad, which is laid out as the value is.
            value.register_hook(functools.partial(gradients.__setitem__, index))
    loss = loss_fn(pytree.tree_unflatten(merged, parts[0][1]), label)
    loss.backward()
    cut_gradients = [cut_as(g, [leaves[i] for leaves, _ in parts]) for i, g in enumerate(gradients)]
    for m, (leaves, _) in enumerate(parts):
        roots = [(leaf, cut_gradients[i][m]) for i, leaf in enumerate(leaves) if gradients[i] is not None]
        torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        for sums in filter(None, (tied, grouped)):
            sums.collect(m)
    for sums in filter(None, (tied, grouped)):
        sums.add()
    return loss.detach()


def cut_as(gradient: torch.Tensor | None, parts: list[Any]) -> list[Any]:
    if gradient is None:
        return [None] * len(parts)
    return list(gradient.split([part.shape[0] for part in parts])) if len(parts) > 1 else [gradient]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    kind = kinds[a.element_size()]
    return torch.equal(a.detach().contiguous().view(kind), b.detach().contiguous().view(kind))


def assert_same(a: Any, b: Any, what: str) -> None:
    """Pytrees of the same structure and bits."""
    leaves, spec = pytree.tree_flatten(a)
    expected, expected_spec = pytree.tree_flatten(b)
    assert spec == expected_spec, f"{what}: {spec} is not {expected_spec}"
    for index, (leaf, other) in enumerate(zip(leaves, expected, strict=True)):
        if isinstance(leaf, torch.Tensor):
            difference = (
                f"max difference {(leaf - other).abs().max()}"
                if leaf.shape == other.shape and leaf.numel() and leaf.dtype != torch.bool
                else f"{leaf.shape} {other.shape}"
            )
            assert same_bits(leaf, other), f"{what}[{index}]: {difference}"
        else:
            assert leaf == other, f"{what}[{index}]"


def assert_same_model(ours: nn.Module, theirs: nn.Module, when: str) -> None:
    """Parameters, gradients (None included) and buffers. The pipeline must be synchronised."""
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert_same(mine.detach(), other.detach(), f"{when}: {name}")
        assert (mine.grad is None) == (other.grad is None), f"{when}: {name}.grad is {mine.grad}, not {other.grad}"
        if mine.grad is not None:
            assert_same(mine.grad, other.grad, f"{when}: {name}.grad")
    for (name, mine), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert_same(mine, other, f"{when}: buffer {name}")


def plan_of(layers: int, forward_cuts: Sequence[int], backward_cuts: Sequence[int], fused: bool) -> ModelExecutePlan:
    """Stages cut before the given layers; of a fused plan, the last backward stage also runs the forward."""

    def stages(cuts: Sequence[int], end: int) -> list[range]:
        edges = [0, *[c for c in cuts if 0 < c < end], end]
        return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]

    plan = ModelExecutePlan()
    plan.bwd_plan = list(reversed(stages(backward_cuts, layers)))
    plan.fwd_plan = stages(forward_cuts, plan.bwd_plan[0].start if fused else layers)
    return plan


def shared_plan(layers: int, microbatches: int, groups: int, devices: int, *, fused: bool, seed: int = 0) -> _core.Plan:
    """Random stages, each divided among random devices: anywhere on the way up, between groups on the way down."""
    dice = random.Random(seed)
    group = groups_of(microbatches, groups)
    anywhere = list(range(1, microbatches))
    ends = [m for m in anywhere if group[m] != group[m - 1]]

    def stages(first: int, last: int) -> list[tuple[int, int]]:
        edges = [first, *sorted(dice.sample(range(first + 1, last), dice.randrange(last - first))), last]
        return list(itertools.pairwise(edges))

    jobs: list[Any] = []

    def add(phase: str, stage: tuple[int, int], at: list[int]) -> None:
        for first, last in itertools.pairwise([0, *[end for end in at if dice.random() < 0.6], microbatches]):
            jobs.append((phase, *stage, first, last, dice.randrange(devices), len(jobs) / 1000))

    head = dice.randrange(1, layers) if fused else layers
    for stage in stages(0, head):
        add("forward", stage, anywhere)
    if fused:
        add("fused", (head, layers), ends)
    for stage in reversed(stages(0, head)):
        add("backward", stage, ends)
    return _core.Plan(layers, microbatches, devices, 0, jobs)


class Pair:
    """The same model in the pipeline and as plain layers, trained side by side."""

    def __init__(self, model: nn.Sequential, loss_fn: Loss, optimizer: str = "sgd", **pipe_options: Any) -> None:
        self.plain = copy.deepcopy(model)
        self.model = model
        self.pipe = RoundPipe(model, name="pair", **pipe_options)
        self.loss_fn = loss_fn
        # Layers that are the same module stay the same module.
        self.layers = list(self.plain)
        make = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        }[optimizer]
        self.optimizer = make([p for p in self.pipe.optim_parameters() if p.requires_grad])
        self.plain_optimizer = make([p for p in self.plain.parameters() if p.requires_grad])

    def train(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        label: Any = None,
        *,
        microbatches: int = 1,
        fused: bool = True,
        steps: int = 2,
        calls: int = 1,
        config: RoundPipeRunConfig | None = None,
        after_call: Callable[[], None] | None = None,
    ) -> None:
        """Trains both and compares losses, gradients, parameters and buffers."""
        kwargs = kwargs or {}
        options = copy.copy(config) or RoundPipeRunConfig()
        options.num_microbatch = microbatches
        by_microbatch, groups = options.tied_grad_accumulation == "microbatch", options.gradient_groups or 1
        for step in range(steps):
            for call in range(calls):
                seeds = seeds_of(self.pipe, self.pipe.calls, microbatches)
                if fused:
                    loss = self.pipe.forward_backward(args, kwargs, label, self.loss_fn, run_config=options)
                    expected = fused_loop(self.layers, args, kwargs, label, self.loss_fn, seeds, by_microbatch, groups)
                else:
                    total = self.loss_fn(self.pipe(*args, roundpipe_run_config=options, **kwargs), label)
                    total.backward()
                    loss = total.detach()
                    expected = split_loop(self.layers, args, kwargs, label, self.loss_fn, seeds, by_microbatch, groups)
                assert_same(loss, expected, f"step {step} call {call}: loss")
                if after_call:
                    after_call()
            self.pipe.synchronize()
            assert_same_model(self.model, self.plain, f"step {step}")

            def update() -> None:
                self.optimizer.step()
                self.optimizer.zero_grad()

            self.pipe.step(update, is_async=False)
            self.plain_optimizer.step()
            self.plain_optimizer.zero_grad()
            self.pipe.synchronize()
            assert_same_model(self.model, self.plain, f"after step {step}")


def use_devices(count: int, options: str = "debug") -> None:
    devices(f"virtual:{count},{options}" if options else f"virtual:{count}")
