"""The extension's run folders, journals and readers of what is in them: what Python passes and gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from handmade import make_step
from roundpipe import _core


def test_steps_are_found_verified_and_pruned(tmp_path: Path) -> None:
    assert _core.latest_step(str(tmp_path / "run")) is None
    for step in (1, 2, 3):
        folder = make_step(tmp_path / "run", step, {"a": b"alpha", "none": b""})
    make_step(tmp_path / "run", 4, {"a": b"alpha"}).joinpath("a").write_bytes(b"cut")
    run = _core.RunFolder(str(tmp_path / "run"))
    assert run.path == str(tmp_path / "run") and run.notices == []
    assert run.steps() == [1, 2, 3] == _core.complete_steps(run.path)
    assert run.latest() == 3 == _core.latest_step(run.path)
    problem = _core.find_steps(run.path)[3].problem
    assert "has 3 bytes, expected 5" in problem
    manifest = _core.require_complete(str(folder))
    assert manifest.step == 3 and manifest.writer == {"by": "hand"} and manifest.format == "1.0"
    assert [(file.name, file.bytes) for file in manifest.files] == [("a", 5), ("none", 0)]
    assert _core.verify_step(str(folder)) == []
    (folder / "a").write_bytes(b"alphA")
    (found,) = _core.verify_step(str(folder), threads=2)
    assert found.file == "a" and "its checksum is" in found.problem
    assert run.prune(keep_last=2).removed == [1]
    with pytest.raises(ValueError, match="keep_last is 0"):
        run.prune(0)


def test_what_progress_raises_ends_a_verification(tmp_path: Path) -> None:
    folder = make_step(tmp_path, 1, {"a": b"x" * 1000})
    told: list[tuple[int, int]] = []
    assert _core.verify_step(str(folder), progress=lambda done, total: told.append((done, total))) == []
    assert told == [(0, 1000), (1000, 1000)]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt(f"{done} of {total}")

    with pytest.raises(KeyboardInterrupt, match="0 of 1000"):
        _core.verify_step(str(folder), progress=interrupt)


def test_headers_of_the_safetensors_package(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "weight": torch.ones(3, 5, dtype=torch.bfloat16),
        "mask": torch.ones(3, dtype=torch.bool),
        "step": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, path, {"format": "pt"})
    header = _core.read_safetensors_header(str(path))
    assert header.metadata == {"format": "pt"}
    read = {entry.name: (entry.dtype, entry.shape, entry.bytes) for entry in header.tensors}
    assert read == {
        "weight": ("BF16", [3, 5], 30),
        "mask": ("BOOL", [3], 3),
        "step": ("I64", [], 8),
        "none": ("F32", [0, 4], 0),
    }
    contents = path.read_bytes()
    again = _core.parse_safetensors_header(contents[:-1], len(contents), "here")
    assert [repr(entry) for entry in again.tensors] == [repr(entry) for entry in header.tensors]
    with pytest.raises(_core.RoundPipeError, match=r"^\[here"):
        _core.parse_safetensors_header(contents, len(contents) - 1, "here")
    with pytest.raises(_core.RoundPipeError, match=r"cannot open .*none: No such file"):
        _core.read_safetensors_header(str(tmp_path / "none"))
