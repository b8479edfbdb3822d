"""Saving and loading: what is on disk, what is refused, what happens on failures."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import nn

import roundpipe
from handmade import make_step
from resumable import Recipe, Training, assert_same_state
from roundpipe import RoundPipe, RoundPipeError, _core

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def trained(tmp_path: Path) -> Training:
    training = Training(Recipe(dtype=torch.bfloat16, normed=False), devices=2)
    training.run(2)
    return training


def test_weights_are_those_of_the_step(trained: Training, tmp_path: Path) -> None:
    save = trained.save(tmp_path, wait=True)
    trained.model.synchronize()
    stored = load_file(Path(save.folder) / "model.safetensors")
    assert stored.keys() == trained.layers.state_dict().keys()
    for name, value in trained.layers.state_dict().items():
        assert torch.equal(stored[name], value), name
    # An asynchronous step: the next call reads the weights of the step before.
    assert (Path(save.folder) / "previous.safetensors").exists()
    assert roundpipe.latest(tmp_path) == Path(save.folder)


def test_weights_in_several_files_are_loaded(trained: Training, tmp_path: Path) -> None:
    folder = Path(trained.save(tmp_path / "run", wait=True).folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    weights = load(files.pop("model.safetensors"))
    for number, (name, value) in enumerate(weights.items(), start=1):
        files[f"model-{number:05d}-of-{len(weights):05d}.safetensors"] = save({name: value})
    expected = trained.final()
    again = Training(trained.recipe, devices=1)
    again.load(make_step(tmp_path / "cut", 2, files))
    assert_same_state(again.final(), expected)


def test_what_does_not_fit_is_refused_before_anything_changes(trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path, wait=True)
    other = Training(Recipe(dtype=torch.bfloat16, normed=False), devices=1)
    other.run(1)
    before = other.final()
    load, model, optimizer = roundpipe.load_checkpoint, other.model, other.optimizer
    schedules = {"lr_scheduler": other.scheduler}
    with pytest.raises(ValueError, match="learning-rate schedulers"):
        load(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match="expected scaler="):
        load(tmp_path, model, optimizer, **schedules, scaler=roundpipe.GradScaler("cpu"))
    with pytest.raises(ValueError, match="has no state 'data'"):
        load(tmp_path, model, optimizer, **schedules, state={"data": other.scheduler})
    with pytest.raises(ValueError, match="none was given"):
        load(tmp_path, model)
    with pytest.raises(ValueError, match="expected no other objects"):
        load(tmp_path, model, weights_only=True, **schedules)
    with pytest.raises(RoundPipeError, match="nothing is not there, expected a checkpoint or the folder of a run"):
        load(tmp_path / "nothing", model, optimizer)
    assert_same_state(other.final() | {"drawn": before["drawn"]}, before)
    smaller = RoundPipe(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), name="resumed")
    with pytest.raises(ValueError, match="that the model lacks, expected a checkpoint of this model"):
        load(tmp_path, smaller, weights_only=True)
    loaded = load(tmp_path, smaller, weights_only=True, strict=False)
    assert (loaded.missing, len(loaded.unexpected)) == ((), 6)
    wider = RoundPipe(nn.Sequential(*(nn.Linear(24, 24) for _ in range(5))), name="resumed")
    with pytest.raises(ValueError, match="has shape"):
        load(tmp_path, wider, weights_only=True)
    adam = roundpipe.optim.Adam(other.model, lr=0.01)
    with pytest.raises(ValueError, match="has the state of AdamW"):
        load(tmp_path, other.model, adam, **schedules)


def test_a_schedule_that_is_not_saved_is_told(trained: Training, tmp_path: Path) -> None:
    def save(number: int, **options: Any) -> None:
        roundpipe.save_checkpoint(tmp_path, trained.model, trained.optimizer, step=number, wait=True, **options)

    with pytest.warns(UserWarning, match=r"\[save_checkpoint\] steps move a LambdaLR that is not saved"):
        save(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(2, lr_scheduler=trained.scheduler)
        save(3, state={"schedule": trained.scheduler})
        save(4, state={"schedule": trained.scheduler.state_dict()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masters_survive_another_precision(dtype: torch.dtype, trained: Training, tmp_path: Path) -> None:
    trained.save(tmp_path, wait=True)
    trained.model.synchronize()
    masters = {}
    for name, parameter in trained.layers.named_parameters():
        _, remainder = trained.optimizer.binding.state(parameter)
        masters[name] = torch.empty(parameter.shape)
        _core.join(parameter.detach(), remainder, masters[name])
    other = Training(Recipe(dtype=dtype, normed=False), devices=1)
    other.load(tmp_path)
    other.model.synchronize()
    for name, parameter in other.layers.named_parameters():
        _, remainder = other.optimizer.binding.state(parameter)
        assert torch.equal(parameter if remainder is None else remainder, masters[name]), name
        assert torch.equal(parameter, masters[name].to(dtype))
    other.run(1)


def master_of(training: Training, parameter: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter."""
    _, remainder = training.optimizer.binding.state(parameter)
    assert remainder is not None
    exact, master = torch.empty(parameter.shape, dtype=torch.int16), torch.empty(parameter.shape)
    _core.convert_remainder(remainder, exact)
    _core.join(parameter.detach(), exact, master)
    return master


