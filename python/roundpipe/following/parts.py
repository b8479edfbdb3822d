"""The layers of a followed model: the part before its own layers, each of these, and the part after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following import collector
from roundpipe.following.call_shapes import hidden_states
from roundpipe.following.placeholder import (
    WITHOUT_VALUES,
    CannotFollow,
    Made,
    Placeholder,
    Recorder,
)
from roundpipe.following.program import (
    Compiler,
    LayerCall,
    NumberedValues,
    Program,
    Recorded,
    Template,
    calls_are_alike,
)
from roundpipe.following.skeleton import (
    CutCalls,
    FollowedModel,
    Over,
    PartState,
    Phase,
    Repeats,
    Run,
    Skeleton,
)
from roundpipe.following.towers import Returned, Shape, numbers_given, tower_values
from roundpipe.model.losses.ending import Ending, Kept, loss_in
from roundpipe.model.losses.lazy_logits import LazyLogits
from roundpipe.model.losses.token_loss import TokenLoss
from roundpipe.ops.documents import knowing, noting_tables
from roundpipe.ops.token_wise import chunk_of, in_chunks

# "auto" computes the loss in chunks if a microbatch's float32 logits would take more than this.
LEAST_LOGITS_BYTES = 16 << 20


class RecordingRun(Run):
    """Records how layers are called, and answers with placeholders.

    Args:
        followed: the followed model.
        stops: whether it ends at the last layer call.
        repeats: what towers returned; None: they run.
    """

    def __init__(self, followed: FollowedModel, stops: bool, repeats: Repeats | None = None) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.calls: list[Recorded] = []
        self._followed = followed
        self._stops = stops
        self._place: Any = None
        self._first = 0
        self._repeats = repeats

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = len(self.calls)
        order = self._followed.order
        if index >= len(order) or order[index] != layer:
            raise CannotFollow(
                f"its forward called layer {layer} as call {index}, expected the order seen when it was wrapped, "
                f"{order[:8]}..."
            )
        shape = self._followed.outputs[index]
        outputs = _shown(self._followed, index, (args, kwargs))
        if collector.place() is not self._place:
            self._place, self._first = collector.place(), index
        collected = collector.keys(), self._first, collector.selected()
        self.calls.append(Recorded(layer, (args, kwargs), outputs, shape.spec, *collected))
        self.recorder.called()
        self.recorder.ended = index == len(order) - 1
        if self._stops and self.recorder.ended:
            raise Over
        if not self._stops:
            inside = self._followed.collected[index]
            if pytree.tree_unflatten(inside.leaves, inside.spec).keys() <= set(collector.keys()):
                found = _shown(self._followed, index, (args, kwargs), "collected")
                collector.add(pytree.tree_unflatten(found, inside.spec))
        return pytree.tree_unflatten(outputs, shape.spec)


def _left_behind(shape: Shape, device: torch.device, made: Made | None = None) -> Placeholder:
    """Stands for an argument whose values only towers needed."""
    return Placeholder.make(shape.meta(), device, frozenset({("parameter", "an argument")}), made=made)


def _shown(followed: FollowedModel, call: int, arguments: Any, kind: str = "output") -> list[Any]:
    shape = (followed.outputs if kind == "output" else followed.collected)[call]
    with torch._C.DisableTorchFunctionSubclass():  # reads only shapes
        return shape.placeholders(call, followed.layers[followed.order[call]], arguments, kind)


class FirstCallRun(Run):
    """Takes the arguments of the first layer call, and ends there."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer == 0 and not collector.keys():
            self.arguments = args, kwargs
        raise Over


class ReplayingRun(Run):
    """Answers with the last layer's real output, and with placeholders for the other layers' outputs."""

    def __init__(self, followed: FollowedModel, state: PartState) -> None:
        super().__init__()
        self._followed = followed
        self._program, self._values, _, self._collected = state
        self._index = 0
        self._alike = self._program.alike and followed.calls_alike is not None and followed.calls_alike()
        known = {made: self._values[number] for made, number in self._program.carried.items()}
        self.recorder = Recorder(known)
        returned = self._program.returned
        self._repeats = None if returned is None else Repeats(returned, known)

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._index
        self._index += 1
        if index >= len(self._program.calls) or self._followed.order[index] != layer:
            raise CannotFollow(f"its forward calls other layers the second time (call {index} is of layer {layer})")
        call = self._program.calls[index]
        if index < len(self._collected):
            collector.add(self._collected[index])
        shape = self._followed.outputs[index]
        self.recorder.called()
        if self._alike and index < len(self._program.calls) - 1:
            return args[0]  # only the next layer gets it, and only its shape counts
        if index == len(self._program.calls) - 1:
            self.recorder.ended = True
            leaves = [
                leaf if number is None else self._values[number]
                for leaf, number in zip(shape.leaves, call.outputs, strict=True)
            ]
        else:
            leaves = _shown(self._followed, index, (args, kwargs))
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Placeholder):
                    self.recorder.tell(leaf, ("output", index, position))
        return pytree.tree_unflatten(leaves, call.output_spec)


