"""Cuts a call's arguments into microbatches and puts the microbatches' outputs together.

Arguments, labels and outputs are pytrees (`torch.utils._pytree`, which knows Hugging Face's `ModelOutput`).
Left to itself a tensor of shape (batch, ...) is cut along dim 0 into views, larger slices first, so gradients flow
through; everything else is replicated. So is a tensor of shape (1, ...) beside larger ones, as broadcasting would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class PackedMicrobatches(list[Any]):
    """The unmerged outputs of a model, element i from microbatch i.

    The next RoundPipe model takes it anywhere among its arguments: its microbatch i gets element i.
    """

    def __repr__(self) -> str:
        return f"PackedMicrobatches({super().__repr__()})"


def effective_microbatches(args: Args, kwargs: Kwargs, n: int, is_default: bool, split_input: Any = None) -> int:
    """How many microbatches the call really runs.

    Packed arguments decide the number. Otherwise a default `n` is lowered to the batch size, and to 1 where nothing
    can be split; a number that somebody asked for stays.

    Raises:
        ValueError: packed arguments disagree with each other or with a number that was asked for.
    """
    if _is_function(split_input):
        return n
    tree = _Tree((args, kwargs), "", _call_specs(args, kwargs, split_input))
    lengths = {len(leaf) for leaf in tree.leaves if isinstance(leaf, PackedMicrobatches)}
    if lengths:
        if len(lengths) > 1 or not (is_default or lengths == {n}):
            expected = "the same number in all of them" if is_default else f"num_microbatch = {n}"
            raise ValueError(
                f"[split_call] packed arguments hold {' and '.join(map(str, sorted(lengths)))} microbatches, expected "
                f"{expected}; give the models in a row the same num_microbatch, or leave it out"
            )
        return lengths.pop()
    if not is_default:
        return n
    return max(1, min(n, max(tree.sizes.values(), default=1)))


def split_call(args: Args, kwargs: Kwargs, n: int, split_input: Any = None) -> list[tuple[Args, Kwargs]]:
    """Cuts the arguments of a call into `n` microbatches.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        n: number of microbatches, from `effective_microbatches`. With 1 the tensors are passed on as they are.
        split_input: `None` for automatic splitting; `(args_spec | None, kwargs_spec | None)`, each a tree of
            `TensorChunkSpec(dim)` and `_Replicate` in which an entry stands for all below it and a missing keyword or
            `None` is automatic; or a function `(args, kwargs, n) -> (list of args, list of kwargs)`.

    Returns:
        `n` pairs (args, kwargs).

    Raises:
        ValueError: sizes that disagree, an empty batch, fewer samples than microbatches, nothing to split, a spec that
            does not match the arguments, or a function that returns something else than described.
    """
    if _is_function(split_input):
        return _split_by_function(split_input, args, kwargs, n)
    tree = _Tree((args, kwargs), "", _call_specs(args, kwargs, split_input))
    has_packed = any(isinstance(leaf, PackedMicrobatches) for leaf in tree.leaves)
    if n > 1 and not (tree.sizes or has_packed or split_input is not None):
        raise ValueError(
            f"[split_call] the arguments hold no tensor that could be split into {n} microbatches; "
            "set num_microbatch=1, or give split_input"
        )
    return tree.split(n, "split_call")


def split_label(label: Any, n: int, spec: Any = None) -> list[Any]:
    """Cuts a label into `n` microbatches like `split_call`; a label without tensors, as `None`, is replicated.

    Args:
        label: a pytree.
        n: number of microbatches.
        spec: `None` for automatic splitting, a tree of chunk specs, or a function `(label, n) -> list`.

    Raises:
        ValueError: as in `split_call`.
    """
    if _is_function(spec):
        parts = spec(label, n)
        if not isinstance(parts, (list, tuple)) or len(parts) != n:
            raise ValueError(f"[split_label] the function returned {_describe(parts)}, expected a list of {n} labels")
        return list(parts)
    return _Tree(label, "label", _spread(spec, label, "split_label", "label")).split(n, "split_label")


def merge_outputs(outputs: list[Any], merge_output: Any = None) -> Any:
    """Puts the outputs of all microbatches together.

    Args:
        outputs: one pytree a microbatch, all of the same structure.
        merge_output: `None` or True for automatic merging: tensors of shape (batch, ...) are concatenated along dim 0,
            floating scalars (0-dim tensors and Python floats) averaged, and anything else must be the same in all.
            False packs the list. A tree of `TensorChunkSpec(dim)` (concatenate), `_Replicate` (take the first)
            and reducers says it leaf by leaf; a function gets the list and returns the result.

    Raises:
        ValueError: no outputs, different structures, or leaves that cannot be merged.
    """
    if not outputs:
        raise ValueError("[merge_outputs] there are no outputs, expected those of at least one microbatch")
    if merge_output is False:
        return PackedMicrobatches(outputs)
    if _is_function(merge_output):
        return merge_output(outputs)
    automatic = merge_output is None or merge_output is True
    if automatic and len(outputs) == 1:
        return outputs[0]
    columns, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise ValueError(
                f"[merge_outputs] microbatch {i} returned the structure {structure}, microbatch 0 {structures[0]}; "
                "expected the same in all; set merge_output to False or to a function of the list"
            )
    specs = _spread(None if automatic else merge_output, outputs[0], "merge_outputs", "output")
    merged = []
    for index, (spec, values) in enumerate(zip(specs, zip(*columns, strict=True), strict=True)):
        try:
            merged.append(_merge_leaf(list(values), spec))
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"[merge_outputs] {_path(outputs[0], index, 'output')} cannot be merged: {error}; "
                "set merge_output to False, a chunk spec tree or a function of the list"
            ) from error
    return pytree.tree_unflatten(merged, structures[0])


def _merge_leaf(values: list[Any], spec: Any) -> Any:
    first = values[0]
    tensors = all(isinstance(value, torch.Tensor) for value in values)
    if spec is not None:
        chunk_spec, _, reducer = _spec_types()
        if isinstance(spec, reducer):
            return functools.reduce(spec.reduce_fn, values, spec.init_value)
        if not isinstance(spec, chunk_spec):
            return first
        if not tensors:
            raise ValueError(f"{spec} stands for a {type(first).__name__}, expected a tensor")
        return torch.cat(values, dim=spec.split_dim)
    if tensors and first.dim() > 0:
        return torch.cat(values)
    if tensors and all(value.dim() == 0 for value in values) and (first.is_floating_point() or first.is_complex()):
        return torch.stack(values).mean(0)
    if all(type(value) is float for value in values):
        return math.fsum(values) / len(values)
    for i, value in enumerate(values):
        if not _same(value, first):
            raise ValueError(f"microbatch {i} returned {_describe(value)}, microbatch 0 {_describe(first)}")
    return first


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    try:
        return bool(a == b)
    except (ValueError, TypeError, RuntimeError):  # arrays, whose comparison has no single truth value
        return False


@dataclass
class _Tree:
    """A pytree, with one chunk spec or None a leaf, and what can be split in it."""

    tree: Any
    root: str
    specs: list[Any]

    def __post_init__(self) -> None:
        self.leaves, self.structure = pytree.tree_flatten(self.tree)
        # The dimension along which a leaf is split; a leaf that is not in here is replicated, or packed.
        self.dims: dict[int, int] = {}
        for i, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if spec is None:
                if leaf.dim() > 0:
                    self.dims[i] = 0
            elif isinstance(spec, _spec_types()[0]):
                if not -leaf.dim() <= spec.split_dim < leaf.dim():
                    raise ValueError(
                        f"[split] {self.path(i)} has shape {tuple(leaf.shape)}, expected a dimension "
                        f"{spec.split_dim} to split as its chunk spec says; use _Replicate for it"
                    )
                self.dims[i] = spec.split_dim
        beside = max((self.leaves[i].size(d) for i, d in self.dims.items()), default=0)
        if beside > 1 or any(isinstance(leaf, PackedMicrobatches) for leaf in self.leaves):
            self.dims = {i: d for i, d in self.dims.items() if self.specs[i] is not None or self.leaves[i].size(d) != 1}
        self.sizes = {i: self.leaves[i].size(d) for i, d in self.dims.items()}

    def path(self, index: int) -> str:
        return _path(self.tree, index, self.root)

    def split(self, n: int, where: str) -> list[Any]:
        if n < 1:
            raise ValueError(f"[{where}] the number of microbatches is {n}, expected at least 1")
        if self.sizes and max(self.sizes.values()) == 0:
            raise ValueError(f"[{where}] the batch is empty: {self.path(min(self.sizes))} has no samples")
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, PackedMicrobatches) and len(leaf) != n:
                raise ValueError(f"[{where}] {self.path(i)} packs {len(leaf)} microbatches, expected {n}")
        if n > 1 and self.sizes:
            self.check_sizes(n, where)
        columns = [self.column(i, n) for i in range(len(self.leaves))]
        return [pytree.tree_unflatten([column[k] for column in columns], self.structure) for k in range(n)]

    def check_sizes(self, n: int, where: str) -> None:
        first = min(self.sizes)
        size = self.sizes[first]
        for i, other in self.sizes.items():
            if other != size:
                raise ValueError(
                    f"[{where}] {self.path(i)} has {other} samples (shape {tuple(self.leaves[i].shape)}, split along "
                    f"dim {self.dims[i]}) and {self.path(first)} has {size}, expected the same batch size; say with a "
                    "chunk spec or a function how to split them, _Replicate for what is no batch"
                )
        if size < n:
            raise ValueError(
                f"[{where}] {self.path(first)} has {size} samples, fewer than the {n} microbatches; "
                f"expected at least one sample for each: set num_microbatch to {size} or less"
            )

    def column(self, index: int, n: int) -> list[Any]:
        """What each of the `n` microbatches gets of a leaf."""
        leaf = self.leaves[index]
        if isinstance(leaf, PackedMicrobatches):
            return list(leaf)
        if n == 1 or index not in self.dims:
            return [leaf] * n
        return list(torch.tensor_split(leaf, n, dim=self.dims[index]))


def _split_by_function(split: Callable[..., Any], args: Args, kwargs: Kwargs, n: int) -> list[tuple[Args, Kwargs]]:
    result = split(args, kwargs, n)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(
            f"[split_call] the split_input function returned {_describe(result)}, expected a pair "
            "(list of args, list of kwargs)"
        )
    for name, part, types in (("args", result[0], (tuple, list)), ("kwargs", result[1], (dict,))):
        if not isinstance(part, (tuple, list)) or len(part) != n:
            raise ValueError(
                f"[split_call] the split_input function returned {_describe(part)} for the {name}, "
                f"expected a list of {n}, one entry a microbatch"
            )
        for i, entry in enumerate(part):
            if not isinstance(entry, types):
                raise ValueError(
                    f"[split_call] the split_input function returned {_describe(entry)} as the {name} of microbatch "
                    f"{i}, expected a {types[0].__name__}"
                )
    return [(tuple(a), dict(k)) for a, k in zip(*result, strict=True)]


@functools.cache
def _spec_types() -> tuple[Any, Any, Any]:
    """TensorChunkSpec, _Replicate and _CustomReducer; imported late because torch.distributed is slow to load."""
    from torch.distributed.pipelining import microbatch

    return microbatch.TensorChunkSpec, microbatch._Replicate, microbatch._CustomReducer


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)  # the class _Replicate is itself a spec


def _call_specs(args: Args, kwargs: Kwargs, split_input: Any) -> list[Any]:
    args_spec, kwargs_spec = (None, None) if split_input is None else split_input
    return [
        *_spread(args_spec, tuple(args), "split_call", "args"),
        *_spread(kwargs_spec, dict(kwargs), "split_call", "kwargs"),
    ]


def _spread(spec: Any, tree: Any, where: str, path: str) -> list[Any]:
    """One spec or None for each leaf of `tree`; a spec stands for all leaves below its place."""
    if spec is None:
        return [None] * len(pytree.tree_leaves(tree))
    types = _spec_types()
    if isinstance(spec, types) or spec in types:
        return [spec] * len(pytree.tree_leaves(tree))
    children = pytree.tree_leaves(tree, is_leaf=lambda node: node is not tree)
    if not pytree.tree_is_leaf(tree):
        if isinstance(tree, Mapping) and isinstance(spec, Mapping) and not spec.keys() - tree.keys():
            return [
                leaf
                for (key, child) in zip(tree.keys(), children, strict=True)
                for leaf in _spread(spec.get(key), child, where, f"{path}[{key!r}]")
            ]
        if isinstance(spec, (tuple, list)) and len(spec) == len(children):
            return [
                leaf
                for i, (part, child) in enumerate(zip(spec, children, strict=True))
                for leaf in _spread(part, child, where, f"{path}[{i}]")
            ]
    raise ValueError(
        f"[{where}] the spec of {path} is {spec!r}, which does not match {_describe(tree)}; "
        "expected TensorChunkSpec(dim), _Replicate, None or a container of the same shape"
    )


def _path(tree: Any, index: int, root: str) -> str:
    """Names a leaf, as `kwargs['mask']`."""
    try:
        path = pytree.keystr(pytree.tree_flatten_with_path(tree)[0][index][0])
    except (ValueError, TypeError):  # a container registered without names of its children
        return f"leaf {index} of {root or 'the arguments'}"
    if not root:
        root, path = ("args", path[3:]) if path.startswith("[0]") else ("kwargs", path[3:])
    return root + path


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.dim() == 0 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
