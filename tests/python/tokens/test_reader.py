"""Token files: what is written is read, and what is damaged is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from roundpipe.tokens.reader import TokenFile
from token_files import write_tokens


@pytest.mark.parametrize("vocabulary", [60_000, 100_000])
def test_what_is_written_is_read(vocabulary: int, tmp_path: Path) -> None:
    documents = [[1, 2, 3], [vocabulary - 1], [7] * 5]
    file = TokenFile(write_tokens(tmp_path / "x.tokens", documents, vocabulary))
    assert [file.document(number).tolist() for number in range(file.documents)] == documents
    assert file.lengths(np.array([2, 0, 1])).tolist() == [5, 3, 1]
    assert (file.tokens, file.vocabulary) == (9, vocabulary)
    file.verify()


def test_damage_is_found(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "x.tokens", [[1, 2, 3], [4]], 10)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        if 64 <= position < 72:  # the tokens are read when they are asked for
            with pytest.raises(ValueError, match="damaged tokens"):
                TokenFile(path).verify()
        else:
            with pytest.raises(ValueError, match=r"x\.tokens .*it is cut, damaged or no token file; make it again"):
                TokenFile(path)
    for size in (0, 63, 64, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"^\[tokens\]"):
            TokenFile(path)
    with pytest.raises(ValueError, match="cannot read"):
        TokenFile(tmp_path / "none")
