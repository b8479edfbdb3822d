"""Cuts a call's arguments into microbatches and merges the microbatches' outputs.

Arguments, labels and outputs are pytrees (`torch.utils._pytree`, which knows Hugging Face's `ModelOutput`).
By default, a tensor whose first dimension is the batch's is cut along it into views, larger slices first, so that
gradients flow back to it. Everything else is replicated. The engine decides which tensors these are, and refuses the
others that nobody could have meant.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.data.labels import names_label
from roundpipe.data.packed import RoundPipePackedData

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_AUTOMATIC = _core.Cut()


def effective_microbatches(args: Args, kwargs: Kwargs, n: int, is_default: bool, split_input: Any = None) -> int:
    """The number of microbatches of a call, unless a function cuts it.

    Packed arguments decide the number, with a warning if another number was requested. Otherwise there are at most as
    many microbatches as the batch has rows. If nothing can be split, a default `n` becomes 1; a requested number stays,
    and every microbatch gets the same values.
    """
    if _is_function(split_input):
        return n
    leaves = _Leaves.of_call(args, kwargs, split_input)
    lengths = {len(leaf) for leaf in leaves.leaves if isinstance(leaf, RoundPipePackedData)}
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
    return _core.InputCut(leaves.described).count(None if is_default else n, n)


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
        ValueError: the batch is empty, has fewer rows than microbatches, a keyword argument that is a label has other
            rows than the batch, a spec does not match the arguments, or a function returns something other than
            described.
    """
    if _is_function(split_input):
        return _split_by_function(split_input, args, kwargs, n)
    leaves = _Leaves.of_call(args, kwargs, split_input)
    inputs = _core.InputCut(leaves.described)
    parts: list[tuple[Args, Kwargs]] = leaves.cut(inputs.cut(n), n)
    doubts = inputs.doubts() if n > 1 else ""
    if doubts:
        warnings.warn(doubts, stacklevel=2)
    return parts


def microbatch_rows(
    args: Args, kwargs: Kwargs, parts: list[tuple[Args, Kwargs]], split_input: Any = None
) -> list[int] | None:
    """The number of rows in each microbatch of a call; None if nothing tells.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        parts: what `split_call` has made of them.
        split_input: likewise.
    """
    if _is_function(split_input):
        return _core.rows_of([_Leaves.of_call(*part).described for part in parts])
    return _core.InputCut(_Leaves.of_call(args, kwargs, split_input).described).rows(len(parts))


def split_label(label: Any, n: int, spec: Any = None, rows: list[int] | None = None) -> list[Any]:
    """Cuts a label into `n` microbatches; every tensor with dimensions is cut, anything else replicated.

    Args:
        label: a pytree.
        n: number of microbatches.
        spec: `None` for automatic splitting, a tree of chunk specs, or a function `(label, n) -> list`.
        rows: of each microbatch of the inputs; None: nothing tells.

    Raises:
        ValueError: a tensor without a spec has other rows than the inputs, also if `n` is 1, or the label is a sequence
            of plain numbers and `n` is not; or as in `split_call`.
    """
    if _is_function(spec):
        parts = spec(label, n)
        if not isinstance(parts, (list, tuple)) or len(parts) != n:
            raise ValueError(f"[split_label] the function returned {_describe(parts)}, expected a list of {n} labels")
        return list(parts)
    leaves = _Leaves(label, _spread(spec, label, "split_label", "label"), "label")
    numbers = _numbers_in(label) if spec is None else 0
    described = [*leaves.described, *([_core.BatchLeaf("label", numbers=numbers)] if numbers else [])]
    return leaves.cut(_core.cut_labels(described, rows, n)[: len(leaves.leaves)], n)


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
                f"[merge_outputs] {_names(outputs[0], 'output', len(columns[0]))[index]} cannot be merged: {error}; "
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


