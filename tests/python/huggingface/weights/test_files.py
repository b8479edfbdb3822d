"""What a folder of safetensors files must be: everything else is refused, by name, before a byte of it is used."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from roundpipe.huggingface.weights.files import Checkpoint

NAME = "model.safetensors"
Header = dict[str, Any]

# In this order behind each other: a [3, 2] of float32, b [4] of bfloat16, c without elements, d a single int64.
HEADER: Header = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F16", "shape": [0, 5], "data_offsets": [32, 32]},
    "d": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}
DATA = bytes(range(40))


def write(path: Path, header: Any, data: bytes = DATA) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def changed(name: str, **fields: Any) -> Header:
    header = copy.deepcopy(HEADER)
    header[name] |= fields
    return header


def test_what_is_well_formed_is_read(tmp_path: Path) -> None:
    write(tmp_path / NAME, HEADER)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.metadata == {NAME: {"format": "pt"}}
    with safe_open(tmp_path / NAME, "pt") as file:
        assert set(file.keys()) == set(checkpoint.tensors)
        for name in checkpoint.tensors:
            theirs, mine = file.get_tensor(name), checkpoint.read(name)
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


TWICE = json.dumps(HEADER).replace('"b"', '"a"').encode()
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "cut off": (HEADER, DATA[:-5], r"it has \d+ bytes where its header describes \d+, and ends before 'd' does"),
    "too long": (HEADER, DATA + b"x", r"it has \d+ bytes where its header describes \d+; expected"),
    "overlap": (changed("b", data_offsets=[20, 28]), DATA, "'b' overlaps 'a' by 4 bytes"),
    "hole": (changed("a", shape=[5], data_offsets=[4, 24]), DATA, "there are 4 bytes between its header and 'a'"),
    "length": (changed("b", shape=[5]), DATA, r"'b' has 8 bytes in its header, where BF16 of shape \[5\] takes 10"),
    "backwards": (changed("b", data_offsets=[32, 24]), DATA, r"'b' has -8 bytes in its header"),
    "negative offset": (changed("a", data_offsets=[-4, 20]), DATA, r"'a' has the data_offsets \[-4, 20\]"),
    "fractional offset": (changed("a", data_offsets=[0.0, 24]), DATA, r"'a' has the data_offsets \[0.0, 24\]"),
    "negative shape": (changed("a", shape=[-3, -2]), DATA, r"'a' has the shape \[-3, -2\]"),
    "huge shape": (changed("c", shape=[0, 1 << 62]), DATA, r"'c' has the shape \[0, 4611686018427387904\]"),
    "huge product": (changed("c", shape=[0, 1 << 40, 1 << 40]), DATA, r"'c' has the shape"),
    "many dimensions": (changed("d", shape=[1] * 65), DATA, "'d' has the shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 40]}}, DATA, "'a' has no dtype, shape and data_offsets"),
    "no entry": ({"a": 3}, DATA, "'a' has no dtype, shape and data_offsets"),
    "list": ([], DATA, "its header is not a JSON table"),
    "twice": (TWICE, DATA, "its header has two entries for 'a'"),
    "metadata": (
        HEADER | {"__metadata__": {"format": 1}},
        DATA,
        "the __metadata__ in its header is not a table of texts",
    ),
    "nested": (b"[" * 100_000, DATA, "its header is not JSON"),
    "not utf-8": (b'{"\xff": 1}', DATA, "its header is not JSON"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    header, data, message = DAMAGED[case]
    write(tmp_path / NAME, header, data)
    with pytest.raises(ValueError, match=rf"^\[checkpoint\] .*{NAME} is damaged: {message}.*; fetch it again$"):
        Checkpoint(tmp_path)


def test_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / NAME, changed("b", dtype="F4"))
    with pytest.raises(ValueError, match=rf"^\[checkpoint\] b in .*{NAME} has the dtype 'F4', expected one of F64"):
        Checkpoint(tmp_path)


def test_huge_headers_are_refused_unread(tmp_path: Path) -> None:
    length = 100_000_001
    with (tmp_path / NAME).open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)
    with pytest.raises(ValueError, match=r"its header would have 100000001 bytes, more than 100000000"):
        Checkpoint(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(ValueError, match=rf"^\[checkpoint\] .*{NAME} cannot be read: Is a directory"):
        Checkpoint(tmp_path)


# --- shards ---


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number in (1, 2):
        save_file({f"t{number}": torch.ones(number)}, tmp_path / f"part-{number}.safetensors")
    write_index(tmp_path, {"t1": "part-1.safetensors", "t2": "part-2.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / f"{NAME}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def damage_index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / f"{NAME}.index.json").write_text(text)


def one_name_in_two(folder: Path) -> None:
    save_file({"t1": torch.ones(1), "t2": torch.ones(2)}, folder / "part-2.safetensors")


def outside(folder: Path) -> None:
    write_index(folder, {"t1": "../part-1.safetensors"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "name in two": (one_name_in_two, r"t1 lies in .*part-2.safetensors and in part-1.safetensors, expected"),
    "outside": (outside, r"puts t1 into '../part-1.safetensors', which is not in"),
    "index damaged": (damage_index("{"), r"index.json is damaged: the index is not JSON .*expected a JSON table"),
    "no map": (damage_index('{"weight_map": []}'), r"index.json has no weight_map"),
    "name twice": (damage_index('{"weight_map": {"t1": "x", "t1": "y"}}'), r"the index has two entries for 't1'"),
    "index a pointer": (damage_index("version https://git-lfs.github.com/spec/v1"), r"index.json is a pointer of Git"),
    "shard a pointer": (
        lambda folder: (folder / "part-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
        r"part-2.safetensors is a pointer of Git LFS, expected the file itself; run `git lfs pull`",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_shards_that_do_not_belong_together(case: str, shards: Path) -> None:
    Checkpoint(shards)
    break_it, message = BROKEN[case]
    break_it(shards)
    with pytest.raises(ValueError, match=rf"^\[checkpoint\] .*{message}"):
        Checkpoint(shards)


# --- anything at all ---

NUMBERS = st.one_of(st.integers(-50, 50), st.integers(), st.sampled_from([1 << 31, 1 << 63, 1 << 64, -1]), st.floats())
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.sampled_from(["F32", "BF16", "I64", "U8"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A well-formed file, changed in a few places: fields of its header, its bytes, its length."""
    header = copy.deepcopy(HEADER)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([*HEADER, "e"]))
        kind = draw(st.sampled_from(["field", "entry", "drop", "offsets", "shape"]))
        entry = header.get(name)
        if kind == "drop":
            header.pop(name, None)
        elif kind == "entry" or not isinstance(entry, dict) or name == "__metadata__":
            header[name] = draw(VALUES)
        elif kind == "offsets":
            entry["data_offsets"] = draw(st.lists(st.integers(-2, 48), min_size=2, max_size=2))
        elif kind == "shape":
            entry["shape"] = draw(st.lists(st.integers(-1, 7), max_size=3))
        else:
            entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(VALUES)
    text = json.dumps(header).encode()
    length = len(text) if draw(st.integers(0, 4)) else draw(st.integers(0, (1 << 64) - 1))
    data = bytearray(length.to_bytes(8, "little") + text + DATA)
    for _ in range(draw(st.integers(0, 2))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.one_of(st.just(len(data)), st.integers(0, len(data) + 3)))
    return bytes(data[:end]) + b"\0" * max(0, end - len(data))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=files())
def test_any_file_is_read_rightly_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    try:
        checkpoint = Checkpoint(tmp_path)
    except ValueError as refusal:
        if not str(refusal).startswith("[checkpoint] "):
            raise
        return
    try:
        file = safe_open(tmp_path / NAME, "pt")
    except SafetensorError as error:
        raise AssertionError(f"accepted what safetensors refuses: {data!r}") from error
    with file:
        assert set(file.keys()) == set(checkpoint.tensors)
        for name in checkpoint.tensors:
            mine, theirs = checkpoint.read(name), file.get_tensor(name)
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            assert mine.reshape(-1).view(torch.uint8).tolist() == theirs.reshape(-1).view(torch.uint8).tolist()
