"""The layers that a followed model becomes: what comes before its own layers, each of these, and what comes after."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following import collector
from roundpipe.following.lazy_logits import LazyLogits
from roundpipe.following.placeholder import CannotFollow, Placeholder, Recorder, Source, recording
from roundpipe.following.program import Compiler, LayerCall, Program, Recorded, Values
from roundpipe.following.token_loss import TokenLoss, loss_in
from roundpipe.following.token_wise import ChunkTokens, TokenWise, chunk_of, in_chunks
from roundpipe.shadow import ShadowTree

# "auto" computes the loss in chunks where float32 logits of a microbatch would take more than this.
LEAST_LOGITS_BYTES = 16 << 20

Collected = tuple[dict[str, tuple[Any, ...]], ...]
"""What the model collected inside each layer call so far, by key."""
Shared = dict[int, dict[Any, Any]]
"""What is in the mappings that layers share, by number."""
Flow = tuple[Program, Values, Shared, Collected]


class Over(BaseException):
    """The last layer has been called."""


@dataclass(frozen=True)
class LeafShape:
    """A tensor that a layer call returns.

    Attributes:
        sizes: of each dimension; ROWS, TOKENS and BOTH stand for the batch's rows, a row's tokens and their product.
        dtype: None for that of the hidden states.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype | None


ROWS, TOKENS, BOTH = -1, -2, -3


