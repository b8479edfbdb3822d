"""Bad input ends with one line, before data is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import roundpipe.train.data
from roundpipe.cli import app
from roundpipe.train.config import TrainConfig
from roundpipe.train.session import run
from tiny_chat import chat_file, model_folder

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    model_folder(folder / "model", num_hidden_layers=1)
    chat_file(folder / "chat.jsonl", 20)
    return folder


@pytest.fixture
def refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts a run that is refused: in one line, and before its data is read."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(roundpipe.train.data, "prepare", read)

    def check(said: str, **values: Any) -> None:
        usual: dict[str, Any] = {
            "model": str(place / "model"),
            "data": [str(place / "chat.jsonl")],
            "out": str(tmp_path / "run"),
            "length": 64,
            "steps": 2,
            "devices": "virtual:1",
        }
        with pytest.raises(ValueError, match=r"^\[") as error:
            run(TrainConfig(**{**usual, **values}), resume=False)
        assert said in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()

    return check


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def setting(**values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


MODELS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no config": ("config.json", Path.unlink, "config"),
    "half a config": ("config.json", text("{"), "config"),
    "a list as config": ("config.json", text("[]"), "config"),
    "nothing in the config": ("config.json", text("{}"), "cannot be"),
    "an unknown kind": ("config.json", setting(model_type="unknown"), "unknown"),
    "another kind": ("config.json", setting(model_type="bert", architectures=["BertForMaskedLM"]), "a BertForMaskedLM"),
    "a size in words": ("config.json", setting(hidden_size="large"), "cannot be"),
    "an unknown dtype": ("config.json", setting(dtype="tiny"), "cannot be"),
    "another size than the weights": ("config.json", setting(intermediate_size=96), "another shape there"),
    "no weights": ("model.safetensors", Path.unlink, "model.safetensors"),
    "torn weights": ("model.safetensors", text("abc"), "model.safetensors"),
    "half a tokenizer": ("tokenizer.json", text("{"), "tokenizer"),
    "a list as tokenizer": ("tokenizer.json", text("[]"), "tokenizer"),
    "half a tokenizer's config": ("tokenizer_config.json", text("{"), "tokenizer"),
    "a list as tokenizer's config": ("tokenizer_config.json", text("[]"), "tokenizer"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_broken_model_folder(case: str, refused: Callable[..., None], place: Path, tmp_path: Path) -> None:
    file, change, said = MODELS[case]
    shutil.copytree(place / "model", tmp_path / "model")
    change(tmp_path / "model" / file)
    refused(said, model=str(tmp_path / "model"))


ADAPTER = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("settings", "weights", "said"),
    [
        ("{", "adapter_model.safetensors", "header"),
        (json.dumps(ADAPTER), "adapter_model.bin", "a pickle, which is not read"),
    ],
)
def test_a_broken_adapter(settings: str, weights: str, said: str, refused: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(settings)
    (tmp_path / "adapter" / weights).write_text("abc")
    refused(said, model="", adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize("settings", ["{", "[]", "{}", json.dumps(ADAPTER), '{"peft_type": "UNKNOWN"}'])
def test_a_broken_config_of_an_adapter(settings: str, refused: Callable[..., None], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(settings)
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    refused("adapter_config.json", model="", adapter=str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"devices": "nonsense"}, "nonsense"),
        ({"devices": "virtual:x"}, "virtual:x"),
        ({"warmup_steps": 3}, "warm"),
        ({"lora": True, "lora_targets": ["nothing"]}, "nothing"),
        ({"out": "x" * 300}, "expected a folder"),
    ],
)
def test_an_option_that_cannot_be_used(values: dict[str, Any], said: str, refused: Callable[..., None]) -> None:
    refused(said, **values)


def test_a_machine_is_for_a_dry_run() -> None:
    result = CliRunner().invoke(app, ["train", "--machine", "machine.toml"])
    assert str(result.exception).startswith("[train] --machine is given without --dry-run")
