"""Checkpoints of several nodes: their files are read in whatever parts are needed, with the bits of the whole."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import roundpipe
from handmade import make_step
from node_files import BLOCK, cut_checkpoint, own_part
from roundpipe import RoundPipe, RoundPipeError, _core
from roundpipe.checkpoints.runs.command import app
from roundpipe.checkpoints.saving.random_states import derive_random_states, derived_seed
from roundpipe.checkpoints.saving.stored import StoredCheckpoint

WIDTH = 48


class TurnedLinear(nn.Linear):
    """Its weight is not contiguous."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter(self.weight.detach().t())


@dataclass(frozen=True)
class Kind:
    dtype: torch.dtype = torch.float32
    moments: str = "float32"
    optimizer: str = "AdamW"


KINDS = {
    "fp32": Kind(),
    "bf16": Kind(torch.bfloat16),
    "fp16, 8-bit moments": Kind(torch.float16, "8bit"),
    "bf16, NAdam": Kind(torch.bfloat16, optimizer="NAdam"),
}


class Training:
    """A small model with a parameter whose memory is in another order than its dimensions."""

    def __init__(self, kind: Kind) -> None:
        roundpipe.devices("virtual:2")
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), TurnedLinear(), nn.Linear(WIDTH, WIDTH)).to(kind.dtype)
        self.model = RoundPipe(layers, name="cut")
        options = {"moments": kind.moments} if kind.moments != "float32" else {}
        self.optimizer = getattr(roundpipe.optim, kind.optimizer)(self.model, lr=0.01, **options)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(6, WIDTH).to(next(self.model.parameters()).dtype)
            self.model.forward_backward((batch,), loss_fn=lambda outputs, _: outputs.float().square().mean())
            self.model.step(self.optimizer)

    def final(self) -> dict[str, torch.Tensor]:
        self.model.synchronize()
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for key, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{name}": torch.as_tensor(value).clone() for name, value in state.items()}
        return found | {"drawn": torch.rand(4)}

    def strides(self) -> dict[str, Sequence[int]]:
        return {name: value.stride() for name, value in self.model.named_parameters() if not value.is_contiguous()}

    def sizes(self) -> dict[str, int]:
        return {name: value.numel() for name, value in self.model.named_parameters()}


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


@dataclass(frozen=True, repr=False)
class Saved:
    """A checkpoint of one process after two steps, and the state after four."""

    folder: Path
    later: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Saved]:
    found = {}
    for name, kind in KINDS.items():
        training = Training(kind)
        training.run(2)
        folder = tmp_path_factory.mktemp("run")
        save = roundpipe.save_checkpoint(folder, training.model, training.optimizer, wait=True)
        training.run(2)
        found[name] = Saved(Path(save.folder), training.final())
    return found


