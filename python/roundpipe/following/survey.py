"""Surveys a model: how it calls its layers, which parameters the code around them needs, and that nothing is lost."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PretrainedConfig, PreTrainedModel

from roundpipe.following import collector
from roundpipe.following.call_shapes import OutputShape, hidden_states
from roundpipe.following.parts import After, Before, Ends, OwnLayer, RecordingRun, buffers_around
from roundpipe.following.placeholder import WITHOUT_VALUES, CannotFollow, Op, Placeholder
from roundpipe.following.program import holds_tensors
from roundpipe.following.sample_batches import vocabulary_of
from roundpipe.following.skeleton import FollowedModel, Skeleton
from roundpipe.following.towers import towers_of
from roundpipe.ops.token_wise import Candidates

_ROW_CHOICES = (3, 2, 5, 7)
_TOKEN_CHOICES = (7, 11, 5, 13, 17, 19, 23)


def find_layers(model: nn.Module, but: Iterable[nn.Module] = ()) -> nn.ModuleList:
    """The module list that holds most of the model's parameters.

    Args:
        but: lists with any of these modules do not count.

    Raises:
        CannotFollow: there is no module list.
    """
    passed_over = set(map(id, but))
    sizes = [
        (sum(parameter.numel() for parameter in module.parameters()), module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and not any(id(inner) in passed_over for inner in module.modules())
    ]
    size, layers = max(sizes, key=lambda entry: entry[0], default=(0, nn.ModuleList()))
    if size == 0:
        raise CannotFollow("it has no nn.ModuleList whose layers its forward calls")
    return layers


# A module list with less than this share of the largest list's parameters is not a separate stack of layers.
_LEAST_SHARE = 1 / 8


def find_stacks(model: nn.Module, but: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The layers of a model: the elements of its outermost module lists, for an encoder and a decoder alike.

    Args:
        but: modules that are not called.

    Raises:
        CannotFollow: there is no module list.
    """
    least = _LEAST_SHARE * sum(parameter.numel() for parameter in find_layers(model, but).parameters())
    layers: dict[int, nn.Module] = {}

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and sum(p.numel() for p in child.parameters()) >= least:
                for layer in child:
                    if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
                        look(layer)
                    elif next(layer.parameters(), None) is not None:
                        layers[id(layer)] = layer
            else:
                look(child)

    look(model)
    return list(layers.values())


class _Watch:
    """Records what a plain run of the model does with its layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.order: list[int] = []
        self.returned: list[tuple[Any, Any]] = []
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
            hidden_states(arguments)
            self.order.append(index)
            self.returned.append((arguments, output))
            self.collected.append(collector.since(before))

        return note

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _check_shared(arguments: Any, structure: pytree.TreeSpec, layer: int) -> None:
    """Raises CannotFollow if a layer left something in its arguments where it would not be seen."""
    leaves, now = pytree.tree_flatten(arguments)
    if now != structure:
        raise CannotFollow(f"layer {layer} changes a container that it is called with")
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, MutableMapping)) and holds_tensors(leaf):
            raise CannotFollow(f"layer {layer} is called with a {type(leaf).__name__} that keeps tensors")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients within the block; afterwards removes what the block left on the modules."""
    before = [(changed, dict(changed.__dict__)) for changed in (*model.modules(), *_configurations(model))]
    model.eval()
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None  # compiled code gives the same values other bits
    try:
        with torch.no_grad():
            yield
    finally:
        for changed, attributes in before:
            for name in changed.__dict__.keys() - attributes.keys():
                del changed.__dict__[name]
            changed.__dict__.update(attributes)


def _configurations(model: nn.Module) -> Iterator[Any]:
    """The objects in which a forward may note things, such as the kind of problem that the labels belong to."""
    seen: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            seen[id(config)] = config
    yield from seen.values()


def sample_batch(model: nn.Module) -> dict[str, Any]:
    """A small batch for a causal language model: token ids and labels [rows, tokens]."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    rows, tokens = next(
        ((r, t) for t in _TOKEN_CHOICES for r in _ROW_CHOICES if r != t and not {r, t, r * t} & sizes), (3, 7)
    )
    generator = torch.Generator().manual_seed(0)
    vocabulary = vocabulary_of(model)
    ids = torch.randint(min(1, vocabulary - 1), vocabulary, (rows, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def forced_arguments(model: nn.Module, inner: nn.Module) -> dict[str, Any]:
    """Arguments that the forward is always given: no cache of keys and values, which training does not need.

    Args:
        model: the called model.
        inner: the transformers model in it.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    # Other models would pass it on to functions that do not know it.
    knows = any(
        isinstance(module, PreTrainedModel) and "use_cache" in inspect.signature(module.forward).parameters
        for module in inner.modules()
    )
    return {"use_cache": False} if "use_cache" in parameters or (takes_more and knows) else {}


