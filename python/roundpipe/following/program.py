"""The arguments of a pipeline's layers: the calls of one run of a model's forward, and the operations between them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following.placeholder import CannotFollow, Made, Op, Placeholder
from roundpipe.following.towers import Returned, Shape, numbers_given
from roundpipe.model.losses.ending import Ending

NumberedValues = dict[int, torch.Tensor]
"""Tensors that the parts pass on, by number."""


@dataclass(frozen=True)
class Ref:
    """Stands for one of the `NumberedValues`."""

    number: int


@dataclass(frozen=True)
class ParameterRef:
    """Stands for a parameter, by its name in the model."""

    name: str


@dataclass(frozen=True)
class SharedRef:
    """Stands for a mapping that some layers write and others read, such as shared keys and values."""

    number: int
    kind: Callable[[], MutableMapping[Any, Any]]


@dataclass
class Tree:
    """A pytree with references in place of its tensors."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    def join(
        self,
        values: NumberedValues,
        parameters: Mapping[str, torch.Tensor],
        shared: Mapping[int, MutableMapping[Any, Any]] | None = None,
    ) -> Any:
        """The pytree with tensors and shared mappings in their places."""

        def place(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.number]
            if isinstance(leaf, ParameterRef):
                if leaf.name not in parameters:
                    raise CannotFollow(
                        f"its forward uses '{leaf.name}' between its layers, which it did not when it was wrapped, as "
                        "in a layer that is called only with pictures; use_sequential_preset=False wraps it part by "
                        "part"
                    )
                return parameters[leaf.name]
            if isinstance(leaf, SharedRef):
                return (shared or {})[leaf.number]
            return leaf

        return pytree.tree_unflatten([place(leaf) for leaf in self.leaves], self.spec)

    def numbers(self) -> set[int]:
        return {leaf.number for leaf in self.leaves if isinstance(leaf, Ref)}

    def shared(self) -> dict[int, Callable[[], MutableMapping[Any, Any]]]:
        return {leaf.number: leaf.kind for leaf in self.leaves if isinstance(leaf, SharedRef)}