@dataclass(frozen=True)
class OutputShape:
    """What a layer call returns: a pytree whose leaves are tensors of known shapes, or plain values."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def placeholders(self, call: int, like: torch.Tensor, kind: str = "output") -> list[Any]:
        """The leaves of a call's output, tensors as placeholders.

        Args:
            call: its number.
            like: hidden states [rows, tokens, ...] of the microbatch.
            kind: of source.
        """
        rows, tokens = like.shape[:2]
        known = {ROWS: rows, TOKENS: tokens, BOTH: rows * tokens}
        device = like.shown_device if isinstance(like, Placeholder) else like.device
        made: list[Any] = []
        for index, leaf in enumerate(self.leaves):
            if not isinstance(leaf, LeafShape):
                made.append(leaf)
                continue
            meta = torch.empty([known.get(n, n) for n in leaf.sizes], dtype=leaf.dtype or like.dtype, device="meta")
            made.append(Placeholder.make(meta, device, frozenset({(kind, (call, index))})))
        return made


def _is_hidden(leaf: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() >= 3


def hidden_states(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
    """The tensor [rows, tokens, ...] that a layer is called with, from `(args, kwargs)`.

    Raises:
        CannotFollow: there is none.
    """
    args, kwargs = arguments
    for leaf in itertools.chain(args, kwargs.values()):
        if _is_hidden(leaf):
            return leaf
    for leaf in pytree.tree_leaves(arguments):
        if _is_hidden(leaf):
            return leaf
    raise CannotFollow("a layer is called without hidden states of [batch, tokens, ...]")


@dataclass
class Structure:
    """How a model is followed; shared by all its parts.

    Attributes:
        model: the original.
        language_model: the same, or the model of transformers inside it.
        layers: its own layers, in the order of the module list.
        order: which layer each call is of.
        outputs: what each call returns.
        collected: what transformers collected inside each call in the plain run, by key.
        names: of every parameter and buffer, by id.
        loss_chunk_tokens: see `LanguageModel`, as `mlp_chunk_tokens`.
        blocks: the token-wise parts of each call's layer.
        forced: arguments that the forward is always called with.
        carried: by how the forward is called, which earlier calls' outputs (call, leaf) its end reads. Written by the
            devices' threads; a race costs a second look.
    """

    model: nn.Module
    language_model: Any
    layers: list[nn.Module]
    names: dict[int, str]
    forced: dict[str, Any]
    order: list[int] = field(default_factory=list)
    outputs: list[OutputShape] = field(default_factory=list)
    collected: list[OutputShape] = field(default_factory=list)
    blocks: list[tuple[TokenWise, ...]] = field(default_factory=list)
    loss_chunk_tokens: ChunkTokens = None
    mlp_chunk_tokens: ChunkTokens = None
    carried: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class Run:
    """One run of a skeleton's forward; `called` answers for the layers."""

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Skeleton:
    """The model's tree in which calls of its layers go to a `Run`.

    Args:
        structure: of the model.
        present: parameters and buffers by name; all others are placeholders.
        owner: whose these are.
    """

    def __init__(self, structure: Structure, present: Mapping[str, Any], owner: object = None) -> None:
        self.owner = owner
        self._run: Run | None = None
        tensors: dict[int, torch.Tensor] = {}
        for tensor in [*structure.model.parameters(), *structure.model.buffers()]:
            name = structure.names[id(tensor)]
            tensors[id(tensor)] = present[name] if name in present else Placeholder.of_parameter(name, tensor)
        self._structure = structure
        self._tree = ShadowTree(structure.model, tensors)
        self._answer()

    def _answer(self) -> None:
        for index, layer in enumerate(self._structure.layers):
            state = self._tree.of(layer).__dict__
            state["forward"] = functools.partial(self._called, index)
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                state[hooks] = type(state[hooks])()

    def _called(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        return self._run.called(layer, args, kwargs)

    def of(self, original: nn.Module) -> nn.Module:
        """What stands for a module of the model."""
        return self._tree.of(original)

    def run(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward."""
        if self._tree.refresh():
            self._answer()
        self._run = run
        try:
            return self._tree.root(*args, **kwargs)
        finally:
            self._run = None


class RecordingRun(Run):
    """Notes how layers are called, and answers with placeholders."""

    def __init__(self, structure: Structure, stops: bool) -> None:
        self.recorder = Recorder()
        self.calls: list[Recorded] = []
        self._structure = structure
        self._stops = stops

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = len(self.calls)
        order = self._structure.order
        if index >= len(order) or order[index] != layer:
            raise CannotFollow(
                f"its forward called layer {layer} as call {index}, expected the order seen when it was wrapped, "
                f"{order[:8]}..."
            )
        shape = self._structure.outputs[index]
        with torch._C.DisableTorchFunctionSubclass():  # only looks at shapes
            like = hidden_states((args, kwargs))
            outputs = shape.placeholders(index, like)
        self.calls.append(Recorded(layer, (args, kwargs), outputs, shape.spec, collector.keys()))
        self.recorder.segment = index + 1
        if self._stops and index == len(order) - 1:
            raise Over
        if not self._stops:
            inside = self._structure.collected[index]
            if pytree.tree_unflatten(inside.leaves, inside.spec).keys() <= set(collector.keys()):
                found = inside.placeholders(index, like, "collected")
                collector.add(pytree.tree_unflatten(found, inside.spec))
        return pytree.tree_unflatten(outputs, shape.spec)


class ReplayingRun(Run):
    """Answers with what the layers have returned, as far as it is needed; placeholders elsewhere."""

    def __init__(self, structure: Structure, flow: Flow) -> None:
        self._structure = structure
        self._program, self._values, _, self._collected = flow
        self._index = 0

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._index
        self._index += 1
        call = self._program.calls[index]
        if index < len(self._collected):
            collector.add(self._collected[index])
        leaves: list[Any] = []
        shown: list[Any] | None = None
        last = index == len(self._program.calls) - 1
        for position, number in enumerate(call.outputs):
            if number is not None and (last or (index, position) in self._program.carried):
                leaves.append(self._values[number])
                continue
            if shown is None:
                like = self._values[next(n for n in self._program.calls[-1].outputs if n is not None)]
                shown = self._structure.outputs[index].placeholders(index, like)
            leaves.append(shown[position])
        return pytree.tree_unflatten(leaves, call.output_spec)


class Part(nn.Module):
    """A piece of the model's forward as a layer: it holds the parameters and buffers that it needs, by their names."""

    structure: Structure

    def __init__(self, structure: Structure, names: set[str], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.structure = structure
        for name, parameter in structure.model.named_parameters():
            if name in names:
                self._parameters[name] = parameter
        self._buffers.update(buffers)
        inner = {id(module) for layer in structure.layers for module in layer.modules()}
        self.followed_modules = [module for module in structure.model.modules() if id(module) not in inner]

    def skeleton(self) -> Skeleton:
        """The model's tree over this part's tensors, made when first asked for."""
        made: Skeleton | None = self.__dict__.get("_skeleton")
        if made is None or made.owner is not self:
            # A device's shell of this part is given its attributes, but has tensors of its own.
            made = self.__dict__["_skeleton"] = Skeleton(self.structure, {**self._parameters, **self._buffers}, self)
        return made


class Before(Part):
    """Everything until the first of the model's layers is called: embeddings, masks, positions."""

    def forward(self, *args: Any, **kwargs: Any) -> Flow:
        share = kwargs.pop(SHARE, None)
        loss_only = kwargs.pop(LOSS_ONLY, False)
        structure = self.structure
        kwargs.update(structure.forced)
        run = RecordingRun(structure, stops=True)
        with recording(run.recorder):
            try:
                self.skeleton().run(run, args, kwargs)
            except Over:
                pass
            else:
                raise CannotFollow(
                    f"its forward called {len(run.calls)} layers, expected "
                    f"{len(structure.order)} as when it was wrapped"
                )
        compiler = Compiler(run.recorder.ops, run.calls, (args, kwargs))
        program = compiler.compile(self._carried(args, kwargs))
        program.share, program.loss_only = share, loss_only
        return program, compiler.values, {}, ()

    def _carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
        """Which earlier calls' outputs the end of the forward reads, when it is called like this."""
        # Numbers change from step to step, but not what is read.
        flags = {n: v if isinstance(v, (bool, str, type(None))) else type(v).__name__ for n, v in kwargs.items()}
        key = repr((len(args), sorted(flags.items())))
        known = self.structure.carried.get(key)
        if known is None:
            run = RecordingRun(self.structure, stops=False)
            try:
                with torch.no_grad(), recording(run.recorder):
                    output = Skeleton(self.structure, self._buffers).run(run, args, kwargs)
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                # It wants values, or what layers collect; should it need more than is carried, the last part says so.
                output = None
            last = len(self.structure.order) - 1
            known = sorted(what for kind, what in sources_of(output) if kind == "output" and what[0] != last)
            self.structure.carried[key] = known
        return known


SHARE = "roundpipe_share"
LOSS_ONLY = "roundpipe_loss_only"


class OwnLayer(nn.Module):
    """One call of one of the model's layers, and what follows until the next."""

    def __init__(self, structure: Structure, index: int, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.layer = structure.layers[structure.order[index]]
        self.index = index
        self.blocks = structure.blocks[index]
        self.structure = structure
        self._parameters.update(parameters)

    def forward(self, flow: Flow) -> Flow:
        program, values, contents, collected = flow
        call: LayerCall = program.calls[self.index]
        own: dict[str, Any] = {**self._parameters}
        shared = {n: kind() for n, kind in call.arguments.shared().items()}
        for n, mapping in shared.items():
            mapping.update(contents.get(n, {}))
        args, kwargs = call.arguments.join(values, own, shared)
        chunk = None
        # What is collected inside would not be differentiated through a part that is computed in chunks.
        if self.blocks and not call.collected:
            chunk = chunk_of(self.structure.mlp_chunk_tokens, hidden_states((args, kwargs)).shape[1])
        chunks = in_chunks(self.layer, self.blocks, chunk) if chunk else nullcontext()
        with collector.collecting(call.collected, first=self.index == 0) as found, chunks:
            output = self.layer(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(output)
        if spec != call.output_spec or any(
            isinstance(leaf, torch.Tensor) != (number is not None)
            for leaf, number in zip(leaves, call.outputs, strict=True)
        ):
            raise CannotFollow(
                f"layer {self.index} returned {spec}, expected {call.output_spec} as when it was wrapped"
            )
        values = dict(values)
        for number, leaf in zip(call.outputs, leaves, strict=True):
            if number is not None:
                values[number] = leaf
        for glue in call.glue:
            glue.run(values, own)
        if call.collected:
            collected = (*collected, found())
        contents = {**contents, **{n: dict(mapping) for n, mapping in shared.items()}}
        kept = {n: contents[n] for n in call.kept_shared if n in contents}
        return program, {number: values[number] for number in call.kept}, kept, collected


class After(Part):
    """Everything after the model's last layer has returned: the last norm, the head, the loss."""

    def forward(self, flow: Flow) -> Any:
        program, values, _, _ = flow
        args, kwargs = program.inputs.join(values, {})
        skeleton = self.skeleton()
        with self._postponing(skeleton) if self._postpones(values, program) else nullcontext():
            outputs = skeleton.run(ReplayingRun(self.structure, flow), args, kwargs)
        if program.share is not None:
            outputs = _weighed(outputs, program.share)
        if program.loss_only:
            outputs = _only_the_loss(outputs)
        check_real(outputs)
        return outputs

    def _postpones(self, values: Values, program: Program) -> bool:
        """Whether not computing the logits at once is asked for, possible, and saves much memory."""
        chunk = self.structure.loss_chunk_tokens
        if not program.loss_only or chunk is None:
            return False
        head = self.structure.language_model.get_output_embeddings()
        if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
            return False
        hidden = next(values[number] for number in program.calls[-1].outputs if number is not None)
        tokens = hidden.shape[:-1].numel()
        return tokens * head.out_features * 4 > LEAST_LOGITS_BYTES if chunk == "auto" else tokens > chunk

    @contextmanager
    def _postponing(self, skeleton: Skeleton) -> Iterator[None]:
        """Within the block the head returns logits that are not computed, and the loss takes them."""
        model, chunk = self.structure.language_model, self.structure.loss_chunk_tokens
        head: Any = skeleton.of(model.get_output_embeddings())
        whole = skeleton.of(model)
        before = whole.__dict__.get("_loss_function")
        head.__dict__["forward"] = lambda states: LazyLogits.make(states, head.weight, head.bias)
        whole.__dict__["_loss_function"] = TokenLoss(model.loss_function, chunk if isinstance(chunk, int) else 0)
        try:
            yield
        finally:
            del head.__dict__["forward"]
            if before is None:
                del whole.__dict__["_loss_function"]
            else:
                whole.__dict__["_loss_function"] = before


def _only_the_loss(outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return outputs[:1]
    for name in outputs:
        if name != "loss":
            outputs[name] = None
    return outputs


def _weighed(outputs: Any, share: float) -> Any:
    """The model's outputs with its loss times `share`; without a token that counts the loss is 0, not 0 / 0."""
    loss = loss_in(outputs)
    if loss is None:
        return outputs
    if share == 0:
        others = [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not loss and isinstance(leaf, torch.Tensor)]
        # Of each only an element: all that matters is what it depends on.
        ends = [leaf.hidden if isinstance(leaf, LazyLogits) else leaf for leaf in others]
        ends += [leaf.weight for leaf in others if isinstance(leaf, LazyLogits)]
        parts = [end.flatten()[:1].sum() * 0 for end in ends if end.requires_grad]
        weighed = torch.stack([part.to(loss.dtype) for part in parts]).sum() if parts else torch.zeros_like(loss)
    else:
        weighed = loss * share
    if isinstance(outputs, tuple):
        return (weighed, *outputs[1:])
    outputs["loss"] = weighed
    return outputs


def buffers_around(structure: Structure) -> dict[str, torch.Tensor]:
    """The buffers outside of the model's own layers."""
    inside = {id(buffer) for layer in structure.layers for buffer in layer.buffers()}
    return {name: buffer for name, buffer in structure.model.named_buffers() if id(buffer) not in inside}


def sources_of(outputs: Any) -> set[Source]:
    """What the placeholders in a pytree go back to."""
    return {source for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Placeholder) for source in leaf.sources}


def check_real(outputs: Any) -> None:
    """Raises CannotFollow if a tensor of the model's output has no values."""
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Placeholder):
            raise CannotFollow(
                f"its output{pytree.keystr(path)} depends on more than what its last layer returned: "
                f"{sorted(map(str, leaf.sources))[:4]}"
            )
