"""Finds out how a model calls its layers, which parameters what lies around them needs, and that nothing is lost."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following import collector
from roundpipe.following.parts import (
    BOTH,
    ROWS,
    TOKENS,
    After,
    Before,
    LeafShape,
    OutputShape,
    OwnLayer,
    RecordingRun,
    Skeleton,
    Structure,
    buffers_around,
    hidden_states,
    sources_of,
)
from roundpipe.following.placeholder import CannotFollow, Op, Placeholder, recording
from roundpipe.following.program import holds_tensors
from roundpipe.following.token_wise import Candidates

_ROW_CHOICES = (3, 2, 5, 7)
_TOKEN_CHOICES = (7, 11, 5, 13, 17, 19, 23)


def find_layers(model: nn.Module) -> nn.ModuleList:
    """The module list that holds most of the model's parameters.

    Raises:
        CannotFollow: there is no module list.
    """
    sizes = [
        (sum(parameter.numel() for parameter in module.parameters()), module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
    ]
    size, layers = max(sizes, key=lambda entry: entry[0], default=(0, nn.ModuleList()))
    if size == 0:
        raise CannotFollow("it has no nn.ModuleList of layers")
    return layers


class _Watch:
    """What a plain run of the model does with its layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.order: list[int] = []
        self.returned: list[tuple[torch.Tensor, Any]] = []
        self.collected: list[dict[str, tuple[Any, ...]]] = []
        self._inputs: list[Any] = []
        self._handles = []
        for index, layer in enumerate(layers):
            self._handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._noter(index)))

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(((args, kwargs), pytree.tree_structure((args, kwargs)), collector.counts()))

    def _noter(self, index: int) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            arguments, structure, before = self._inputs.pop()
            if self._inputs:
                raise CannotFollow(f"layer {index} is called inside another layer")
            _check_shared(arguments, structure, index)
            self.order.append(index)
            self.returned.append((hidden_states(arguments), output))
            self.collected.append(collector.since(before))

        return note

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _check_shared(arguments: Any, structure: pytree.TreeSpec, layer: int) -> None:
    """Raises CannotFollow if a layer has left something in what it was called with, where it would not be seen."""
    leaves, now = pytree.tree_flatten(arguments)
    if now != structure:
        raise CannotFollow(f"layer {layer} changes a container that it is called with")
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, MutableMapping)) and holds_tensors(leaf):
            raise CannotFollow(f"layer {layer} is called with a {type(leaf).__name__} in which tensors stay")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients within the block; what it leaves on the modules is taken away after it."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, attributes in before:
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)


def sample_batch(model: nn.Module) -> dict[str, Any]:
    """A small batch for a causal language model: token ids and labels [rows, tokens]."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    rows, tokens = next(
        ((r, t) for t in _TOKEN_CHOICES for r in _ROW_CHOICES if r != t and not {r, t, r * t} & sizes), (3, 7)
    )
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(embedding.weight.shape[0])  # peft's embeddings have no num_embeddings
    ids = torch.randint(min(1, vocabulary - 1), vocabulary, (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def forced_arguments(model: nn.Module) -> dict[str, Any]:
    """What the forward is always given: no cache of keys and values, which training has no use for."""
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


def _leaf_shape(leaf: Any, like: torch.Tensor) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    rows, tokens = like.shape[:2]
    if leaf.shape == like.shape:
        sizes = [ROWS, TOKENS, *leaf.shape[2:]]
    else:
        codes = {rows: ROWS, tokens: TOKENS, rows * tokens: BOTH}
        sizes = [codes.get(size, size) for size in leaf.shape]
    return LeafShape(tuple(sizes), None if leaf.dtype == like.dtype else leaf.dtype)


def watch(structure: Structure, batch: dict[str, Any]) -> Any:
    """Runs the plain model once and notes how it calls its layers; returns the model's output."""
    watch = _Watch(structure.layers)
    candidates = [Candidates(layer) for layer in structure.layers]
    with evaluating(structure.model):
        try:
            output = structure.model(**batch)
        finally:
            watch.end()
            for candidate in candidates:
                candidate.end()
        blocks = [tuple(candidate.blocks()) for candidate in candidates]
    structure.order = watch.order
    structure.blocks = [blocks[index] for index in watch.order]
    for (like, returned), collected in zip(watch.returned, watch.collected, strict=True):
        structure.outputs.append(_shape(returned, like))
        structure.collected.append(_shape(collected, like))
    return output


def _shape(value: Any, like: torch.Tensor) -> OutputShape:
    leaves, spec = pytree.tree_flatten(value)
    return OutputShape(spec, tuple(_leaf_shape(leaf, like) for leaf in leaves))


class Uses:
    """Which parameters (by name) what lies before, between and after the layer calls needs."""

    def __init__(self, structure: Structure, batch: dict[str, Any]) -> None:
        run = RecordingRun(structure, stops=False)
        skeleton = Skeleton(structure, buffers_around(structure))
        with evaluating(structure.model), recording(run.recorder):
            output = skeleton.run(run, (), batch)
        self.before: set[str] = set()
        self.between: list[set[str]] = [set() for _ in run.calls]
        self.after = {what for kind, what in sources_of(output) if kind == "parameter"}
        seen: set[int] = set()
        for call in run.calls:
            for leaf in pytree.tree_leaves(call.arguments):
                self._visit(leaf, seen, self.before)

    def _visit(self, leaf: Any, seen: set[int], direct: set[str]) -> None:
        """Follows a value back; a parameter met directly goes to `direct`."""
        if not isinstance(leaf, Placeholder) or id(leaf) in seen:
            return
        if leaf.label is not None:
            direct.add(leaf.label)
            return
        seen.add(id(leaf))
        op: Op | None = leaf.op
        if op is None:
            return
        for argument in pytree.tree_leaves(op.arguments):
            self._visit(argument, seen, self.between[op.segment - 1] if op.glue else self.before)


def parts_of(structure: Structure, uses: Uses) -> list[tuple[str, nn.Module]]:
    """The pipeline's layers, with their names."""
    buffers = buffers_around(structure)
    in_layers = {id(p) for index in set(structure.order) for p in structure.layers[index].parameters()}
    used = uses.before.union(uses.after, *uses.between)
    # What this run did not touch may be touched by others, with other arguments.
    idle = {
        structure.names[id(parameter)]
        for parameter in structure.model.parameters()
        if id(parameter) not in in_layers and structure.names[id(parameter)] not in used
    }
    parameters = {structure.names[id(p)]: p for p in structure.model.parameters()}
    parts: list[tuple[str, nn.Module]] = [("before", Before(structure, uses.before | idle, buffers))]
    for call in range(len(structure.order)):
        own = {name: parameters[name] for name in sorted(uses.between[call])}
        parts.append((f"layer{call}", OwnLayer(structure, call, own)))
    parts.append(("after", After(structure, uses.after, buffers)))
    return parts