class Part(nn.Module):
    """A piece of the model's forward as a layer: it holds the parameters and buffers that it needs, by their names."""

    followed: FollowedModel
    phases: tuple[Phase, ...] = (Phase.BEFORE,)

    def __init__(self, followed: FollowedModel, names: set[str], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.followed = followed
        for name, parameter in followed.model.named_parameters():
            if name in names:
                self._parameters[name] = parameter
        self._buffers.update(buffers)
        inner = {id(module) for layer in followed.layers for module in layer.modules()}
        self.followed_modules = [module for module in followed.model.modules() if id(module) not in inner]

    def skeleton(self) -> Skeleton:
        """The model's tree over this part's tensors, made on first use."""
        made: Skeleton | None = self.__dict__.get("_skeleton")
        if made is None or made.owner is not self:
            # A device's shell of this part shares its attributes, but has its own tensors.
            present = {**self._parameters, **self._buffers}
            made = self.__dict__["_skeleton"] = Skeleton(self.followed, present, self.phases, self)
        return made


class Before(Part):
    """Everything until the first of the model's layers is called: embeddings, masks, positions.

    Args:
        towers: of those that are cut into layers, the parts after their layers, by number. With any, it is called with
            the model's arguments and these towers' calls.
    """

    def __init__(
        self,
        followed: FollowedModel,
        names: set[str],
        buffers: dict[str, torch.Tensor],
        towers: Mapping[int, nn.Module],
    ) -> None:
        super().__init__(followed, names, buffers)
        self.towers = nn.ModuleDict({str(number): after for number, after in towers.items()})

    def forward(self, *args: Any, **kwargs: Any) -> PartState:
        cut = None
        if self.towers:
            (args, kwargs), calls = args[0]
            cut = CutCalls({int(number): after for number, after in self.towers.items()}, calls)
        ending, frequencies = kwargs.pop(ENDING, Ending()), kwargs.pop(FREQUENCIES, None)
        followed = self.followed
        if frequencies is not None:
            self.skeleton().use(frequencies)
        kwargs.update(followed.forced)
        with noting_tables() as tables:
            program, values = self._program(args, kwargs, ending, cut)
        program.ending = ending
        program.documents = _documents_in(program, values, tables)
        return program, values, {}, ()

    def _program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], ending: Ending, cut: CutCalls | None
    ) -> tuple[Program, NumberedValues]:
        followed = self.followed
        alike = followed.calls_alike is not None and followed.calls_alike()
        again = self._again(args, kwargs) if alike and (cut is None or not cut.are_any) else None
        if again is not None:
            return again
        run = RecordingRun(followed, stops=True)
        run.cut = cut
        try:
            self.skeleton().run(run, args, kwargs)
        except Over:
            pass
        else:
            raise CannotFollow(
                f"its forward called {len(run.calls)} layers, expected {len(followed.order)} as when it was wrapped"
            )
        compiler = Compiler(run.recorder.ops, run.calls, (args, kwargs), run.returned)
        program = compiler.compile(self._carried(args, kwargs, run.returned, ending))
        if alike and calls_are_alike(program):
            program.alike = True
            skeleton = self.skeleton()
            skeleton.templates.insert(0, Template(program, compiler.values, (args, kwargs)))
            del skeleton.templates[MOST_TEMPLATES:]
        return program, compiler.values

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, NumberedValues] | None:
        """An earlier microbatch's program with this one's values, if both have the same form."""
        skeleton = self.skeleton()
        if not any(template.accepts((args, kwargs)) for template in skeleton.templates):
            return None
        run = FirstCallRun()
        with suppress(Over):
            skeleton.run(run, args, kwargs)
        if run.arguments is None:
            return None
        returned = [each.without_values() for each in run.returned]
        if tower_values(run.returned, chooses=True):
            return None
        found = (template.again((args, kwargs), run.arguments, returned) for template in skeleton.templates)
        return next((each for each in found if each is not None), None)

    def shown_output(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: PartState) -> Any:
        """What the forward will return, without values, where it can be told from `state`, this part's output; else
        None."""
        return self._to_the_end(
            args, {**kwargs, **self.followed.forced}, state[0].returned or [], numbers_given((args, kwargs))
        )

    def _carried(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], returned: list[Returned], ending: Ending
    ) -> list[Made]:
        """The values made before the last call that the forward's end reads when it is called like this."""
        chosen = tower_values(returned, chooses=True)
        # Numbers change from step to step, but the values that are read do not.
        flags = {n: v if isinstance(v, (bool, str, type(None))) else type(v).__name__ for n, v in kwargs.items()}
        # What a tower returns has a leaf for each picture.
        towers = [(each.tower, len(each.leaves)) for each in returned]
        # Labels of another kind may ask for another loss, and are left behind only if they are numbers.
        numbers = list(numbers_given((args, kwargs)))
        of_towers = (towers, ending.kept, ending.towers, numbers) if towers else ()
        key = repr((len(args), sorted(flags.items()), of_towers))
        known = self.followed.carried.get(key)
        if known is None:
            known = self.followed.carried[key] = self._read_by_the_end(args, kwargs, returned, chosen, ending)
        return [*known, *(made for made in chosen if made not in known)]

    def _read_by_the_end(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: list[Returned],
        chosen: dict[Made, torch.Tensor],
        ending: Ending,
    ) -> list[Made]:
        given = numbers_given((args, kwargs)) if returned else {}
        of_towers = tower_values(returned)
        # It may read, or write into another tensor, what towers returned, or what they were given.
        attempts = [chosen, of_towers, {**chosen, **given}, {**of_towers, **given}] if returned else [chosen]
        runs = ((values, self._to_the_end(args, kwargs, returned, values)) for values in attempts)
        values, output = next((each for each in runs if each[1] is not None), (given, None))
        calls = len(self.followed.order)
        if ending.kept is Kept.LOSS and output is not None:
            read = loss_in(output)
        else:
            read = output if ending.towers else without_towers(output)
        before = {made for made in Ends(read, calls).made if made[0] in _BEFORE}
        before |= values.keys() - chosen.keys()
        return [*(made for made in Ends(output, calls).made if made[0] not in _BEFORE), *sorted(before)]

    def _to_the_end(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: list[Returned],
        values: Mapping[Made, torch.Tensor],
    ) -> Any:
        """The output of a run on placeholders, except for `values` and what `numbers_given` leaves out. None if its end
        needs other values, or collected ones; the last part reports it if it needs more than is carried."""
        run = RecordingRun(self.followed, False, Repeats([each.without_values() for each in returned], values))
        absent = {id(value): made for made, value in numbers_given((args, kwargs)).items() if made not in values}

        def shown(given: torch.Tensor) -> torch.Tensor:
            made = absent.get(id(given)) if returned else None
            return given if made is None else _left_behind(Shape.of(given), given.device, made)

        args, kwargs = pytree.tree_map_only(torch.Tensor, shown, (args, kwargs))
        try:
            with torch.no_grad():
                return Skeleton(self.followed, self._buffers).run(run, args, kwargs)
        except (*WITHOUT_VALUES, AttributeError, ValueError):
            return None


