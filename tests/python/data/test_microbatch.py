from __future__ import annotations

import operator
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe.data.microbatch import (
    effective_microbatches,
    merge_outputs,
    microbatch_rows,
    split_call,
    split_label,
)
from roundpipe.data.packed import RoundPipePackedData


class Pair(NamedTuple):
    x: Any
    y: Any


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, int]:
    """A pytree with at least one batched tensor, and a number of microbatches that fits."""
    size = draw(st.integers(1, 9))
    tensor = st.builds(
        lambda tail, dtype: torch.arange(size * max(1, sum(tail))).to(dtype).reshape(size, -1)[:, None],
        st.lists(st.integers(1, 3), max_size=2),
        st.sampled_from([torch.float32, torch.int64, torch.float16]),
    )
    other = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.booleans(), st.just(torch.tensor(2.0)))
    tree = st.recursive(
        tensor | other,
        lambda sub: st.one_of(
            st.lists(sub, max_size=3),
            st.dictionaries(st.text(max_size=2), sub, max_size=3),
            st.tuples(sub, sub),
            st.builds(Pair, sub, sub),
        ),
        max_leaves=6,
    )
    return {"batch": draw(tensor), "rest": draw(tree)}, draw(st.integers(1, size))


@given(batches())
def test_split_then_merge_is_identity(batch: tuple[Any, int]) -> None:
    tree, n = batch
    parts = split_call((tree,), {"again": tree}, n)
    assert len(parts) == n
    assert same(merge_outputs([args[0] for args, _ in parts]), tree)
    assert same(merge_outputs([kwargs["again"] for _, kwargs in parts]), tree)
    assert same(merge_outputs(split_label(tree, n)), tree)