def watch(followed: FollowedModel, batch: dict[str, Any]) -> Any:
    """Runs the plain model once and records how it calls its layers; returns the model's output."""
    watch = _Watch(followed.layers)
    candidates = [Candidates(layer) for layer in followed.layers]
    with evaluating(followed.model):
        try:
            output = followed.model(**batch)
        finally:
            watch.end()
            for candidate in candidates:
                candidate.end()
        blocks = [tuple(candidate.blocks()) for candidate in candidates]
    _keep_called(followed, watch.order)
    followed.blocks = [blocks[index] for index in watch.order]
    for (arguments, returned), collected in zip(watch.returned, watch.collected, strict=True):
        followed.outputs.append(OutputShape.of(returned, arguments))
        followed.collected.append(OutputShape.of(collected, arguments))
    return output


def _keep_called(followed: FollowedModel, order: list[int]) -> None:
    """Drops layers that were not called: they belong to the code around the others."""
    called = sorted(set(order))
    followed.layers = [followed.layers[index] for index in called]
    followed.order = [called.index(index) for index in order]


class Uses:
    """The parameters (by name) that the code before, between and after the layer calls needs.

    Attributes:
        before: used before the first call.
        between: by call: those in its arguments, and those used after it until the next call.
        ends: the origins of the output.
        ends_in_values: whether the origins are unknown because code after the last call reads values.
    """

    def __init__(self, followed: FollowedModel, batch: dict[str, Any]) -> None:
        run = RecordingRun(followed, stops=False)
        skeleton = Skeleton(followed, buffers_around(followed))
        self.ends_in_values = False
        with evaluating(followed.model):
            try:
                output = skeleton.run(run, (), batch)
            except (*WITHOUT_VALUES, ValueError):
                if not run.recorder.ended:
                    raise
                # Code after the last layer needs values, which it has when it really runs.
                output, self.ends_in_values = None, True
        self.before: set[str] = set()
        self.between: list[set[str]] = [set() for _ in run.calls]
        self.ends = Ends(output, len(run.calls))
        seen: set[int] = set()
        for index, call in enumerate(run.calls):
            for leaf in pytree.tree_leaves(call.arguments):
                self._visit(leaf, seen, self.between[index] if index else self.before)
        for _, segment, number, _ in (made for made in self.ends.made if made[0] == "op"):
            op = next(op for op in run.recorder.ops if op.glue and (op.segment, op.number) == (segment, number))
            for result in op.results:
                self._visit(result, seen, self.before)

    def _visit(self, leaf: Any, seen: set[int], direct: set[str]) -> None:
        """Traces a value back; a parameter met directly goes to `direct`."""
        if not isinstance(leaf, Placeholder):
            return
        if leaf.label is not None:
            is_late = any(kind == "late" for kind, _ in leaf.origins)
            (direct if is_late else self.before).add(leaf.label)
            return
        if id(leaf) in seen:
            return
        seen.add(id(leaf))
        ops: list[Op] = [*([] if leaf.op is None else [leaf.op]), *leaf.writers]
        for op in ops:
            for argument in pytree.tree_leaves(op.arguments):
                self._visit(argument, seen, self.between[op.segment - 1] if op.segment else self.before)


def find_early_ends(followed: FollowedModel, uses: Uses) -> None:
    """Sets `followed.ends_early`, which says which modules are no towers, and which parameters the end needs again."""
    # Parameters beside towers, such as the line break between rows of a picture, count even if this run did not use
    # them: the outputs may hold what they were used for.
    beside = _idle(followed, uses, towers_of(followed.model, followed.layers))
    followed.ends_early = frozenset(uses.ends.early | beside)


def _idle(followed: FollowedModel, uses: Uses, towers: Iterable[nn.Module]) -> set[str]:
    """The parameters outside of the layers and these towers that this run did not use. Others may use them, with other
    arguments."""
    inside = [*(followed.layers[index] for index in set(followed.order)), *towers]
    not_around = {id(parameter) for module in inside for parameter in module.parameters()}
    around = {followed.names[id(p)] for p in followed.model.parameters() if id(p) not in not_around}
    return around.difference(uses.before, uses.ends.late, uses.ends.early, *uses.between)


def parts_of(followed: FollowedModel, uses: Uses, towers: Mapping[int, nn.Module]) -> list[tuple[str, nn.Module]]:
    """The pipeline's layers, with their names. REQUIRES: `find_early_ends` came before.

    Args:
        towers: the parts after the layers of towers that are cut, by the number of the tower.
    """
    buffers = buffers_around(followed)
    parameters = {followed.names[id(p)]: p for p in followed.model.parameters()}
    modules = followed.towers()
    idle = _idle(followed, uses, [modules[number] for number in towers])
    after = uses.ends.late | followed.ends_early
    if uses.ends_in_values:
        after, idle = after | idle, set()
    parts: list[tuple[str, nn.Module]] = [("before", Before(followed, uses.before | idle, buffers, towers))]
    for call in range(len(followed.order)):
        own = {name: parameters[name] for name in sorted(uses.between[call])}
        parts.append((f"layer{call}", OwnLayer(followed, call, own)))
    parts.append(("after", After(followed, after, buffers)))
    return parts