def _documents_in(
    program: Program, values: NumberedValues, tables: list[torch.Tensor]
) -> dict[tuple[int | None, int | None], _core.Documents]:
    """See `Program.documents`. They are read while their tables are on the host; positions are read from the device,
    which the part before the layers has just waited for."""
    found: dict[tuple[int | None, int | None], _core.Documents] = {}
    for call in (program.calls[:1] if program.alike else program.calls) if tables else ():
        mask, positions = call.mask_and_positions()
        if mask is None or not any(values.get(mask) is table for table in tables):
            continue
        table = values[mask]
        rows, tokens = table.shape[0], int(table[0, 1:].abs().sum())
        for number in {positions, None}:  # not all layers tell their attention of positions
            placed = None if number is None else values.get(number)
            if (mask, number) not in found and (number is None or placed is not None):
                found[mask, number] = _core.read_documents(table, placed, rows, tokens)
    return found


_BEFORE = ("tower", "input")  # kinds of `Made` that exist before the first call
MOST_TEMPLATES = 4
"""Forms of microbatches whose programs a device keeps."""
FREQUENCIES = "roundpipe_frequencies"
"""The argument with the rotary frequencies of the batch."""
ENDING = "roundpipe_ending"
"""The argument that says what is done with a microbatch's outputs."""
COEFFICIENT = "router_aux_loss_coef"  # of a model with experts, what it multiplies the router's loss by


