"""Packing, collating and balancing samples: what has to hold for all of them, and plain cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from roundpipe.data.balance import BalancedSplit, balance, balanced_config, split_balanced
from roundpipe.data.batches import Batches, check_positions
from roundpipe.data.collate import collate, count_label_tokens
from roundpipe.data.microbatch import split_call, split_label
from roundpipe.data.packing import pack
from roundpipe.data.samples import IGNORED
from tiny_chat import tiny_llama

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def numbered(lengths: list[int]) -> list[dict[str, Any]]:
    """Samples in which every token of all is another number."""
    ends = list(itertools.accumulate(lengths))
    samples = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return [{"input_ids": sample, "labels": [1000 + token for token in sample]} for sample in samples]


# --- packing ---


@given(lengths=LENGTHS, pad=st.booleans())
def test_packing_keeps_every_sample_whole(lengths: list[int], pad: bool) -> None:
    samples = numbered(lengths)
    rows = pack(samples, 12, pad_token_id=777 if pad else None)
    seen = []
    for row in rows:
        ids, positions, labels = (row[name][0].tolist() for name in ("input_ids", "position_ids", "labels"))
        assert len(ids) == len(positions) == len(labels) <= 12 and (not pad or len(ids) == 12)
        starts = [index for index, position in enumerate(positions) if position == 0]
        for start, end in itertools.pairwise([*starts, len(ids)]):
            assert positions[start:end] == list(range(end - start))
            if ids[start] == 777:
                assert set(ids[start:]) == {777} and set(labels[start:]) == {IGNORED}
                assert end - start <= max(lengths)  # no position that no sample has
                continue
            sample = next(sample for sample in samples if sample["input_ids"] == ids[start:end])
            assert labels[start:end] == [IGNORED, *sample["labels"][1:]]
            seen.append(sample["input_ids"])
    assert sorted(seen) == [sample["input_ids"] for sample in samples]
    predicted = sum(count_label_tokens(row["labels"]) for row in rows)
    assert predicted == sum(length - 1 for length in lengths)


def test_packing_of_samples_that_are_too_long() -> None:
    samples = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": torch.tensor([5])}]
    with pytest.raises(ValueError, match=r"sample 0 has 4 tokens, expected at most 3.*truncate"):
        pack(samples, 3)
    rows = pack(samples, 3, too_long="truncate")
    assert [row["input_ids"].tolist() for row in rows] == [[[1, 2, 3]], [[5]]]
    assert rows[0]["labels"].tolist() == [[IGNORED, 2, 3]]
    assert samples[0]["input_ids"] == [1, 2, 3, 4]


def test_packing_leaves_the_samples_alone() -> None:
    labels = torch.tensor([1, 2, 3])
    pack([{"input_ids": [1, 2, 3], "labels": labels}], 4)
    assert labels.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": []}, "sample 0 has no tokens"),
        ({"labels": [1]}, r"has the keys \['labels'\]"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 tokens and 1 labels"),
        ({"input_ids": [0.5]}, "float32 of shape"),
        ({"input_ids": [[1]]}, "expected whole numbers in one dimension"),
        ({"input_ids": ["a"]}, "is not a list of numbers"),
    ],
)
def test_malformed_samples_are_refused(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([sample], 4)
    with pytest.raises(ValueError, match=message):
        collate([sample], 0)


def test_malformed_options_are_refused() -> None:
    with pytest.raises(ValueError, match="length is 0"):
        pack([], 0)
    wrong: Any = "cut"
    with pytest.raises(ValueError, match="too_long is 'cut'"):
        pack([], 1, too_long=wrong)


# --- collating ---


@given(lengths=LENGTHS, multiple=st.integers(1, 8))
def test_a_batch_holds_every_sample_once(lengths: list[int], multiple: int) -> None:
    samples = numbered(lengths)
    batch = collate(samples, 777, multiple_of=multiple)
    width = batch["input_ids"].shape[1]
    assert width % multiple == 0 and max(lengths) <= width < max(lengths) + multiple
    for row, sample in enumerate(samples):
        length = lengths[row]
        assert batch["input_ids"][row].tolist() == sample["input_ids"] + [777] * (width - length)
        assert batch["labels"][row].tolist() == sample["labels"] + [IGNORED] * (width - length)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (width - length)
    assert count_label_tokens(batch["labels"]) == sum(length - 1 for length in lengths)


def test_collating_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no samples"):
        collate([], 0)
    with pytest.raises(ValueError, match="multiple_of is 0"):
        collate([{"input_ids": [1]}], 0, multiple_of=0)


def test_label_tokens_are_counted_where_they_are_predicted() -> None:
    assert count_label_tokens(torch.tensor([[5, 6, IGNORED, 7], [5, IGNORED, IGNORED, IGNORED]])) == 2
    assert count_label_tokens(torch.tensor([5])) == 0


# --- balancing ---


def cost(length: int, quadratic: float) -> float:
    return length + quadratic * length * length


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    parts=st.integers(1, 3),
    quadratic=st.sampled_from([0.0, 0.1, 2.0]),
)
def test_parts_are_as_even_as_promised(lengths: list[int], parts: int, quadratic: float) -> None:
    def heaviest(dealt: list[list[int]]) -> float:
        return max(sum(cost(lengths[index], quadratic) for index in part) for part in dealt)

    dealt = balance(lengths, parts, quadratic=quadratic)
    best = min(
        heaviest([[index for index, owner in enumerate(owners) if owner == part] for part in range(parts)])
        for owners in itertools.product(range(parts), repeat=len(lengths))
    )
    assert heaviest(dealt) <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9


@given(lengths=st.lists(st.integers(0, 50), max_size=40), parts=st.integers(1, 12))
@example(lengths=[0, 0, 5, 0], parts=3)
def test_every_sample_is_dealt_once_and_no_part_is_empty(lengths: list[int], parts: int) -> None:
    dealt = balance(lengths, parts)
    assert len(dealt) == parts and sorted(itertools.chain(*dealt)) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in dealt)
    assert sum(not part for part in dealt) == max(0, parts - len(lengths))


def test_ties_go_by_number() -> None:
    assert balance([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert balance([1, 9, 2, 8], 2) == [[0, 1], [2, 3]]
    # Three times three tokens are cheaper than nine in a row.
    assert balance([9, 3, 3, 3], 2, quadratic=1.0) == [[0], [1, 2, 3]]


def test_bad_balances_are_refused() -> None:
    with pytest.raises(ValueError, match="parts is 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match="length 0 is -1"):
        balance([-1], 1)
    with pytest.raises(ValueError, match="quadratic is nan"):
        balance([1], 1, quadratic=float("nan"))


@given(lengths=st.lists(st.integers(1, 9), min_size=3, max_size=12), n=st.integers(1, 3))
def test_a_batch_is_cut_by_rows_and_trimmed(lengths: list[int], n: int) -> None:
    batch: dict[str, Any] = collate(numbered(lengths), 777, multiple_of=4)
    label = batch.pop("labels")
    scale = torch.ones(())
    batch |= {"position_ids": torch.arange(label.shape[1])[None], "scale": scale, "name": "x"}
    split = BalancedSplit(batch["attention_mask"])
    calls = split_call((batch["input_ids"],), batch, n, split.inputs)
    labels = split_label(label, n, split.labels)
    seen = []
    for (args, kwargs), part, rows in zip(calls, labels, split.parts(n), strict=True):
        width = max(lengths[row] for row in rows)
        assert torch.equal(args[0], kwargs["input_ids"]) and kwargs["scale"] is scale and kwargs["name"] == "x"
        assert kwargs["input_ids"].shape == kwargs["attention_mask"].shape == part.shape == (len(rows), width)
        assert kwargs["position_ids"].shape == (1, width)
        kept = kwargs["attention_mask"].bool()
        seen += kwargs["input_ids"][kept].tolist()
        assert torch.equal(part[kept], kwargs["input_ids"][kept] + 1000)
    assert sorted(seen) == list(range(sum(lengths)))


def test_the_split_of_any_batch_with_a_mask() -> None:
    batch = collate(numbered([4, 1, 1, 2]), 0)
    calls = split_call((), batch, 2, split_balanced)
    assert [kwargs["input_ids"].tolist() for _, kwargs in calls] == [[[0, 1, 2, 3]], [[4, 0], [5, 0], [6, 7]]]
    assert [kwargs["labels"].shape for _, kwargs in calls] == [(1, 4), (3, 2)]


def test_padding_on_the_left_stays() -> None:
    mask = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    (kwargs,) = BalancedSplit(mask).inputs((), {"attention_mask": mask}, 1)[1]
    assert kwargs["attention_mask"].tolist() == [[0, 0, 1], [0, 1, 1]]


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['input_ids'\], expected an attention_mask"):
        split_balanced((), {"input_ids": torch.ones(2, 2)}, 2)
    with pytest.raises(ValueError, match="2 rows, fewer than the 3 microbatches"):
        split_balanced((), {"attention_mask": torch.ones(2, 2)}, 3)
    with pytest.raises(ValueError, match=r"expected \[rows, tokens\]"):
        BalancedSplit(torch.ones(1, 1, 2, 2))


def test_a_model_trains_on_balanced_microbatches() -> None:
    import roundpipe

    roundpipe.devices("virtual:2")
    torch.manual_seed(0)
    embedding = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64))
    batch = collate([{"input_ids": [token % 64 for token in range(n)]} for n in (9, 2, 3, 4)], 0)
    split = BalancedSplit(batch["attention_mask"])
    tokens = count_label_tokens(batch["labels"])

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    expected = loss_of(embedding(batch["input_ids"]), batch["labels"]) / tokens
    pipe = roundpipe.RoundPipe(embedding)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2, split_input=split.inputs, split_label=split.labels)
    losses: list[torch.Tensor] = []

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = loss_of(logits, labels) / tokens
        losses.append(loss.detach().clone())
        return loss

    pipe.forward_backward((batch["input_ids"],), label=batch["labels"], loss_fn=loss_fn, run_config=config)
    assert len(losses) == 2
    torch.testing.assert_close(sum(losses, torch.zeros(())), expected.detach())


# --- batches ---


@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=20), packed=st.booleans(), seed=st.integers(0, 3))
def test_batches_hold_every_sample_once_an_epoch(lengths: list[int], packed: bool, seed: int) -> None:
    samples = numbered([length + 1 for length in lengths])
    sizes: dict[str, Any] = {"batch_tokens": 26, "max_length": 13, "pad_token_id": 777, "packed": packed}
    batches = Batches(samples, epochs=2, seed=seed, **sizes)
    seen: list[list[int]] = []
    made = list(batches)
    assert len(made) == len(batches)
    for batch in made:
        assert len({tensor.shape for tensor in batch.values()}) == 1 and batch["input_ids"].shape[1] <= 13
        assert int((batch["input_ids"] != 777).sum()) <= 26
        assert ("position_ids" in batch) is packed and ("attention_mask" in batch) is not packed
        for row in batch["input_ids"].tolist():
            seen += [sample["input_ids"] for sample in samples if str(sample["input_ids"])[1:-1] in str(row)]
    assert sorted(seen) == sorted([sample["input_ids"] for sample in samples] * 2)
    again = Batches(samples, epochs=2, seed=seed, **sizes)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(made, again, strict=True))


def test_batches_shuffle_each_epoch_differently_and_keep_the_order_without_a_seed() -> None:
    samples = numbered([3] * 12)
    sizes: dict[str, Any] = {"batch_tokens": 3, "max_length": 3, "pad_token_id": 0}
    first = [int(batch["input_ids"][0, 0]) for batch in Batches(samples, **sizes)]
    assert first == [3 * index for index in range(12)]
    shuffled = [int(batch["input_ids"][0, 0]) for batch in Batches(samples, epochs=2, seed=1, **sizes)]
    assert sorted(shuffled[:12]) == sorted(shuffled[12:]) == first
    assert shuffled[:12] != first and shuffled[12:] != shuffled[:12]


def test_batches_cut_long_samples_and_leave_out_those_without_labels() -> None:
    long = {"input_ids": list(range(1, 9))}
    late = {"input_ids": list(range(1, 9)), "labels": [IGNORED] * 6 + [7, 8]}
    first_only = {"input_ids": [1, 2, 3], "labels": [1, IGNORED, IGNORED]}
    batches = Batches([long, late, first_only], batch_tokens=8, max_length=4, pad_token_id=0)
    assert (batches.truncated, batches.left_out) == (1, 2)
    (batch,) = batches
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]] and batch["labels"].tolist() == [[IGNORED, 2, 3, 4]]


@pytest.mark.parametrize(
    ("samples", "sizes", "message"),
    [
        ([], {}, "there are no samples"),
        ([{"input_ids": [1, 2], "labels": [IGNORED, IGNORED]}], {}, "none of 1 samples has a label that counts"),
        ([{"input_ids": [1, 2]}], {"batch_tokens": 3}, "batch_tokens is 3, expected at least max_length = 4"),
        ([{"input_ids": [1, 2]}], {"max_length": 1}, "max_length is 1, expected at least 2"),
        ([{"input_ids": [1, 2]}], {"epochs": 0}, "epochs is 0, expected at least 1"),
        ([{"ids": [1, 2]}], {}, "sample 0 has the keys"),
    ],
)
def test_batches_refuse(samples: list[Any], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[Batches\] {message}"):
        Batches(samples, **{"batch_tokens": 8, "max_length": 4, "pad_token_id": 0, **sizes})


def test_rows_without_a_mask_end_at_their_last_label() -> None:
    labels = torch.full((3, 6), IGNORED)
    labels[0, 5] = labels[1, 1] = labels[2, 3] = 9
    kwargs = {"input_ids": torch.arange(18).reshape(3, 6), "labels": labels}
    args, parts = split_balanced((), kwargs, 2)
    assert args == [(), ()]
    assert [part["input_ids"].tolist() for part in parts] == [[[0, 1, 2, 3, 4, 5]], [[6, 7, 8, 9], [12, 13, 14, 15]]]
    assert [part["labels"].shape for part in parts] == [(1, 6), (2, 4)]


def test_balanced_config_has_no_more_microbatches_than_rows() -> None:
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 3, dtype=torch.int64)}
    assert balanced_config(batch, 5).num_microbatch == 2
    assert balanced_config(batch, 1).num_microbatch == 1
    with pytest.raises(ValueError, match=r"^\[balanced_config\] the keyword arguments are \['input_ids'\]"):
        balanced_config({"input_ids": batch["input_ids"]})


def test_samples_longer_than_the_model_can_take() -> None:
    model = tiny_llama(max_position_embeddings=8)
    sizes: dict[str, Any] = {"batch_tokens": 32, "pad_token_id": 0}
    short = Batches(numbered([3, 8]), max_length=16, **sizes)  # packed rows may be longer than a sample
    check_positions(model, short, [])
    with pytest.raises(
        ValueError, match=r"a sample has 9 tokens, and the model has max_position_embeddings = 8; lower"
    ):
        check_positions(model, short, Batches(numbered([3, 9]), max_length=16, **sizes))
    check_positions(model, Batches(numbered([3, 9]), max_length=8, **sizes))