@dataclass
class Glue:
    """An operation between two layer calls, to be repeated on the real values."""

    function: Callable[..., Any]
    arguments: Tree
    results: list[int | None]
    grad: bool

    def run(self, values: NumberedValues, parameters: Mapping[str, torch.Tensor]) -> None:
        args, kwargs = self.arguments.join(values, parameters)
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            result = self.function(*args, **kwargs)
        for number, leaf in zip(self.results, pytree.tree_leaves(result), strict=True):
            if number is not None:
                values[number] = leaf


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        arguments: `(args, kwargs)`.
        outputs: numbers of its output's leaves, None for a leaf that is not a tensor.
        output_spec: of its output.
        glue: the operations between this call and the next.
        kept: numbers of the values that are still needed after the next call begins.
        kept_shared: numbers of the shared mappings that later calls get.
        collected: keys under which the model collects values inside its layers.
        first: the first call that collects into the same place.
        selected: the hidden states that are collected, by their numbers; None: all.
        shapes: of its output's leaves, None for a leaf that is not a tensor.
    """

    arguments: Tree
    outputs: list[int | None]
    output_spec: pytree.TreeSpec
    glue: list[Glue] = field(default_factory=list)
    kept: tuple[int, ...] = ()
    kept_shared: tuple[int, ...] = ()
    collected: tuple[str, ...] = ()
    first: int = 0
    selected: frozenset[int] | None = None
    shapes: tuple[torch.Size | None, ...] = ()

    def mask_and_positions(self) -> tuple[int | None, int | None]:
        """The numbers of the values that transformers gives its layers by these names."""
        _, kwargs = pytree.tree_unflatten(self.arguments.leaves, self.arguments.spec)
        mask, positions = (kwargs.get(name) for name in ("attention_mask", "position_ids"))
        return (
            mask.number if isinstance(mask, Ref) else None,
            positions.number if isinstance(positions, Ref) else None,
        )


_AS_IT_IS = Ending()


@dataclass
class Program:
    """One microbatch's path through the model.

    Attributes:
        calls: in order.
        inputs: `(args, kwargs)` of the model's forward; of numbers that only towers needed, the `Shape`.
        carried: numbers of the values made before the last call that the end of the forward reads.
        ending: what is done with its outputs.
        alike: its calls all have the same arguments but for the hidden states, which each takes from the one before.
        documents: of packed rows, by the numbers of the mask and the positions of the calls that take them.
        returned: what the modules returned that ran before the layers, without values; None: they run again.
    """

    calls: list[LayerCall]
    inputs: Tree
    carried: dict[Made, int]
    ending: Ending = _AS_IT_IS
    alike: bool = False
    documents: dict[tuple[int | None, int | None], _core.Documents] = field(default_factory=dict)
    returned: list[Returned] | None = None


@dataclass
class Recorded:
    """One call of a layer, as seen in the recording run."""

    layer: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: list[Any]
    output_spec: pytree.TreeSpec
    collected: tuple[str, ...]
    first: int
    selected: frozenset[int] | None


class Compiler:
    """Numbers the tensors of a recording run and keeps the operations that the calls need."""

    def __init__(self, ops: list[Op], calls: list[Recorded], inputs: tuple[Any, Any], returned: list[Returned]) -> None:
        self._ops = ops
        self._calls = calls
        self._inputs = inputs
        self._returned = returned
        self._numbers: dict[int, int] = {}
        self._held: list[torch.Tensor] = []
        self._shared: dict[int, int] = {}
        self.values: NumberedValues = {}

    def compile(self, ends: Iterable[Made]) -> Program:
        """Makes the program, which carries `ends` to its end; values that the run already has stay in `values`.

        Raises:
            CannotFollow: an argument holds tensors in a place that cannot be inspected.
        """
        ends = list(ends)
        used_up = numbers_given(self._inputs) if self._returned else {}
        left_behind = {id(value) for made, value in used_up.items() if made not in ends}
        left_behind -= {id(value) for made, value in used_up.items() if made in ends}
        inputs = self._tree(self._inputs, "the model", left_behind)
        calls = [
            LayerCall(
                self._tree(call.arguments, f"layer {call.layer}"),
                [self._number(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in call.outputs],
                call.output_spec,
                collected=call.collected,
                first=call.first,
                selected=call.selected,
                shapes=tuple(leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in call.outputs),
            )
            for call in self._calls
        ]
        glue = {(op.segment, op.number): op for op in self._ops if op.glue}
        carried = {}
        for made in ends:
            kind, *place, index = made
            if kind == "input":
                continue  # stays among the inputs
            if kind == "output":
                leaf = self._calls[place[0]].outputs[index]
            elif kind == "tower":
                leaf = self._returned[place[0]].leaves[index]
            else:
                leaf = glue[place[0], place[1]].results[index]
            if isinstance(leaf, torch.Tensor):
                carried[made] = self._number(leaf)
        self._place_glue(calls, set(carried.values()))
        self._find_kept(calls, inputs, set(carried.values()))
        needed = calls[0].arguments.numbers() | set(calls[0].kept) | self._needed_by_glue(calls[0])
        self.values = {number: value for number, value in self.values.items() if number in needed}
        return Program(calls, inputs, carried, returned=[each.without_values() for each in self._returned])

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(tensor), len(self._numbers))
        if number == len(self._held):
            self._held.append(tensor)
            if not isinstance(tensor, Placeholder):
                self.values[number] = tensor
        return number

    def _tree(self, tree: Any, whose: str, left_behind: Container[int] = ()) -> Tree:
        leaves, spec = pytree.tree_flatten(tree)
        marked: list[Any] = []
        for leaf in leaves:
            if id(leaf) in left_behind:
                marked.append(Shape.of(leaf))
            elif isinstance(leaf, Placeholder) and leaf.label is not None:
                marked.append(ParameterRef(leaf.label))
            elif isinstance(leaf, torch.Tensor):
                marked.append(Ref(self._number(leaf)))
            elif isinstance(leaf, MutableMapping):
                if len(leaf):
                    raise CannotFollow(f"{whose} is called with a {type(leaf).__name__} that is not empty before it")
                marked.append(SharedRef(self._shared.setdefault(id(leaf), len(self._shared)), type(leaf)))
            elif holds_tensors(leaf):
                raise CannotFollow(
                    f"{whose} is called with a {type(leaf).__name__}, which holds tensors and cannot be moved to "
                    "another device"
                )
            else:
                marked.append(leaf)
        return Tree(marked, spec)

    def _place_glue(self, calls: list[LayerCall], carried: set[int]) -> None:
        """Works backwards: keeps an operation if something later needs its result, or if it writes in place."""
        needed = set(carried)
        segment = len(calls)
        for op in reversed(self._ops):
            while segment > op.segment:
                segment -= 1
                if segment < len(calls):
                    needed |= calls[segment].arguments.numbers()
            results = [None if result is None else self._number(result) for result in op.results]
            if not op.in_place and not any(number in needed for number in results):
                continue
            if op.segment == 0:
                raise CannotFollow(
                    f"what its first layer is called with depends on parameters of the layers ({op.function.__name__})"
                )
            arguments = self._tree(op.arguments, f"the operation {op.function.__name__}")
            needed |= arguments.numbers()
            calls[op.segment - 1].glue.insert(0, Glue(op.function, arguments, results, op.grad))

    @staticmethod
    def _needed_by_glue(call: LayerCall) -> set[int]:
        made = {number for number in call.outputs if number is not None}
        needed: set[int] = set()
        for glue in call.glue:
            needed |= glue.arguments.numbers() - made
            made |= {number for number in glue.results if number is not None}
        return needed

    def _find_kept(self, calls: list[LayerCall], inputs: Tree, carried: set[int]) -> None:
        after = inputs.numbers() | carried | {n for n in calls[-1].outputs if n is not None}
        for index in range(len(calls) - 1, -1, -1):
            call = calls[index]
            call.kept = tuple(sorted(after))
            call.kept_shared = tuple({n for later in calls[index + 1 :] for n in later.arguments.shared()})
            made = {n for n in call.outputs if n is not None}
            made |= {n for glue in call.glue for n in glue.results if n is not None}
            after = (after - made) | call.arguments.numbers() | self._needed_by_glue(call)


def calls_are_alike(program: Program) -> bool:
    """Whether a program has `Program.alike`, and nothing happens besides its calls."""
    first, before = program.calls[0].arguments, None
    args, _ = pytree.tree_unflatten(first.leaves, first.spec)
    if program.carried or not args:
        return False
    for call in program.calls:
        hidden, *others = call.arguments.leaves
        if call.glue or call.collected or call.kept_shared or call.arguments.shared() or len(call.outputs) != 1:
            return False
        if not isinstance(hidden, Ref) or (before is not None and hidden.number != before):
            return False
        if call.arguments.spec != first.spec or not all(map(_equal, others, first.leaves[1:])):
            return False
        before = call.outputs[0]
    return True


class Template:
    """A program that another microbatch of the same form takes over, given the arguments of the first call.

    Args:
        program: its calls are alike.
        values: what the first call had.
        inputs: `(args, kwargs)` of the model's forward.
    """

    def __init__(self, program: Program, values: NumberedValues, inputs: Any) -> None:
        self._program = program
        self._order = tuple(values)
        self._shapes = _shapes(inputs)

    def accepts(self, inputs: Any) -> bool:
        """Whether arguments of the forward have the form of these."""
        return _shapes(inputs) == self._shapes and self._matched(self._program.inputs, inputs, {})

    def again(self, inputs: Any, first: Any, returned: list[Returned]) -> tuple[Program, NumberedValues] | None:
        """The program and its values for other arguments of the forward, which it accepts, and of the first call; None
        if these are of another form. `returned`: see `Program`."""
        found: NumberedValues = {}
        call = self._program.calls[0]
        matched = self._matched(self._program.inputs, inputs, found) and self._matched(call.arguments, first, found)
        if not matched or not found.keys() >= set(self._order) or first[0][0].shape != call.shapes[0]:
            return None
        return replace(self._program, returned=returned), {number: found[number] for number in self._order}

    @staticmethod
    def _matched(tree: Tree, given: Any, found: NumberedValues) -> bool:
        """Adds the tensors of `given` to `found`; False if it is not like `tree`."""
        leaves, spec = pytree.tree_flatten(given)
        if spec != tree.spec:
            return False
        for mine, leaf in zip(tree.leaves, leaves, strict=True):
            if isinstance(mine, Shape):
                if not isinstance(leaf, torch.Tensor) or mine != Shape.of(leaf):
                    return False
            elif isinstance(mine, Ref):
                if not isinstance(leaf, torch.Tensor) or found.setdefault(mine.number, leaf) is not leaf:
                    return False
            elif not _equal(mine, leaf):
                return False
        return True


def _shapes(tree: Any) -> list[torch.Size | None]:
    return [leaf.shape if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(tree)]


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (*_PLAIN, Ref)) and bool(a == b))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DEEPEST = 4


def holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object that torch cannot take apart contains tensors."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (*_PLAIN, type, nn.Module)) or depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        inner: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    else:
        inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(holds_tensors(part, depth + 1) for part in list(inner))
