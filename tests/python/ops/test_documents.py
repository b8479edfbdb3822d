"""The documents of packed rows are looked up on the host, and only unknown ones are read from a device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from roundpipe import _core
from roundpipe.ops import documents, packed_attention

TABLE = torch.tensor([[3, 2, 3], [3, 4, -1]], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 0, 1, 2]])


def heads(device: str = "meta", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(2, count, 5, 4, device=device, dtype=dtype, requires_grad=True) for count in (4, 2, 2)]


def attend(table: torch.Tensor, positions: torch.Tensor | None, **options: Any) -> torch.Tensor:
    return packed_attention.packed_attention(torch.nn.Module(), *heads(), table, position_ids=positions, **options)[0]


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"s_aux": torch.zeros(4, device="meta")}])
@pytest.mark.parametrize("positions", [None, POSITIONS])
def test_known_documents_are_not_read(positions: torch.Tensor | None, options: dict[str, Any]) -> None:
    """Tensors without data cannot be read."""
    table = TABLE.to("meta")
    placed = None if positions is None else positions.to("meta")
    found = _core.read_documents(TABLE, positions, 2, 5)
    with documents.knowing([(table, placed, found)]):
        output = attend(table, placed, **options)
        assert output.shape == (2, 5, 4, 4)
        output.sum().backward()
        for other in ((table.clone(), placed), (table, POSITIONS.to("meta"))):
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
                attend(*other, **options)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        attend(table, placed, **options)


def test_documents_are_known_in_their_block_and_thread() -> None:
    found = _core.read_documents(TABLE, None, 2, 5)
    seen: list[list[list[int]]] = []
    with documents.knowing([(TABLE, None, found.with_window(7))]):
        assert documents.documents_of(TABLE, None, 2, 5).window == 7
        with documents.knowing([]):
            assert documents.documents_of(TABLE, None, 2, 5).window == 3
        thread = threading.Thread(target=lambda: seen.append([[documents.documents_of(TABLE, None, 2, 5).window]]))
        thread.start()
        thread.join()
    assert seen == [[[3]]]
    assert documents.documents_of(TABLE, None, 2, 5).window == 3


def test_tables_are_noted_in_their_block() -> None:
    def make() -> torch.Tensor:
        return packed_attention.document_lengths(1, 4, 4)

    before = make()
    with documents.noting_tables() as outer:
        first = make()
        with documents.noting_tables() as inner:
            second = make()
    assert [each is first for each in outer] == [True] and [each is second for each in inner] == [True]
    assert before.tolist() == [[0, 4]]