class OwnLayer(nn.Module):
    """One call of one of the model's layers, and the operations until the next call."""

    def __init__(self, followed: FollowedModel, index: int, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.layer = followed.layers[followed.order[index]]
        self.index = index
        self.blocks = followed.blocks[index]
        self.followed = followed
        self._parameters.update(parameters)

    def forward(self, state: PartState) -> PartState:
        program, values, contents, collected = state
        call: LayerCall = program.calls[self.index]
        own: dict[str, Any] = {**self._parameters}
        shared = {n: kind() for n, kind in call.arguments.shared().items()}
        for n, mapping in shared.items():
            mapping.update(contents.get(n, {}))
        args, kwargs = call.arguments.join(values, own, shared)
        chunk = None
        # Values collected inside a part that is computed in chunks would not be differentiated.
        if self.blocks and not call.collected:
            chunk = chunk_of(self.followed.mlp_chunk_tokens, hidden_states((args, kwargs)).shape[1])
        chunks = in_chunks(self.layer, self.blocks, chunk) if chunk else nullcontext()
        documents = [
            (values[mask], None if positions is None else values[positions], each)
            for (mask, positions), each in program.documents.items()
            if mask in values and (positions is None or positions in values)
        ]
        # Without any before it, a call takes its input for the first hidden state.
        before = collector.hidden_states_in(collected[call.first :]) or int(call.first != self.index)
        with collector.collecting(call.collected, call.selected, before) as found, chunks, knowing(documents):
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
        for number, leaf, shape in zip(call.outputs, leaves, call.shapes, strict=True):
            if number is None:
                continue
            if leaf.shape != shape:
                raise CannotFollow(f"layer {self.index} returned {tuple(leaf.shape)}, expected {tuple(shape or ())}")
            values[number] = leaf
        for glue in call.glue:
            glue.run(values, own)
        if call.collected:
            collected = (*collected, *({} for _ in range(len(collected), self.index)), found())
        contents = {**contents, **{n: dict(mapping) for n, mapping in shared.items()}}
        kept = {n: contents[n] for n in call.kept_shared if n in contents}
        return program, {number: values[number] for number in call.kept}, kept, collected


class After(Part):
    """Everything after the model's last layer has returned: the last norm, the head, the loss."""

    phases = (Phase.END,)

    def forward(self, state: PartState) -> Any:
        program, values, _, _ = state
        args, kwargs = program.inputs.join(values, {})
        device = next((value.device for value in values.values()), torch.device("cpu"))
        args, kwargs = pytree.tree_map_only(Shape, lambda shape: _left_behind(shape, device), (args, kwargs))
        skeleton = self.skeleton()
        run = ReplayingRun(self.followed, state)
        outputs = skeleton.run(run, args, kwargs, self._losses(skeleton, values, program))
        if not program.ending.towers:
            outputs = without_towers(outputs)
        outputs = program.ending.of(outputs, type(self.followed.language_model).__name__)
        check_real(outputs)
        return outputs

    @contextmanager
    def _losses(self, skeleton: Skeleton, values: NumberedValues, program: Program) -> Iterator[None]:
        """Within the block, losses are computed as the program's ending asks."""
        of_tokens = program.ending.kept is Kept.TOKEN_LOSSES
        postpones = self._postpones(values, program)
        with_loss = self._with_loss(skeleton, postpones, of_tokens) if postpones or of_tokens else nullcontext()
        with with_loss, self._sharing_router_loss(skeleton, program.ending.router_share):
            yield

    @contextmanager
    def _sharing_router_loss(self, skeleton: Skeleton, share: float | None) -> Iterator[None]:
        """Within the block, the router's loss counts by `share`; see `COEFFICIENT`."""
        whole = skeleton.of(self.followed.language_model)
        before: Any = whole.__dict__.get(COEFFICIENT)
        if share is not None:
            whole.__dict__[COEFFICIENT] = before * share
        try:
            yield
        finally:
            if share is not None:
                whole.__dict__[COEFFICIENT] = before

    def _postpones(self, values: NumberedValues, program: Program) -> bool:
        """Whether postponing the logits is requested, possible, and saves much memory."""
        chunk = self.followed.loss_chunk_tokens
        if program.ending.kept is Kept.ALL or chunk is None or not self._has_plain_head():
            return False
        hidden = next(values[number] for number in program.calls[-1].outputs if number is not None)
        tokens = hidden.shape[:-1].numel()
        width: int = self.followed.language_model.get_output_embeddings().out_features
        return tokens * width * 4 > LEAST_LOGITS_BYTES if chunk == "auto" else tokens > chunk

    def _has_plain_head(self) -> bool:
        head = self.followed.language_model.get_output_embeddings()
        return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks

    @contextmanager
    def _with_loss(self, skeleton: Skeleton, postpones: bool, of_tokens: bool) -> Iterator[None]:
        """Within the block, the loss accepts logits that are not computed, which the head returns if it is postponed,
        and is perhaps that of each token."""
        followed = self.followed
        model, chunk = followed.language_model, followed.loss_chunk_tokens
        head: Any = skeleton.of(model.get_output_embeddings()) if postpones else None
        whole = skeleton.of(model)
        before = whole.__dict__.get("_loss_function")
        if postpones:
            head.__dict__["forward"] = lambda input: LazyLogits.make(input, head.weight, head.bias)
        whole.__dict__["_loss_function"] = TokenLoss(
            model.loss_function,
            chunk if isinstance(chunk, int) else 0,
            followed.chunk_logit_bytes,
            followed.arithmetic,
            of_tokens,
        )
        try:
            yield
        finally:
            if postpones:
                del head.__dict__["forward"]
            if before is None:
                del whole.__dict__["_loss_function"]
            else:
                whole.__dict__["_loss_function"] = before


def buffers_around(followed: FollowedModel) -> dict[str, torch.Tensor]:
    """The buffers outside the model's own layers."""
    inside = {id(buffer) for layer in followed.layers for buffer in layer.buffers()}
    return {name: buffer for name, buffer in followed.model.named_buffers() if id(buffer) not in inside}


class Ends:
    """The origins of a forward's output.

    Args:
        output: output of a `RecordingRun` that runs to the end.
        calls: number of layer calls.

    Attributes:
        made: values made between the first call and the last one, and read after it.
        late: names of the parameters used after the last call.
        early: names of parameters used before the first call, for values that are read after the last one.
        drawn: the function that draws random numbers for these values; None if there is none.
    """

    def __init__(self, output: Any, calls: int) -> None:
        self._calls = calls
        self._seen: set[int] = set()
        self.late: set[str] = set()
        self.early: set[str] = set()
        self.drawn: str | None = None
        found: set[Made] = set()
        for leaf in pytree.tree_leaves(output):
            self._visit(leaf, found)
        self.made = sorted(found)

    def _visit(self, leaf: Any, found: set[Made]) -> None:
        if not isinstance(leaf, Placeholder) or id(leaf) in self._seen:
            return
        self._seen.add(id(leaf))
        op = leaf.op
        if op is None:
            if leaf.label is not None:
                is_late = any(kind == "late" for kind, _ in leaf.origins)
                (self.late if is_late else self.early).add(leaf.label)
            elif leaf.made is not None and (leaf.made[0] in _BEFORE or leaf.made[1] != self._calls - 1):
                found.add(leaf.made)
            return
        if op.glue and op.segment < self._calls:
            index = next(index for index, result in enumerate(op.results) if result is leaf)
            found.add(("op", op.segment, op.number, index))
            return
        if op.segment < self._calls and draws(op.function):
            self.drawn = op.function.__name__
        for source in (op, *leaf.writers):
            for argument in pytree.tree_leaves(source.arguments):
                self._visit(argument, found)


def without_towers(outputs: Any) -> Any:
    """A model's outputs without those that hold values from before its layers, which are not known at its end."""

    def is_kept(output: Any) -> bool:
        return not any(
            isinstance(leaf, Placeholder) and all(kind == "parameter" for kind, _ in leaf.origins)
            for leaf in pytree.tree_leaves(output)
        )

    if isinstance(outputs, Mapping):
        left_out = [name for name, output in outputs.items() if not is_kept(output)]
        if left_out:
            return type(outputs)(**{name: output for name, output in outputs.items() if name not in left_out})
    elif type(outputs) is tuple:
        return tuple(filter(is_kept, outputs))
    return outputs


def draws(function: Any) -> bool:
    """Whether a torch function draws random numbers, judged by its name."""
    name = getattr(function, "__name__", "")
    return any(part in name for part in ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_"))


def check_real(outputs: Any) -> None:
    """Raises CannotFollow if a tensor of the model's output has no values."""
    for path, leaf in pytree.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Placeholder):
            raise CannotFollow(
                f"its output{pytree.keystr(path)} depends on more than what its last layer returned: "
                f"{sorted(map(str, leaf.origins))[:4]}"
            )
