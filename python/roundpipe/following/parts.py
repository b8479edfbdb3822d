"""The layers of a followed model: the part before its own layers, each of these, and the part after them."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following import collector
from roundpipe.following.call_shapes import Arguments, OutputShape, hidden_states
from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.placeholder import (
    CannotFollow,
    Made,
    Placeholder,
    Recorder,
    recording,
    with_values,
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
from roundpipe.following.rotary import Frequencies, LongRows
from roundpipe.following.token_wise import ChunkTokens, TokenWise, chunk_of, in_chunks
from roundpipe.following.towers import Returned, Shape, numbers_given, tower_values, towers_of
from roundpipe.model.losses.ending import Ending, Kept, loss_in
from roundpipe.model.losses.lazy_logits import LazyLogits
from roundpipe.model.losses.token_loss import TokenLoss
from roundpipe.ops.documents import knowing, noting_tables
from roundpipe.ops.functional import Arithmetic

# "auto" computes the loss in chunks if a microbatch's float32 logits would take more than this.
LEAST_LOGITS_BYTES = 16 << 20

Collected = tuple[dict[str, tuple[Any, ...]], ...]
"""The values that the model has collected inside each layer call so far, by key."""
Shared = dict[int, dict[Any, Any]]
"""The contents of the mappings that layers share, by number."""
PartState = tuple[Program, NumberedValues, Shared, Collected]
"""The input of each part but the first one, and the output of each but the last one."""
TowerCall = tuple[int, PartState]
"""A call of a tower that is cut into layers: the tower's number, and the state between the tower's parts."""


class Over(BaseException):
    """Ends a forward, because the last layer has been called."""


@dataclass
class FollowedModel:
    """A model that is followed, and how; shared by all its parts.

    Attributes:
        model: the original.
        language_model: the same, or the transformers model inside it.
        layers: its own layers, in the order of the module list.
        order: the layer of each call.
        outputs: the output of each call.
        collected: what transformers collected inside each call in the plain run, by key.
        names: of every parameter and buffer, by id.
        loss_chunk_tokens: see `LanguageModel`; also for `mlp_chunk_tokens` and `arithmetic`.
        blocks: the token-wise parts of each call's layer.
        forced: arguments that the forward is always called with.
        carried: by the form of the call, the values made before the last call that the forward's end reads. Written by
            the devices' threads; a race only costs a second look.
        ends_early: parameters that are used before the first call, and again for values that the end reads from there.
        rotary: the rotary modules around its layers whose frequencies depend on the batch.
        calls_alike: says whether, for a call that runs now, the model's code surely calls its layers one after the
            other, each with the same arguments but for the hidden states; None: that is not known.
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
    chunk_logit_bytes: int = 0  # of a choice that is left open; 0: by the kind of device
    mlp_chunk_tokens: ChunkTokens = None
    arithmetic: Arithmetic = "exact"
    carried: dict[str, list[Made]] = field(default_factory=dict)
    ends_early: frozenset[str] = frozenset()
    rotary: LongRows | None = None
    calls_alike: Callable[[], bool] | None = None

    def towers(self) -> list[nn.Module]:
        """The modules that its forward may call before its layers, and not a second time at its end."""
        return [
            module
            for module in towers_of(self.model, self.layers)
            if not any(self.names[id(p)] in self.ends_early for p in module.parameters())
        ]


class _NoHooks(OrderedDict[int, Any]):
    """The hooks of a layer's modules as the model's forward sees them: none, and none can be added."""

    def __setitem__(self, number: int, hook: Any) -> None:
        raise CannotFollow(
            "its forward registers hooks inside its layers, which run later, expected hooks that are there before the "
            "call; PEFT does so for adapters that tokens invoke (aLoRA), and for adapter_names"
        )


class _Repeats:
    """Answers calls of towers with what they returned in an earlier run of the same forward.

    Args:
        returned: without values.
        values: of what they returned.
    """

    def __init__(self, returned: list[Returned], values: Mapping[Made, torch.Tensor]) -> None:
        self._returned, self._values = returned, values
        self._next = 0

    def answer(self, number: int, device: torch.device) -> Any:
        call = self._next
        self._next += 1
        if call >= len(self._returned) or self._returned[call].tower != number:
            raise CannotFollow(f"its forward calls other modules before its layers the second time (call {call})")

        def placeholder(meta: torch.Tensor, made: Made) -> Placeholder:
            return Placeholder.make(meta, device, frozenset({("parameter", f"tower {number}")}), made=made)

        return self._returned[call].again(call, self._values, placeholder)


