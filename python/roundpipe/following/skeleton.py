"""A followed model, and its tree of modules in which calls of its layers go to a run of its forward."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.following.call_shapes import Arguments, OutputShape
from roundpipe.following.layers.shadow import ShadowTree
from roundpipe.following.placeholder import CannotFollow, Made, Placeholder, Recorder, recording, with_values
from roundpipe.following.program import NumberedValues, Program, Template
from roundpipe.following.rotary import Frequencies, LongRows
from roundpipe.following.towers import Returned, towers_of
from roundpipe.ops.functional import Arithmetic
from roundpipe.ops.token_wise import ChunkTokens, TokenWise

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


class Repeats:
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
    _repeats: Repeats | None = None

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