class _Leaves:
    """The leaves of a pytree, and how the engine is to cut them.

    Args:
        tree: `(args, kwargs)` of a call, or a label.
        specs: a chunk spec or None for each leaf.
        root: the name of a label; empty for a call.
    """

    def __init__(self, tree: Any, specs: list[Any], root: str = "") -> None:
        self.leaves, self.structure = pytree.tree_flatten(tree)
        names = _names(tree, root, len(self.leaves))
        roles = [_core.BatchRole.LABEL] * len(self.leaves) if root else _roles(*tree)
        self.described = [
            _described(leaf, name, spec, role)
            for leaf, name, spec, role in zip(self.leaves, names, specs, roles, strict=True)
        ]

    @staticmethod
    def of_call(args: Args, kwargs: Kwargs, split_input: Any = None) -> _Leaves:
        return _Leaves((args, kwargs), _call_specs(args, kwargs, split_input))

    def cut(self, cuts: list[_core.LeafCut], n: int) -> list[Any]:
        """The tree of each microbatch."""
        columns = [_column(leaf, cut, n) for leaf, cut in zip(self.leaves, cuts, strict=True)]
        return [pytree.tree_unflatten([column[k] for column in columns], self.structure) for k in range(n)]


def _described(leaf: Any, name: str, spec: Any, role: _core.BatchRole) -> _core.BatchLeaf:
    chunk_spec = _spec_types()[0] if spec is not None else ()
    if isinstance(leaf, torch.Tensor) and isinstance(spec, chunk_spec):
        return _core.BatchLeaf(name, list(leaf.shape), _core.Cut.along(spec.split_dim), role)
    cut = _AUTOMATIC if spec is None or isinstance(spec, chunk_spec) else _core.Cut.whole()
    if isinstance(leaf, torch.Tensor):
        return _core.BatchLeaf(name, list(leaf.shape), cut, role)
    if isinstance(leaf, RoundPipePackedData):
        return _core.BatchLeaf(name, cut=cut, role=role, ready=len(leaf), ready_rows=leaf.rows() or [])
    return _core.BatchLeaf(name, cut=cut, role=role)


def _roles(args: Args, kwargs: Kwargs) -> list[_core.BatchRole]:
    roles = [_core.BatchRole.ARGUMENT] * len(pytree.tree_leaves(args))
    for name, value in kwargs.items():
        role = _core.BatchRole.LABEL if names_label(name) else _core.BatchRole.KEYWORD
        roles += [role] * len(pytree.tree_leaves(value))
    return roles


def _column(leaf: Any, cut: _core.LeafCut, n: int) -> list[Any]:
    """Each of the `n` microbatches' values of a leaf."""
    if isinstance(leaf, RoundPipePackedData):
        return leaf[:n]
    if cut.dimension < 0:
        return [leaf] * n
    starts = itertools.accumulate(cut.sizes, initial=0)
    return [leaf.narrow(cut.dimension, start, size) for start, size in zip(starts, cut.sizes, strict=False)]


def _numbers_in(label: Any) -> int:
    """The length of an array, or of a list or tuple of plain values, in a label without tensors; 0 if there is none."""
    leaves = pytree.tree_leaves(label, is_leaf=_is_numbers)
    if any(isinstance(leaf, (torch.Tensor, RoundPipePackedData)) for leaf in leaves):
        return 0
    return next((len(leaf) for leaf in leaves if _is_numbers(leaf)), 0)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return type(value) in (list, tuple) and len(value) > 1 and all(isinstance(v, (int, float, str)) for v in value)


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


def _names(tree: Any, root: str, count: int) -> list[str]:
    """Names the leaves of `(args, kwargs)` of a call, or of the tree `root`; for example `kwargs['mask']`."""
    try:
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    except (ValueError, TypeError):  # a container registered without names for its children
        return [f"leaf {index} of {root or 'the arguments'}" for index in range(count)]
    if root:
        return [root + path for path in paths]
    return [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path in paths]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.dim() == 0 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
