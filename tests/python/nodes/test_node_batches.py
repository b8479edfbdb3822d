"""Batches that several nodes share: each row is on one node, whole, and nodes with other batches are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node_processes import NodeProcesses
from roundpipe.data.batches import Batches
from roundpipe.data.samples import IGNORED


def rows_in(batch: dict[str, torch.Tensor] | None) -> list[tuple[Any, ...]]:
    """Each row's tokens and labels up to the last label that counts, and its positions."""
    if batch is None:
        return []
    rows = []
    for row, labels in enumerate(batch["labels"]):
        end = int((labels != IGNORED).nonzero().max()) + 1
        rows.append(tuple(tuple(tensor[row, :end].tolist()) for _, tensor in sorted(batch.items())))
    return rows


@pytest.mark.parametrize("packed", [False, True])
def test_every_row_is_on_one_node(packed: bool, nodes: NodeProcesses) -> None:
    samples = [{"input_ids": list(range(1, 2 + number))} for number in range(1, 9)]
    whole = list(Batches(samples, batch_tokens=20, max_length=9, pad_token_id=0, packed=packed, seed=3))
    parts = nodes.results(3, "shared_batches", packed, 1)
    assert len({repr(position) for _, position in parts}) == 1
    assert any(None in batches for batches, _ in parts) == any(len(batch["labels"]) < 3 for batch in whole[1:])
    for number, batch in enumerate(whole[1:]):
        shared = [row for batches, _ in parts for row in rows_in(batches[number])]
        assert sorted(shared) == sorted(rows_in(batch))
    alone = nodes.results(1, "shared_batches", packed, 1)[0][0]
    for got, batch in zip(alone, whole[1:], strict=True):
        assert all(torch.equal(got[name], batch[name]) for name in batch)


def test_other_batches_on_a_node(nodes: NodeProcesses) -> None:
    for error in nodes.results(3, "differing_batches", [0, 0, 1]):
        assert error == (
            "[distributed] the ranks differ in model 1 (model): seed: ranks 0 and 1 have 0, rank 2 has 1; "
            "expected the same batches on every rank"
        )