class CutCalls:
    """The calls of towers whose layers have run.

    Args:
        towers: the parts after their layers, by number.
        calls: the calls, in order.
    """

    def __init__(self, towers: dict[int, nn.Module], calls: list[TowerCall]) -> None:
        self.towers = towers
        self.are_any = bool(calls)
        self._calls = iter(calls)

    def output(self, number: int) -> Any:
        """What the next call of the tower returns."""
        begun, state = next(self._calls, (None, None))
        if begun != number:
            raise CannotFollow(
                "its forward calls a tower that is cut into layers with what another call of a tower returned, such as "
                "pictures and videos in one microbatch; give them in batches of their own"
            )
        return self.towers[number](state)


class Run:
    """One run of a skeleton's forward; `called` answers in place of the layers.

    Attributes:
        returned: of each call of a tower before the first layer, in order, unless this run repeats another.
        cut: ends the calls of towers that are cut into layers.
    """

    recorder: Recorder
    cut: CutCalls | None = None
    _repeats: _Repeats | None = None

    def __init__(self) -> None:
        self.returned: list[Returned] = []

    def called(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def tower(self, number: int, forward: Callable[[], Any], arguments: Arguments, device: torch.device) -> Any:
        """Runs a tower, or answers in place of it."""
        if self._repeats is not None:
            return self._repeats.answer(number, device)
        output = self.cut.output(number) if self.cut is not None and number in self.cut.towers else forward()
        self.returned.append(Returned.of(number, output))
        return output


class Phase(enum.IntEnum):
    """The position of a forward's run."""

    BEFORE = 0
    BETWEEN = 1
    END = 2


class _Tower:
    """The forward of a module that a skeleton's forward may call before the first layer."""

    def __init__(self, skeleton: Skeleton, number: int, forward: Callable[..., Any]) -> None:
        self._skeleton, self._number, self._forward = skeleton, number, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._skeleton._tower_called(self._number, lambda: self._forward(*args, **kwargs), (args, kwargs))


class Skeleton:
    """The model's tree, in which calls of its layers go to a `Run`.

    Args:
        followed: the followed model.
        present: parameters and buffers by name; all others are placeholders.
        phases: the phases in which the given parameters are present. After the first layer call, a parameter that was
            present before it is a placeholder again, so that later operations on it run in the part they belong to.
        owner: the owner of these parameters.
    """

    def __init__(
        self,
        followed: FollowedModel,
        present: Mapping[str, Any],
        phases: tuple[Phase, ...] = (Phase.BEFORE,),
        owner: object = None,
    ) -> None:
        self.owner = owner
        self._run: Run | None = None
        self._followed = followed
        self._missing: list[Placeholder] = []
        self._device = torch.device("cpu")
        self.templates: list[Template] = []  # of programs that ran, until attributes of the model change
        tensors: dict[int, torch.Tensor] = {}
        shown: list[dict[int, torch.Tensor]] = [{}, {}, {}]
        for tensor in [*followed.model.parameters(), *followed.model.buffers()]:
            name = followed.names[id(tensor)]
            if name in present and not isinstance(tensor, nn.Parameter):
                tensors[id(tensor)] = present[name]
                continue
            missing = Placeholder.of_parameter(name, tensor)
            later = Placeholder.of_parameter(name, tensor, "late")
            self._missing += [missing, later]
            for phase in Phase:
                here = phase in phases or (phase is Phase.BEFORE and name in followed.ends_early)
                absent = missing if phase is Phase.BEFORE else later
                shown[phase][id(tensor)] = present[name] if here and name in present else absent
            tensors[id(tensor)] = shown[Phase.BEFORE][id(tensor)]
        self._tree = ShadowTree(followed.model, tensors)
        inside = {id(module) for layer in followed.layers for module in layer.modules()}
        self._places = [
            (state, name, tuple(tensors_then[id(parameter)] for tensors_then in shown))
            for module in followed.model.modules()
            if id(module) not in inside
            for state in (self._tree.of(module)._parameters,)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._phase = Phase.BEFORE
        self._towers = followed.towers()
        self._in_tower = False
        self._answer()

    def _show(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            for state, name, tensors in self._places:
                state[name] = tensors[phase]  # type: ignore[assignment]  # stands for a parameter

    def _be_on(self, device: torch.device) -> None:
        """Shows placeholders on the inputs' device instead of the user's model's: forwards ask for it, and create
        tensors there."""
        if device != self._device:
            self._device = device
            for placeholder in self._missing:
                placeholder.shown_device = device

    def _answer(self) -> None:
        for module in self._followed.model.modules():
            # Compiled code would run the original's layers and cannot be followed.
            self._tree.of(module).__dict__["_compiled_call_impl"] = None
        for module in self._rotary():
            self._followed.rotary.settle(module, self._tree.of(module).__dict__)  # type: ignore[union-attr]
        for index, layer in enumerate(self._followed.layers):
            self._tree.of(layer).__dict__["forward"] = functools.partial(self._called, index)
            for module in layer.modules():
                state = self._tree.of(module).__dict__
                for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                    state[hooks] = _NoHooks()
        for number, module in enumerate(self._towers):
            shadow = self._tree.of(module)
            if not isinstance(shadow.forward, _Tower):
                shadow.__dict__["forward"] = _Tower(self, number, shadow.forward)

    def _tower_called(self, number: int, forward: Callable[[], Any], arguments: Arguments) -> Any:
        if self._run is None or self._in_tower or self._phase is not Phase.BEFORE:
            return forward()
        self._in_tower = True
        try:
            return self._run.tower(number, forward, arguments, self._device)
        finally:
            self._in_tower = False

    def _called(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        assert self._run is not None
        result = self._run.called(layer, args, kwargs)
        self._show(Phase.END if self._run.recorder.ended else Phase.BETWEEN)
        return result

    def _rotary(self) -> list[nn.Module]:
        return [] if self._followed.rotary is None else self._followed.rotary.modules

    def use(self, frequencies: Frequencies) -> None:
        """Gives the rotary modules the frequencies of the batch that runs next."""
        for module, own in zip(self._rotary(), frequencies, strict=True):
            self._tree.of(module)._buffers.update(own)

    def of(self, original: nn.Module) -> nn.Module:
        """The stand-in for a module of the model."""
        return self._tree.of(original)

    def run(
        self,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        setting: AbstractContextManager[None] | None = None,
    ) -> Any:
        """Runs the forward, within `setting`, which may set attributes of the stand-ins: before it is entered, these
        take over what was changed on the model's modules."""
        if self._tree.refresh():
            self.templates.clear()
            self._answer()
        with setting or nullcontext():
            return self._run_forward(run, args, kwargs)

    def _run_forward(self, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._run = run
        given = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor)
        self._be_on(next((tensor.device for tensor in given), self._device))
        self._show(Phase.BEFORE)
        try:
            with recording(run.recorder):
                return with_values(self._tree.root(*args, **kwargs))
        finally:
            self._run = None


class RecordingRun(Run):
    """Records how layers are called, and answers with placeholders.

    Args:
        followed: the followed model.
        stops: whether it ends at the last layer call.
        repeats: what towers returned; None: they run.
    """

    def __init__(self, followed: FollowedModel, stops: bool, repeats: _Repeats | None = None) -> None:
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
        self._repeats = None if returned is None else _Repeats(returned, known)

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
        towers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        super().__init__(followed, names, buffers)
        self.towers = nn.ModuleDict({str(number): after for number, after in (towers or {}).items()})

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
        of_towers = (towers, ending.kept, ending.towers) if towers else ()
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
        run = RecordingRun(self.followed, False, _Repeats([each.without_values() for each in returned], values))
        absent = {id(value): made for made, value in numbers_given((args, kwargs)).items() if made not in values}

        def shown(given: torch.Tensor) -> torch.Tensor:
            made = absent.get(id(given)) if returned else None
            return given if made is None else _left_behind(Shape.of(given), given.device, made)

        args, kwargs = pytree.tree_map_only(torch.Tensor, shown, (args, kwargs))
        try:
            with torch.no_grad():
                return Skeleton(self.followed, self._buffers).run(run, args, kwargs)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
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
