"""Cuts a call's arguments into microbatches and merges the microbatches' outputs.

Arguments, labels and outputs are pytrees (`torch.utils._pytree`, which knows Hugging Face's `ModelOutput`).
By default, a tensor whose first dimension is the batch's is cut along it into views, larger slices first, so that
gradients flow back to it. Everything else is replicated.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.data.packed import RoundPipePackedData

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def effective_microbatches(args: Args, kwargs: Kwargs, n: int, is_default: bool, split_input: Any = None) -> int:
    """The number of microbatches of a call, unless a function cuts it.

    Packed arguments decide the number, with a warning if another number was requested. Otherwise there are at most as
    many microbatches as the batch has rows. If nothing can be split, a default `n` becomes 1; a requested number stays,
    and every microbatch gets the same values.
    """
    if _is_function(split_input):
        return n
    tree = _Tree((args, kwargs), "", _call_specs(args, kwargs, split_input))
    lengths = {len(leaf) for leaf in tree.leaves if isinstance(leaf, RoundPipePackedData)}
    if lengths:
        fewest = min(lengths)
        if len(lengths) > 1:
            warnings.warn(
                f"[RoundPipe] Batch index {fewest} out of range for RoundPipePackedData input, downsizing batch size "
                f"to {fewest}. The packed arguments hold {' and '.join(map(str, sorted(lengths)))} microbatches; what "
                "is beyond is not used",
                stacklevel=3,
            )
        elif not is_default and lengths != {n}:
            warnings.warn(
                f"[RoundPipe] the packed arguments hold {fewest} microbatches, and num_microbatch is {n}; "
                f"{fewest} are run. Give the models in a row the same num_microbatch, or leave it out",
                stacklevel=3,
            )
        return fewest
    if not tree.sizes:
        return 1 if is_default else n
    rows: int = min(tree.sizes.values())
    return max(1, min(n, rows))


def split_call(args: Args, kwargs: Kwargs, n: int, split_input: Any = None) -> list[tuple[Args, Kwargs]]:
    """Cuts the arguments of a call into microbatches.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        n: number of microbatches, from `effective_microbatches`. With 1 the tensors are passed on unchanged.
        split_input: `None` for automatic splitting; `(args_spec | None, kwargs_spec | None)`, each a tree of
            `TensorChunkSpec(dim)` and `_Replicate`, in which an entry applies to everything below it and a missing
            keyword or `None` is automatic; or a function `(args, kwargs, n) -> (list of args, list of kwargs)`, which
            may return a number of microbatches other than `n`.

    Returns:
        `n` pairs (args, kwargs), or as many as the function has made.

    Raises:
        ValueError: the batch is empty, has fewer rows than microbatches, a spec does not match the arguments, or a
            function returns something other than described.
    """
    if _is_function(split_input):
        return _split_by_function(split_input, args, kwargs, n)
    tree = _Tree((args, kwargs), "", _call_specs(args, kwargs, split_input))
    if n > 1:
        tree.warn_of_doubts()
    return tree.split(n, "split_call")


def split_label(label: Any, n: int, spec: Any = None) -> list[Any]:
    """Cuts a label into `n` microbatches; every tensor with dimensions is cut, anything else replicated.

    Args:
        label: a pytree.
        n: number of microbatches.
        spec: `None` for automatic splitting, a tree of chunk specs, or a function `(label, n) -> list`.

    Raises:
        ValueError: tensors whose sizes disagree, or as in `split_call`.
    """
    if _is_function(spec):
        parts = spec(label, n)
        if not isinstance(parts, (list, tuple)) or len(parts) != n:
            raise ValueError(f"[split_label] the function returned {_describe(parts)}, expected a list of {n} labels")
        return list(parts)
    return _Tree(label, "label", _spread(spec, label, "split_label", "label"), is_label=True).split(n, "split_label")


def merge_outputs(outputs: list[Any], merge_output: Any = None) -> Any:
    """Merges the outputs of all microbatches.

    Args:
        outputs: one pytree for each microbatch, all of the same structure.
        merge_output: `None` or True for automatic merging: tensors of shape (batch, ...) are concatenated along dim 0,
            scalars (0-dim tensors of numbers, and Python floats) are averaged, and anything else must be the same in
            all microbatches. False packs them: the outputs' structure with a `RoundPipePackedData` at every leaf. A
            tree of `TensorChunkSpec(dim)` (concatenate), `_Replicate` (take the first) and reducers decides for each
            leaf; a function gets the list and returns the result.

    Raises:
        ValueError: no outputs, different structures, or leaves that cannot be merged.
    """
    if not outputs:
        raise ValueError("[merge_outputs] there are no outputs, expected those of at least one microbatch")
    if merge_output is False:
        return _packed(outputs)
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


def merge_what_fits(outputs: list[Any]) -> Any:
    """Merges outputs leaf by leaf, for code that expects the outputs of a plain module.

    Like `merge_outputs`, with two differences. If a leaf has one row in every microbatch while the batch has more rows,
    it is the same for all rows and taken once. Leaves that cannot be merged are packed, so they can still be passed on.
    """
    columns, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if len(outputs) == 1 or any(structure != structures[0] for structure in structures):
        return outputs[0] if len(outputs) == 1 else RoundPipePackedData(outputs)
    leaves = [RoundPipePackedData(values) for values in zip(*columns, strict=True)]
    several = any(max(leaf.rows() or [1]) > 1 for leaf in leaves)
    return pytree.tree_unflatten([_merged_or_packed(leaf, several) for leaf in leaves], structures[0])


def _merged_or_packed(values: RoundPipePackedData, several: bool) -> Any:
    """Merges one leaf, or packs it. `several`: the microbatches have more than one row."""
    if several and set(values.rows() or ()) == {1} and all(_same(value, values[0]) for value in values):
        return values[0]
    try:
        return _merge_leaf(list(values), None)
    except (ValueError, RuntimeError):
        return values


def _packed(outputs: list[Any]) -> Any:
    """Packs every leaf; outputs of different structures are packed whole."""
    columns, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        return RoundPipePackedData(outputs)
    return pytree.tree_unflatten([RoundPipePackedData(leaf) for leaf in zip(*columns, strict=True)], structures[0])


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
    if tensors and all(value.dim() == 0 and value.dtype != torch.bool for value in values):
        stacked = torch.stack(values)
        return stacked.mean(0) if stacked.is_floating_point() or stacked.is_complex() else stacked.sum(0) / len(values)
    if all(type(value) is float for value in values):
        if all(value == first for value in values):
            return first
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
    except (ValueError, TypeError, RuntimeError):  # a comparison of arrays has no single truth value
        return False


@dataclass
class _Tree:
    """A pytree with one chunk spec or None for each leaf, and the information which leaves can be split."""

    tree: Any
    root: str
    specs: list[Any]
    is_label: bool = False  # every tensor is split, whatever the size of its first dimension

    def __post_init__(self) -> None:
        self.leaves, self.structure = pytree.tree_flatten(self.tree)
        # The dimension along which a leaf is split. A leaf without an entry is replicated, or packed.
        self.dims: dict[int, int] = {}
        self.doubtful: list[int] = []  # replicated, although it is unclear which tensors hold the batch
        # For packed tensors, the rows of their microbatches; first by leaf, then only those that make up the batch.
        packed = {i: leaf.rows() for i, leaf in enumerate(self.leaves) if isinstance(leaf, RoundPipePackedData)}
        self.packed_rows: list[int] | None = None
        automatic = []
        for i, (leaf, spec) in enumerate(zip(self.leaves, self.specs, strict=True)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if spec is None:
                if leaf.dim() > 0:
                    automatic.append(i)
            elif isinstance(spec, _spec_types()[0]):
                if not -leaf.dim() <= spec.split_dim < leaf.dim():
                    raise ValueError(
                        f"[split] {self.path(i)} has shape {tuple(leaf.shape)}, expected a dimension "
                        f"{spec.split_dim} to split as its chunk spec says; use _Replicate for it"
                    )
                self.dims[i] = spec.split_dim
        self.choose(automatic, {i: rows for i, rows in packed.items() if rows is not None}, bool(packed))
        self.sizes = {i: self.leaves[i].size(d) for i, d in sorted(self.dims.items())}

    def choose(self, automatic: list[int], packed: dict[int, list[int]], is_packed: bool) -> None:
        """Chooses which tensors without a spec are split: those with as many rows as the batch.

        Chunk specs give the number of the batch's rows; without specs it is the most common number among the positional
        tensors, else among all tensors; the first one wins a tie. For packed tensors, the rows of their microbatches
        are added up.

        Args:
            automatic: the tensors without a spec that have dimensions.
            packed: for packed tensors, the rows of their microbatches.
            is_packed: there are packed values, tensors or others.
        """
        sizes = {i: self.leaves[i].size(0) for i in automatic}
        if is_packed or (self.is_label and max(sizes.values(), default=1) > 1):
            # A single row beside a batch stands for all rows, as in broadcasting.
            sizes = {i: size for i, size in sizes.items() if size != 1}
        if self.is_label:
            self.dims.update(dict.fromkeys(sizes, 0))
            return
        rows = dict(sorted((sizes | {i: sum(each) for i, each in packed.items()}).items()))
        decisive = {i: size for i, size in rows.items() if i < self.positional} or rows
        if self.dims:
            first = min(self.dims)
            batch, doubted = self.leaves[first].size(self.dims[first]), sizes
        elif decisive:
            batch, doubted = Counter(decisive.values()).most_common(1)[0][0], decisive
        else:
            return
        self.packed_rows = next((each for each in packed.values() if sum(each) == batch), None)
        for i, size in sizes.items():
            if size == batch:
                self.dims[i] = 0
            elif size != 1 and i in doubted:
                self.doubtful.append(i)

    @property
    def positional(self) -> int:
        """Number of a call's leaves that belong to positional arguments."""
        return len(pytree.tree_leaves(self.tree[0]))

    def warn_of_doubts(self) -> None:
        """Warns about tensors that every microbatch gets whole, although they may have been meant to be cut."""
        if not self.doubtful:
            return
        first = min(self.sizes, default=None)
        batch = "" if first is None else f" of {self.sizes[first]} rows, as {self.path(first)}"
        others = ", ".join(f"{self.path(i)} {tuple(self.leaves[i].shape)}" for i in self.doubtful)
        warnings.warn(
            f"[RoundPipe] some tensors do not have the rows of the batch{batch}, so every microbatch gets these whole: "
            f"{others}; give split_input a chunk spec that cuts them, or _Replicate if this is intended",
            stacklevel=3,
        )

    def path(self, index: int) -> str:
        return _path(self.tree, index, self.root)

    def split(self, n: int, where: str) -> list[Any]:
        if n < 1:
            raise ValueError(f"[{where}] the number of microbatches is {n}, expected at least 1")
        if self.sizes and max(self.sizes.values()) == 0:
            raise ValueError(f"[{where}] the batch is empty: {self.path(min(self.sizes))} has no samples")
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, RoundPipePackedData) and len(leaf) < n:
                raise ValueError(f"[{where}] {self.path(i)} packs {len(leaf)} microbatches, expected {n}")
        if n > 1 and self.sizes:
            self.check_sizes(n, where)
        columns = [self.column(i, n) for i in range(len(self.leaves))]
        return [pytree.tree_unflatten([column[k] for column in columns], self.structure) for k in range(n)]

    def check_sizes(self, n: int, where: str) -> None:
        """Checks that leaves without a spec have one size, and that all leaves have a row for each microbatch."""
        automatic = {i: size for i, size in self.sizes.items() if self.specs[i] is None}
        first = min(automatic or self.sizes)
        size = self.sizes[first]
        for i, other in automatic.items():
            if other != size:
                raise ValueError(
                    f"[{where}] {self.path(i)} has {other} samples (shape {tuple(self.leaves[i].shape)}, split along "
                    f"dim {self.dims[i]}) and {self.path(first)} has {size}, expected the same batch size; give "
                    "split_input a chunk spec or a function that splits them, and _Replicate for what is not cut"
                )
        first = min(self.sizes, key=self.sizes.__getitem__)
        size = self.sizes[first]
        if size < n:
            raise ValueError(
                f"[{where}] {self.path(first)} has {size} samples, fewer than the {n} microbatches; "
                f"expected at least one sample for each: set num_microbatch to {size} or less"
            )

    def column(self, index: int, n: int) -> list[Any]:
        """Each of the `n` microbatches' values of a leaf."""
        leaf = self.leaves[index]
        if isinstance(leaf, RoundPipePackedData):
            return leaf[:n]
        if n == 1 or index not in self.dims:
            return [leaf] * n
        if self.packed_rows is not None and leaf.size(self.dims[index]) == sum(self.packed_rows):
            return list(torch.split(leaf, self.packed_rows, dim=self.dims[index]))[:n]
        return list(torch.tensor_split(leaf, n, dim=self.dims[index]))


def _split_by_function(split: Callable[..., Any], args: Args, kwargs: Kwargs, n: int) -> list[tuple[Args, Kwargs]]:
    result = split(args, kwargs, n)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(
            f"[split_call] the split_input function returned {_describe(result)}, expected a pair "
            "(list of args, list of kwargs)"
        )
    for name, part, types in (("args", result[0], (tuple, list)), ("kwargs", result[1], (dict,))):
        if not isinstance(part, (tuple, list)) or not part or len(part) != len(result[0]):
            raise ValueError(
                f"[split_call] the split_input function returned {_describe(part)} for the {name}, "
                f"expected a list with one entry for each microbatch, as long as the list of args"
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
    """Imports TensorChunkSpec, _Replicate and _CustomReducer; late, because torch.distributed is slow to load."""
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
    """One spec or None for each leaf of `tree`; a spec applies to all leaves below it."""
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
    """Names a leaf, for example `kwargs['mask']`."""
    try:
        path = pytree.keystr(pytree.tree_flatten_with_path(tree)[0][index][0])
    except (ValueError, TypeError):  # a container registered without names for its children
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
