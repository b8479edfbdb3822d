"""That `roundpipe tokenize` reads each file once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from roundpipe.cli import app


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (("a.txt", "a.txt"), "a.txt is given twice"),
        (("a.txt", "linked.txt"), "a.txt and .*linked.txt are the same file"),
        (("folder", "folder/b.txt"), "b.txt is given twice"),
        (("folder/b.txt", "folder/../folder/b.txt"), "are the same file|is given twice"),
    ],
)
def test_a_file_that_is_given_twice_is_refused(
    inputs: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    Path("linked.txt").hardlink_to("a.txt")
    Path("folder").mkdir()
    Path("folder/b.txt").write_text("b")
    result = CliRunner().invoke(app, ["tokenize", *inputs, "--tokenizer", "none", "--out", "out.tokens"])
    with pytest.raises(ValueError, match=rf"^\[tokenize\] .*({said})"):
        raise result.exception or AssertionError
