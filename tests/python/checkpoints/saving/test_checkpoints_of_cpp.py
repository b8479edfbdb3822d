"""A training that is saved in one language goes on in the other, with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from cpp_twin import COPIES, FUSED, GROUP, PROGRAM, TORCH, Training, in_cpp, same_form
from node_files import cut_checkpoint

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="the C++ tests were not built in build/release")

CASES = [
    (FUSED, torch.float32),
    (FUSED, torch.bfloat16),
    (GROUP, torch.float32),
    (TORCH, torch.float32),
    (COPIES, torch.bfloat16),
]


def mostly_long_cases(*few: int) -> list[Any]:
    """CASES, of which all but `few` are marked `long`: each goes on in one direction at least."""
    return [pytest.param(*case, marks=() if at in few else pytest.mark.long) for at, case in enumerate(CASES)]


@pytest.mark.parametrize(("kind", "dtype"), mostly_long_cases(1, 2))
def test_python_goes_on_with_a_training_of_cpp(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    whole = in_cpp(tmp_path / "whole", kind, dtype, "virtual:2", 6)
    first = in_cpp(tmp_path / "run", kind, dtype, "virtual:3", 3)
    assert first == whole[:3]
    roundpipe.devices("virtual:2")
    training = Training(kind, dtype)
    torch.manual_seed(0)
    loaded = training.load(tmp_path / "run")
    assert loaded.step == 3
    if kind == FUSED:
        assert loaded.state["note"] == "from C++" and loaded.state["array"].tolist() == [0, 1, 2, 3]
    assert training.steps(3) == [same_form(line) for line in whole[3:]]


@pytest.mark.parametrize(("kind", "dtype"), mostly_long_cases(0, 3, 4))
def test_cpp_goes_on_with_a_training_of_python(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    roundpipe.devices("virtual:2")
    training = Training(kind, dtype)
    training.steps(3)
    training.save(tmp_path / "python")
    expected = training.steps(3)
    shutil.copytree(tmp_path / "python", tmp_path / "cpp")  # one writer for each folder
    lines = in_cpp(tmp_path / "cpp", kind, dtype, "virtual:1", 3, "resume")
    if kind == FUSED:
        assert lines.pop(0) == "from Python 10"
    assert [same_form(line) for line in lines] == expected


def test_cpp_goes_on_with_a_training_of_several_nodes(tmp_path: Path) -> None:
    roundpipe.devices("virtual:2")
    training = Training(FUSED, torch.bfloat16)
    training.steps(3)
    training.save(tmp_path / "python")
    expected = training.steps(3)
    sizes = {name: parameter.numel() for name, parameter in training.model.named_parameters()}
    cuts = {name: [size // 3, size // 3, size] for name, size in sizes.items()}  # one rank has nothing
    cut_checkpoint(tmp_path / "python" / "step-3", tmp_path / "cpp", cuts, {})
    lines = in_cpp(tmp_path / "cpp", FUSED, torch.bfloat16, "virtual:1", 3, "resume")
    assert lines.pop(0) == "from Python 10"
    assert [same_form(line) for line in lines] == expected


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_both_languages_train_with_the_same_bits(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    roundpipe.devices("virtual:2")
    lines = in_cpp(tmp_path, kind, dtype, "virtual:2", 4)
    assert Training(kind, dtype).steps(4) == [same_form(line) for line in lines]