def cuts_of(sizes: Mapping[str, int], fractions: Sequence[float], block: int) -> dict[str, list[int]]:
    """Where each rank's elements end, at multiples of `block`, by the part of each parameter."""
    return {
        name: [min(round(size * part / block) * block, size) for part in sorted(fractions)] + [size]
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_one_process_goes_on_from_the_parts_of_several(name: str, saved: Mapping[str, Saved], tmp_path: Path) -> None:
    source, expected = saved[name].folder, saved[name].later
    resumed = Training(KINDS[name])
    cuts = cuts_of(resumed.sizes(), [0.3, 0.35], BLOCK)
    cut_checkpoint(source, tmp_path, cuts, resumed.strides())
    assert roundpipe.load_checkpoint(tmp_path, resumed.model, resumed.optimizer).step == 7
    resumed.run(2)
    assert same(resumed.final(), expected)


def test_another_precision_goes_on_from_the_same_masters(saved: Mapping[str, Saved], tmp_path: Path) -> None:
    source = saved["bf16"].folder
    finals = []
    for cut in (False, True):
        resumed = Training(Kind(torch.float32))
        cuts = cuts_of(resumed.sizes(), [0.5], 1)
        folder = cut_checkpoint(source, tmp_path, cuts, resumed.strides()) if cut else source
        roundpipe.load_checkpoint(folder, resumed.model, resumed.optimizer)
        resumed.run(1)
        finals.append(resumed.final())
    assert same(*finals)


fractions = st.lists(st.floats(0, 1), max_size=4)


@given(name=st.sampled_from(sorted(KINDS)), there=fractions, here=fractions, cut=st.booleans())
def test_any_parts_are_read_from_any_parts(
    name: str,
    there: list[float],
    here: list[float],
    cut: bool,
    saved: Mapping[str, Saved],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    source = saved[name].folder
    block = BLOCK if KINDS[name].moments == "8bit" else 1
    whole = load_file(source / "optimizer.safetensors")
    like = {
        "0.weight": torch.empty(WIDTH, WIDTH),
        "1.weight": torch.empty(WIDTH, WIDTH).t(),
        "2.bias": torch.empty(WIDTH),
    }
    sizes = {key.rsplit("/", 1)[0]: 0 for key in whole}
    for parameter in sizes:
        sizes[parameter] = WIDTH * WIDTH if parameter.endswith("weight") else WIDTH
    strides = {"1.weight": like["1.weight"].stride()}
    folder = source
    if cut and there:
        folder = cut_checkpoint(source, tmp_path_factory.mktemp("cut"), cuts_of(sizes, there, block), strides)
    stored = StoredCheckpoint(folder)
    ends = cuts_of(sizes, here, block)
    size = len(here) + 1
    for rank in range(size):
        reads = _core.StateReads(stored.core)
        wanted = {}
        for key, tensor in whole.items():
            parameter, kind = key.rsplit("/", 1)
            if parameter not in like:
                continue
            first, last = (0 if rank == 0 else ends[parameter][rank - 1]), ends[parameter][rank]
            expected = own_part(key, tensor, strides.get(parameter), first, last)
            target = torch.full_like(expected, 77)
            reads.take(parameter, kind, target, like[parameter], (first, last))
            wanted[key] = target, expected
        stored.core.read({"optimizer": reads.whole_tensors})
        reads.read()
        for key, (target, expected) in wanted.items():
            assert torch.equal(target, expected), key


def test_damage_is_found_by_the_rank_that_verifies_the_file(saved: Mapping[str, Saved], tmp_path: Path) -> None:
    source = saved["fp32"].folder
    sizes = {name: WIDTH * WIDTH if name.endswith("weight") else WIDTH for name in Training(KINDS["fp32"]).sizes()}
    folder = cut_checkpoint(source, tmp_path, cuts_of(sizes, [0.5], 1), {"1.weight": (1, WIDTH)})
    file = folder / "rank-00001-optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    found = []
    for rank in range(2):
        stored = StoredCheckpoint(folder)
        reads = _core.StateReads(stored.core)
        target = torch.empty(10)
        reads.take("0.weight", "exp_avg", target, torch.empty(WIDTH, WIDTH), (20, 30))
        reads.read()
        try:
            stored.core.verify_rest(rank, 2)
        except _core.DamagedCheckpointError as error:
            found.append(str(error))
    assert len(found) == 1 and "rank-00001-optimizer.safetensors: its checksum is" in found[0]


def test_moments_of_8_bits_in_another_order_are_refused(saved: Mapping[str, Saved], tmp_path: Path) -> None:
    name = "fp16, 8-bit moments"
    source = saved[name].folder
    resumed = Training(KINDS[name])
    cut_checkpoint(source, tmp_path, cuts_of(resumed.sizes(), [0.5], BLOCK), {})
    with pytest.raises(ValueError, match="in blocks of that order"):
        roundpipe.load_checkpoint(tmp_path, resumed.model, resumed.optimizer)


def test_the_command_knows_them(saved: Mapping[str, Saved], tmp_path: Path) -> None:
    source = saved["bf16"].folder
    training = Training(KINDS["bf16"])
    cut_checkpoint(source, tmp_path / "run", cuts_of(training.sizes(), [0.2], 1), training.strides())
    runner = CliRunner()
    shown = runner.invoke(app, ["show", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "of 2 nodes, each with its part" in shown.output
    assert "rank 1: optimizer" in shown.output
    assert runner.invoke(app, ["verify", str(tmp_path / "run")]).exit_code == 0
    for to in ("hf", "dcp"):
        converted = runner.invoke(app, ["convert", str(tmp_path / "run"), str(tmp_path / to), "--to", to])
        assert converted.exit_code == 0, converted.output
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(source / "model.safetensors"))


def test_random_states_of_ranks_that_were_not_there() -> None:
    states = {"torch": torch.Generator().manual_seed(3).get_state()}

    def drawn(rank: int) -> list[float]:
        derive_random_states(states, rank)
        return [float(torch.rand(())), random.random(), float(numpy.random.rand())]

    values = [drawn(rank) for rank in range(3)]
    assert all(len(set(of_ranks)) == 3 for of_ranks in zip(*values, strict=True))
    assert [drawn(rank) for rank in range(3)] == values
    assert len({derived_seed(b"seed", rank) for rank in range(3)}) == 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rank-00001-optimizer.safetensors", "rank-00005-optimizer.safetensors", "has a file of rank 5"),
        ("rank-00001-state.json", "rank-00003-state.json", "has no rank-00001-state.json"),
        ("rank-00001-state.safetensors", "rank-00000-optimizer-2.safetensors", "has the tensor 'random.torch'"),
    ],
)
def test_files_that_do_not_belong_together(
    old: str, new: str, words: str, saved: Mapping[str, Saved], tmp_path: Path
) -> None:
    training = Training(KINDS["fp32"])
    cuts = cuts_of(training.sizes(), [0.5], 1)
    folder = cut_checkpoint(saved["fp32"].folder, tmp_path / "cut", cuts, training.strides())
    files = {new if path.name == old else path.name: path.read_bytes() for path in folder.iterdir()}
    del files["manifest.json"]
    with pytest.raises(RoundPipeError, match=re.escape(words)):
        StoredCheckpoint(make_step(tmp_path / "other", 1, files, nodes=2))