@pytest.mark.parametrize("through", ["checkpoint", "state_dict"])
def test_masters_of_24_bits_are_made_from_exact_ones_and_back(through: str, trained: Training, tmp_path: Path) -> None:
    def taken(earlier: Training, masters: str) -> Training:
        later = Training(Recipe(dtype=torch.bfloat16, normed=False, options={"masters": masters}), devices=1)
        if through == "checkpoint":
            earlier.save(tmp_path / masters, wait=True)
            later.load(tmp_path / masters)
        else:
            earlier.model.synchronize()
            later.layers.load_state_dict(earlier.layers.state_dict())
            later.optimizer.load_state_dict(earlier.optimizer.state_dict())
        later.model.synchronize()
        return later

    narrow = taken(trained, "24bit")
    trained.model.synchronize()
    for mine, exact in zip(narrow.layers.parameters(), trained.layers.parameters(), strict=True):
        assert torch.equal(mine, exact)  # weights stay as they are
        last_bit = exact.abs().float() * 2.0**-15
        assert bool(((master_of(narrow, mine) - master_of(trained, exact)).abs() <= last_bit).all())
    back = taken(narrow, "float32")
    for mine, before in zip(back.layers.parameters(), narrow.layers.parameters(), strict=True):
        assert torch.equal(master_of(back, mine), master_of(narrow, before))
    for training in (narrow, back):
        training.run(2)


def test_masters_of_24_bits_survive_another_precision(tmp_path: Path) -> None:
    narrow = Training(Recipe(dtype=torch.bfloat16, normed=False, options={"masters": "24bit"}), devices=2)
    narrow.run(2)
    narrow.save(tmp_path / "bf16", wait=True)
    narrow.model.synchronize()
    masters = [master_of(narrow, parameter) for parameter in narrow.layers.parameters()]
    wide = Training(Recipe(normed=False), devices=1)
    wide.load(tmp_path / "bf16")
    wide.model.synchronize()
    for parameter, master in zip(wide.layers.parameters(), masters, strict=True):
        assert torch.equal(parameter, master)
    wide.save(tmp_path / "fp32", wait=True)
    narrow.load(tmp_path / "fp32")
    narrow.model.synchronize()
    for parameter, master in zip(narrow.layers.parameters(), masters, strict=True):
        assert torch.equal(master_of(narrow, parameter), master)
    with pytest.raises(ValueError, match="expected bfloat16, which alone has masters of 24 bits"):
        Training(Recipe(dtype=torch.float16, normed=False, options={"masters": "24bit"}), devices=1)