def test_sizes_are_those_of_tensor_split_and_views() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    parts = split_call((x,), {"flag": True, "scale": torch.tensor(3.0)}, 3)
    assert [args[0].shape[0] for args, _ in parts] == [2, 2, 1]
    assert all(args[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for args, _ in parts)
    assert all(kwargs["flag"] is True and kwargs["scale"].dim() == 0 for _, kwargs in parts)


def test_one_microbatch_passes_everything_on() -> None:
    x, y = torch.ones(4), torch.ones(3)
    ((args, kwargs),) = split_call((x, "a"), {"y": y}, 1)
    assert args[0] is x and kwargs["y"] is y and args[1] == "a"
    output = object()
    assert merge_outputs([output]) is output


@pytest.mark.parametrize(
    ("args", "kwargs", "split", "doubtful"),
    [
        # The batch is what most of the positional tensors have; a keyword of another size is replicated.
        ((torch.ones(4),), {"mask": torch.ones(3), "ids": torch.ones(4)}, {"args[0]", "ids"}, False),
        ((torch.ones(4), torch.ones(6), torch.ones(4)), {}, {"args[0]", "args[2]"}, True),
        ((torch.ones(4), torch.ones(6)), {}, {"args[0]"}, True),
        ((), {"table": torch.ones(5), "ids": torch.ones(4), "mask": torch.ones(4, 2)}, {"ids", "mask"}, True),
        ((torch.ones(4), torch.tensor(1.0)), {"none": None, "row": torch.ones(1, 3)}, {"args[0]"}, False),
        # Beside packed tensors, what has as many rows as they have together.
        ((RoundPipePackedData([torch.ones(2), torch.ones(2)]), torch.ones(4)), {}, {"args[1]"}, False),
        ((RoundPipePackedData([torch.ones(2), torch.ones(2)]), torch.ones(6)), {"ids": torch.ones(4)}, {"ids"}, True),
        ((RoundPipePackedData([torch.ones(2), torch.ones(2)]),), {"table": torch.ones(6)}, set(), False),
        ((torch.ones(4),), {"packed": RoundPipePackedData([torch.ones(4), torch.ones(4)])}, {"args[0]"}, False),
    ],
)
def test_what_has_other_rows_than_the_batch_is_replicated(
    args: tuple[Any, ...], kwargs: dict[str, Any], split: set[str], doubtful: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = split_call(args, kwargs, 2)
    assert [str(warning.message)[:8] for warning in caught] == ["[inputs]"] * doubtful
    whole = {f"args[{i}]": value for i, value in enumerate(args)} | kwargs
    for name, value in whole.items():
        if isinstance(value, RoundPipePackedData):
            continue
        cut = [part[0][int(name[5:-1])] if "[" in name else part[1][name] for part in parts]
        if name in split:
            assert torch.equal(torch.cat(cut), value) and len(cut[0]) == 2
        else:
            assert all(each is value for each in cut)


def test_hugging_face_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    whole = outputs.CausalLMOutput(logits=torch.randn(4, 3), hidden_states=(torch.randn(4, 2), torch.randn(4, 2)))
    parts = split_label(whole, 3)
    assert type(parts[0]) is type(whole) and parts[0].logits.shape == (2, 3) and parts[0].loss is None
    merged = merge_outputs(parts)
    assert type(merged) is type(whole) and torch.equal(merged.hidden_states[1], whole.hidden_states[1])


@pytest.mark.parametrize(
    ("args", "kwargs", "n", "message"),
    [
        ((torch.ones(0, 2),), {}, 2, r"batch is empty: args\[0\]"),
        ((torch.ones(0, 2),), {}, 1, "batch is empty"),
        ((1, torch.ones(3)), {}, 4, r"args\[1\] has 3 rows, fewer than the 4 microbatches"),
        ((torch.ones(4), RoundPipePackedData([1, 2, 3])), {}, 4, r"args\[1\] is cut into 3 microbatches, expected 4"),
        ((torch.ones(4),), {}, 0, "expected at least 1"),
    ],
)
def test_split_errors(args: tuple[Any, ...], kwargs: dict[str, Any], n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_call(args, kwargs, n)


@pytest.mark.parametrize(
    ("args", "n", "is_default", "expected"),
    [
        ((torch.ones(3),), 5, True, 3),
        ((torch.ones(9),), 5, True, 5),
        ((torch.ones(3),), 5, False, 3),
        ((torch.tensor(1.0), "x"), 5, False, 5),
        ((torch.tensor(1.0), "x"), 5, True, 1),
        ((torch.ones(0),), 5, True, 1),
        ((torch.ones(8, 2), torch.ones(1, 2)), 5, True, 5),
        ((RoundPipePackedData([1, 2]),), 5, True, 2),
        (([{"deep": RoundPipePackedData([1, 2])}], torch.ones(9)), 2, False, 2),
    ],
)
def test_effective_microbatches(args: tuple[Any, ...], n: int, is_default: bool, expected: int) -> None:
    assert effective_microbatches(args, {}, n, is_default) == expected


def test_effective_microbatches_reads_the_spec() -> None:
    spec = ((TensorChunkSpec(1),), None)
    assert effective_microbatches((torch.ones(8, 2),), {}, 5, True, spec) == 2
    assert effective_microbatches((torch.ones(8),), {}, 5, True, ((_Replicate,), None)) == 1
    assert effective_microbatches((torch.ones(2),), {}, 5, True, lambda args, kwargs, n: ([], [])) == 5


def test_packed_that_disagree() -> None:
    two, three = RoundPipePackedData([1, 2]), RoundPipePackedData([3, 4, 5])
    for asked in (1, 3, 6):
        with pytest.warns(UserWarning, match=f"hold 2 microbatches, and num_microbatch is {asked}"):
            assert effective_microbatches((two,), {}, asked, False) == 2
    with pytest.warns(UserWarning, match=r"downsizing batch size to 2\. .*hold 2 and 3 microbatches"):
        assert effective_microbatches((two, three), {}, 6, True) == 2
    assert [args for args, _ in split_call((two, three), {}, 2)] == [(1, 3), (2, 4)]


def test_packed_outputs_go_in_as_they_are() -> None:
    packed, number = merge_outputs([(torch.ones(2), 0), (torch.ones(1), 1)], False)
    assert isinstance(packed, RoundPipePackedData) and isinstance(packed, list) and number == [0, 1]
    packed.synchronize()
    parts = split_call(({"deep": [packed, number]}, torch.ones(3, 2)), {"position": torch.ones(1, 5)}, 2)
    assert [args[0]["deep"][1] for args, _ in parts] == [0, 1]
    assert [len(args[1]) for args, _ in parts] == [2, 1]
    assert all(kwargs["position"].shape == (1, 5) for _, kwargs in parts)


def test_every_leaf_is_packed() -> None:
    outputs = [{"x": torch.full((2,), i), "pair": (None, "text")} for i in range(3)]
    packed = merge_outputs(outputs, False)
    assert list(packed) == ["x", "pair"] and packed["pair"][0] == [None] * 3 and packed["pair"][1] == ["text"] * 3
    assert [x.tolist() for x in packed["x"]] == [[0, 0], [1, 1], [2, 2]]
    assert merge_outputs([(1, 2), 3], False) == [(1, 2), 3]  # of different structures: packed whole


def test_waiting_for_packed_values() -> None:
    class Event:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    arrived, gradient = Event(), Event()
    RoundPipePackedData([1], [(arrived, gradient)]).synchronize()
    assert (arrived.waits, gradient.waits) == (1, 0)


def test_chunk_specs() -> None:
    x, y, z = torch.arange(12).reshape(2, 6), torch.ones(6, 1), torch.ones(5)
    spec = ((TensorChunkSpec(1), {"y": None, "z": _Replicate}), {"c": TensorChunkSpec(-1)})
    parts = split_call((x, {"y": y, "z": z}), {"c": [x, "text"], "d": y}, 4, spec)
    assert [args[0].shape for args, _ in parts] == [(2, 2), (2, 2), (2, 1), (2, 1)]
    assert [len(args[1]["y"]) for args, _ in parts] == [2, 2, 1, 1]
    assert all(args[1]["z"] is z for args, _ in parts)
    assert torch.equal(torch.cat([kwargs["c"][0] for _, kwargs in parts], 1), x)
    assert sum(len(kwargs["d"]) for _, kwargs in parts) == 6
    assert all(args == (z,) and args[0] is z for args, _ in split_call((z,), {}, 3, ((_Replicate(),), None)))


def test_specs_made_by_torch_helpers() -> None:
    x = torch.ones(4, 6)
    spec = (TensorChunkSpec.from_tuple((1,)), TensorChunkSpec.from_dict({"y": 1}))
    parts = split_call((x,), {"y": x}, 2, spec)
    assert [(args[0].shape, kwargs["y"].shape) for args, kwargs in parts] == [((4, 3), (4, 3))] * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (((TensorChunkSpec(0), TensorChunkSpec(0)), None), "spec of args .*does not match a tuple of 1"),
        ((None, {"wrong": TensorChunkSpec(0)}), "spec of kwargs .*does not match a dict of 1"),
        ((({"a": _Replicate},), None), r"spec of args\[0\]"),
        (((TensorChunkSpec(2),), None), r"args\[0\] has shape \[4, 2\], expected a dimension 2"),
    ],
)
def test_wrong_specs(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_call((torch.ones(4, 2),), {"right": 1}, 2, spec)


def test_split_function() -> None:
    def by_column(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> Any:
        return [(c,) for c in args[0].chunk(n, 1)], [kwargs] * n

    parts = split_call((torch.ones(1, 4),), {"a": 1}, 2, by_column)
    assert [(args[0].shape, kwargs) for args, kwargs in parts] == [((1, 2), {"a": 1})] * 2
    assert len(split_call((torch.ones(1, 4),), {}, 2, lambda args, kwargs, n: ([args] * 5, [kwargs] * 5))) == 5


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None, expected a pair"),
        (([()], [{}, {}]), "a list of 2 for the kwargs, expected a list with one entry for each microbatch"),
        (([(), ()], [{}]), "a list of 1 for the kwargs, expected a list with one entry for each microbatch"),
        (([], []), "a list of 0 for the args"),
        (([(), 3], [{}, {}]), "returned 3 as the args of microbatch 1, expected a tuple"),
        (([(), ()], [{}, ()]), "as the kwargs of microbatch 1, expected a dict"),
    ],
)
def test_wrong_split_functions(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_call((torch.ones(4),), {}, 2, lambda args, kwargs, n: result)


def test_labels() -> None:
    assert split_label(None, 3) == [None] * 3
    assert split_label("same", 2) == ["same"] * 2
    label = torch.arange(6).reshape(2, 3)
    assert [part.tolist() for part in split_label(label, 2)] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert [part.shape for part in split_label(label, 3, TensorChunkSpec(1))] == [(2, 1)] * 3
    assert split_label(label, 3, _Replicate)[2] is label
    assert split_label(label, 2, lambda value, n: [n, value]) == [2, label]
    with pytest.raises(ValueError, match="label has 2 rows, fewer than the 3"):
        split_label(label, 3)
    with pytest.raises(ValueError, match="expected a list of 2 labels"):
        split_label(label, 2, lambda value, n: [value])


def test_the_rows_of_microbatches() -> None:
    def rows(args: Any, n: int, split: Any = None) -> list[int] | None:
        return microbatch_rows(args, {}, split_call(args, {}, n, split), split)

    x, packed = torch.ones(5, 2), RoundPipePackedData([torch.ones(1), torch.ones(4)])
    assert rows((x,), 1) == [5] and rows((x,), 2) == [3, 2]
    assert rows((packed, x), 2) == [1, 4]
    assert rows((torch.ones(2, 5),), 3, ((TensorChunkSpec(1),), None)) == [2, 2, 1]
    assert rows((x,), 2, lambda args, kwargs, n: ([(x[:1],), (x[1:],)], [{}] * 2)) == [1, 4]
    assert rows(("text",), 2) is None


def test_labels_follow_the_rows_of_the_inputs() -> None:
    y = torch.arange(4)
    assert [part.tolist() for part in split_label(y, 2, rows=[1, 3])] == [[0], [1, 2, 3]]
    parts = split_label({"y": y, "row": torch.ones(1, 2), "number": 0.1}, 2, rows=[2, 2])
    assert [len(part["y"]) for part in parts] == [2, 2] and all(len(part["row"]) == 1 for part in parts)
    packed = RoundPipePackedData([torch.ones(1), torch.ones(3)])
    assert [len(part) for part in split_label(packed, 2, rows=[1, 3])] == [1, 3]
    assert split_label([1, 0, 1, 0], 1, rows=[4]) == [[1, 0, 1, 0]]
    options = [0.1, 0.9], np.ones(4)
    assert split_label((*options, y), 2, rows=[2, 2])[1][:2] == options  # beside tensors


@pytest.mark.parametrize("label", [[0, 1, 1, 0], (0.5, 1.5), ["a", "b"], {"y": [1, 2, 3]}, np.zeros(4)])
def test_numbers_are_not_cut(label: Any) -> None:
    with pytest.raises(ValueError, match=r"\[labels\] label is a sequence of . numbers, which is not cut"):
        split_label(label, 2, rows=[2, 2])
    assert split_label(label, 2, _Replicate, [2, 2])[1] is not None


def test_labels_among_the_arguments() -> None:
    ids, labels = torch.ones(8, 3), torch.ones(4, 3)
    for kwargs in ({"input_ids": ids, "labels": labels}, {"labels": labels, "input_ids": ids}):
        assert len(split_call((), kwargs, 1)) == 1
        with pytest.raises(ValueError, match=r"kwargs\['labels'\] has 4 rows .* the batch has 8, expected a label"):
            split_call((), kwargs, 4)
    assert len(split_call((), {"input_ids": ids, "labels": labels}, 4, (None, {"labels": _Replicate}))) == 4


def test_automatic_merge() -> None:
    outputs: list[Any] = [
        {"loss": torch.tensor(1.0), "f": 1.0, "n": 3, "s": "a", "x": torch.ones(2, 1), "i": torch.tensor(4)},
        {"loss": torch.tensor(3.0), "f": 2.0, "n": 3, "s": "a", "x": torch.ones(1, 1), "i": torch.tensor(4)},
    ]
    merged = merge_outputs(outputs)
    assert merged["loss"].item() == 2 and merged["f"] == 1.5 and merged["n"] == 3 and merged["s"] == "a"
    assert merged["x"].shape == (3, 1) and merged["i"].item() == 4
    assert merge_outputs([torch.tensor(1), torch.tensor(2)]).item() == 1.5
    assert merge_outputs([torch.tensor(True), torch.tensor(True)]).item() is True
    assert same(merge_outputs(outputs, True), merged)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "no outputs"),
        ([{"a": 1}, {"a": 2}], r"output\['a'\] cannot be merged: microbatch 1 returned 2, microbatch 0 1"),
        ([{"a": 1}, {"b": 1}], "microbatch 1 returned the structure"),
        ([torch.ones(2, 1), torch.ones(2, 2)], "output cannot be merged"),
        ([torch.ones(2), torch.tensor(1.0)], "output cannot be merged"),
        ([torch.tensor(True), torch.tensor(False)], "microbatch 1 returned False, microbatch 0 True"),
        ([(1, torch.ones(1)), (1, None)], r"output\[1\] cannot be merged"),
        ([1.0, 1], "cannot be merged"),
    ],
)
def test_merge_errors(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_outputs(outputs)


def test_merge_by_spec_and_function() -> None:
    outputs = [(torch.ones(2, k), torch.tensor(float(k)), k, torch.ones(1)) for k in (1, 2)]
    total = _CustomReducer(torch.tensor(0.0), operator.add)
    merged = merge_outputs(outputs, (TensorChunkSpec(1), total, _Replicate, None))
    assert merged[0].shape == (2, 3) and merged[1].item() == 3 and merged[2] == 1 and merged[3].shape == (2,)
    assert merge_outputs(outputs, len) == 2
    with pytest.raises(ValueError, match=r"output\[2\] cannot be merged: TensorChunkSpec"):
        merge_outputs(outputs, (TensorChunkSpec(1), None, TensorChunkSpec(0), None))