def test_a_save_raises_what_its_calls_raised(
    trained: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class OwnError(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise OwnError("of the loss")

    trained.model.submit((torch.randn(6, 16, dtype=torch.bfloat16),), loss_fn=refuse)
    save = trained.save(tmp_path)
    for _ in range(2):
        with pytest.raises(OwnError, match="of the loss") as raised:
            save.wait()
        assert any(entry.name == "refuse" for entry in raised.traceback)
    assert "of the loss\n[save_checkpoint] step 2 was not saved; training goes on" in capsys.readouterr().err
    assert roundpipe.latest(tmp_path) is None


def test_values_without_an_encoding_are_refused_by_path(trained: Training, tmp_path: Path) -> None:
    class Odd:
        pass

    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value, message in [
        ({"a": [1, Odd()]}, r"state.mine.a\[1\] is a .*Odd"),
        (lambda: 1, "state.mine is a builtins.function"),
        ({Odd(): 1}, "state.mine has a key of type Odd"),
        (cyclic, "contains itself"),
        ({"a": {1, 2}}, "state.mine.a is a builtins.set"),
        (torch.eye(2).to_sparse(), "expected a dense one"),
        ({"file": "caf\udce9.txt"}, "state.mine.file is no text in UTF-8"),
    ]:
        with pytest.raises(ValueError, match=message):
            roundpipe.save_checkpoint(tmp_path / "run", trained.model, trained.optimizer, state={"mine": value})
    assert not list((tmp_path / "run").glob("*step*"))
    trained.run(1)


def test_what_is_given_may_change_at_once(trained: Training, tmp_path: Path) -> None:
    averages = {"weights": torch.zeros(100_000), "nested": [torch.zeros(3)]}
    save = roundpipe.save_checkpoint(tmp_path, trained.model, trained.optimizer, state={"averages": averages})
    for value in (averages["weights"], averages["nested"][0]):
        torch.as_tensor(value).fill_(1)
    save.wait()
    stored = load_file(Path(save.folder) / "state.safetensors")
    assert not stored["state.averages.weights"].any()
    assert not stored["state.averages.nested[0]"].any()


def test_what_is_saved_comes_back(trained: Training, tmp_path: Path) -> None:
    value = {
        "numbers": [0, -1, 2**63, -(2**80), 1.5, float("nan"), float("-inf"), True, None],
        3: ("text", b"\x00", (), []),
        (1, "a"): {"nested": {}},
        "tensor": torch.arange(6).reshape(2, 3).t(),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "arrays": [numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.ones((0, 3), dtype="c16"), numpy.float16(0.5)],
    }
    roundpipe.save_checkpoint(tmp_path, trained.model, trained.optimizer, state={"mine": value}, wait=True)
    back = roundpipe.load_checkpoint(tmp_path, trained.model, trained.optimizer).state["mine"]
    assert repr(back) == repr(value)
    assert back["arrays"][0].dtype == ">i4" and type(back["arrays"][2]) is numpy.float16


def test_arguments_are_checked(trained: Training, tmp_path: Path) -> None:
    save = roundpipe.save_checkpoint
    with pytest.raises(ValueError, match="expected one in the pipeline"):
        save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="none was given"):
        save(tmp_path, trained.model)
    with pytest.raises(ValueError, match="step is -1"):
        save(tmp_path, trained.model, trained.optimizer, step=-1)
    with pytest.raises(ValueError, match="keep_every has no effect"):
        save(tmp_path, trained.model, trained.optimizer, keep_every=10)
    with pytest.raises(ValueError, match="scaler is a float"):
        save(tmp_path, trained.model, trained.optimizer, scaler=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="snapshot_memory"):
        save(tmp_path, trained.model, trained.optimizer, snapshot_memory="many")
    assert not list(tmp_path.glob("*step*"))
    trained.save(tmp_path, step=7, wait=True)
    with pytest.raises((ValueError, RoundPipeError), match="step-7"):
        trained.save(tmp_path, step=7, wait=True)
    assert trained.save(tmp_path, step=7, overwrite=True, wait=True).step == 7


def test_tied_and_channels_last_parameters(tmp_path: Path) -> None:
    def build() -> tuple[nn.Sequential, Any, Any]:
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Linear(6, 6), nn.Linear(6, 6))
        layers[0].to(memory_format=torch.channels_last)
        layers[2].weight = layers[1].weight
        model = RoundPipe(layers, name="tied")
        return layers, model, roundpipe.optim.AdamW(model, lr=0.01)

    def train(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            model.forward_backward((torch.randn(4, 4, 6, 6),), loss_fn=lambda outputs, _: outputs.square().mean())
            model.step(optimizer)
        model.synchronize()

    layers, model, optimizer = build()
    train(model, optimizer, 2)
    folder = Path(roundpipe.save_checkpoint(tmp_path, model, optimizer, wait=True).folder)
    assert "2.weight" not in load_file(folder / "model.safetensors")
    train(model, optimizer, 2)
    others, again, its_optimizer = build()
    roundpipe.load_checkpoint(tmp_path, again, its_optimizer)
    train(again, its_optimizer, 2)
    for ours, theirs in zip(others.parameters(), layers.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_the_command(trained: Training, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from roundpipe.cli import app

    run = tmp_path / "run"
    journal = roundpipe.RunJournal(run)
    journal.record(1, loss=float("nan"), norm=1.5)
    folder = Path(trained.save(run, wait=True).folder)
    trained.model.synchronize()
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(run)])
    assert shown.exit_code == 0
    for text in ("step-2: complete", "optimizer AdamW", "model: 10 tensors", "journal: 1 steps", "state: losses"):
        assert text in shown.output
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(run)]).exit_code == 0
    out = tmp_path / "dcp"
    assert CliRunner().invoke(app, ["checkpoint", "convert", str(run), str(out), "--to", "dcp"]).exit_code == 0
    refused = CliRunner().invoke(app, ["checkpoint", "convert", str(out), str(tmp_path / "back"), "--from", "dcp"])
    assert "expected --trust" in str(refused.exception)
    back = tmp_path / "back"
    trusted = ["checkpoint", "convert", str(out), str(back), "--from", "dcp", "--trust"]
    assert CliRunner().invoke(app, trusted).exit_code == 0
    weights = load_file(back / "model.safetensors")
    for name, parameter in trained.layers.named_parameters():
        assert torch.equal(weights[name].bfloat16(), parameter) or weights[name].dtype == torch.float32
    plain = tmp_path / "plain"
    assert CliRunner().invoke(app, ["checkpoint", "convert", str(folder), str(plain), "--to", "hf"]).exit_code == 0
    assert [path.name for path in plain.iterdir()] == ["model.safetensors"]
    content = bytearray((folder / "optimizer.safetensors").read_bytes())
    content[-5] ^= 4
    (folder / "optimizer.safetensors").write_bytes(content)
    damaged = CliRunner().invoke(app, ["checkpoint", "verify", str(run)])
    assert damaged.exit_code == 1
    assert "optimizer.safetensors" in damaged.output


def test_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = roundpipe.RunJournal(tmp_path)
    for step in range(1, 5):
        assert journal.record(step, loss=step / 3, position=step)
    with pytest.raises(ValueError, match="cannot be recorded"):
        journal.record(5, loss=torch.ones(()))
    del journal
    assert roundpipe.read_journal(tmp_path, after_step=2) == {
        3: {"loss": 1.0, "position": 3},
        4: {"loss": 4 / 3, "position": 4},
    }
    again = roundpipe.RunJournal(tmp_path, after_step=2)
    assert again.replays_until == 4
    assert "steps 3 to 4 were completed" in capsys.readouterr().err
    assert again.record(3, loss=1.0, position=3)
    assert not again.record(4, loss=1.25, position=4)
    assert "step 4 does not reproduce its loss: 1.25, and before the run ended 1.33" in capsys.readouterr().err
    assert again.differences == 1


def test_stop_signal() -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    with roundpipe.StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    noted: list[bool] = []

    def elsewhere() -> None:
        with roundpipe.StopSignal() as other:
            noted.append(other.requested)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert noted == [False]
