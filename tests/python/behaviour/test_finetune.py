"""The fine-tuning example, whole and as a notebook: what it learns, what it writes, and how it ends."""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import nbclient
import nbformat
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from programs import ProgramRunner
from robustness import script_environment
from roundpipe.data.chat import load_chat
from roundpipe.data.samples import IGNORED
from tiny_chat import byte_tokenizer, chat_file, model_folder

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PROGRAM = EXAMPLES / "finetune.py"
SIGNALLED = Path(__file__).resolve().parents[1] / "support" / "signalled.py"
DEVICES = "virtual:2"
SIZES = ("--batch-tokens", "512", "--max-length", "128")
LOSSES = re.compile(r"held-out loss (before|after) ([\d.]+)")


class Run(Protocol):
    """Runs the example with these arguments, or signalled.py with its own."""

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def run(runner: ProgramRunner) -> Run:
    return functools.partial(runner.run, PROGRAM, ROUNDPIPE_DEVICES=DEVICES)


@pytest.fixture
def signalled(runner: ProgramRunner) -> Run:
    return functools.partial(runner.run, SIGNALLED, ROUNDPIPE_DEVICES=DEVICES)


def losses(output: str) -> dict[str, float]:
    return {when: float(value) for when, value in LOSSES.findall(output)}


def plain_loss(model: Any, tokenizer: Any, chat: Path) -> float:
    """The held-out loss, one conversation after the other, without anything of the pipeline."""
    total, tokens = 0.0, 0
    for sample in load_chat(chat, tokenizer, held_out=0.1).held_out:
        labels = torch.tensor([sample["labels"]])
        count = int((labels[:, 1:] != IGNORED).sum())
        with torch.no_grad():
            total += count * float(model(input_ids=torch.tensor([sample["input_ids"]]), labels=labels).loss)
        tokens += count
    return total / tokens


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_file(tmp_path_factory.mktemp("chat") / "chat.jsonl")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(
    runner: ProgramRunner, chat: Path, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A folder with all weights trained, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained") / "new"
    result = runner.run(PROGRAM, base, chat, folder, "--lr", "1e-2", "--epochs", "10", *SIZES)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


def test_the_example_is_short() -> None:
    assert len(PROGRAM.read_text().splitlines()) < 100


def test_all_weights(trained: tuple[Path, str], base: Path, chat: Path) -> None:
    folder, output = trained
    printed = losses(output)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert printed["after"] < 0.6 * printed["before"]
    assert printed["before"] == pytest.approx(
        plain_loss(AutoModelForCausalLM.from_pretrained(base), tokenizer, chat), abs=1e-3
    )
    assert printed["after"] == pytest.approx(
        plain_loss(AutoModelForCausalLM.from_pretrained(folder), tokenizer, chat), abs=1e-3
    )


def test_lora(run: Run, trained: tuple[Path, str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, _ = trained
    chat = chat_file(tmp_path / "chat.jsonl", capitals=True)
    result = run(base, chat, tmp_path / "out", "--lora", "8", "--lr", "1e-2", "--epochs", "6", *SIZES)
    assert result.returncode == 0, result.stdout + result.stderr
    printed = losses(result.stdout)
    assert printed["after"] < 0.75 * printed["before"]
    assert not list((tmp_path / "out").glob("model*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    assert printed["after"] == pytest.approx(plain_loss(plain.eval(), tokenizer, chat), abs=1e-3)


@pytest.mark.long
def test_rows_of_one_conversation(run: Run, base: Path, chat: Path, tmp_path: Path) -> None:
    result = run(base, chat, tmp_path / "out", "--no-packing", "--steps", "3", *SIZES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 3/3" in result.stdout
    assert losses(result.stdout)["before"] == pytest.approx(
        plain_loss(AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base), chat), abs=1e-3
    )


@pytest.mark.long
def test_nothing_held_out_and_no_step(run: Run, base: Path, chat: Path, tmp_path: Path) -> None:
    result = run(base, chat, tmp_path / "out", "--steps", "0", "--held-out", "0", *SIZES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step" not in result.stdout and not losses(result.stdout)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for a, b in zip(AutoModelForCausalLM.from_pretrained(base).parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_adapter_of_rank_0_is_refused(run: Run, base: Path, chat: Path, tmp_path: Path) -> None:
    result = run(base, chat, tmp_path / "out", "--lora", "0", *SIZES)
    assert result.returncode == 2 and "expected a rank of at least 1" in result.stderr
    assert not (tmp_path / "out").exists()


def test_interrupted_run_saves(signalled: Run, base: Path, chat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = signalled("SIGINT", "step 3/", PROGRAM, base, chat, folder, "--epochs", "1000", *SIZES)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "interrupted" in result.stdout and "step 4/" not in result.stdout
    plain = AutoModelForCausalLM.from_pretrained(folder)
    loss = plain_loss(plain, AutoTokenizer.from_pretrained(folder), chat)
    assert losses(result.stdout)["after"] == pytest.approx(loss, abs=1e-3)


@pytest.mark.long
def test_a_run_that_was_ended_resumes(run: Run, signalled: Run, base: Path, chat: Path, tmp_path: Path) -> None:
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    options = ("--epochs", "2", "--lora", "4", "--held-out", "0", *SIZES)
    expected = run(base, chat, whole, *options)
    steps = int(re.findall(r"step \d+/(\d+)", expected.stdout)[-1])
    killed = signalled("SIGKILL", "step 5/", PROGRAM, base, chat, ended, *options, "--save-every", "2")
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    result = run(base, chat, ended, *options, "--save-every", "2", "--resume")
    assert result.returncode == 0, result.stdout + result.stderr
    first = int(re.findall(r"step (\d+)/", result.stdout)[0])
    assert first in (1, 3, 5) and f"step {steps}/{steps}" in result.stdout
    assert "does not reproduce" not in result.stderr
    ours = (ended / "adapter_model.safetensors").read_bytes()
    assert ours == (whole / "adapter_model.safetensors").read_bytes()


def test_mistakes_end_with_a_message(run: Run, base: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    answers = ["b" * (400 if index == 29 else 3) for index in range(40)]
    long.write_text("".join(json.dumps({"prompt": "a", "completion": answer}) + "\n" for answer in answers))
    for arguments, message in (
        ((base, tmp_path / "none.jsonl"), "[data] cannot read"),
        ((base, long), "[check_positions] a sample has 422 tokens, and the model has max_position_embeddings = 256"),
    ):
        result = run(*arguments, tmp_path / "out")
        assert result.returncode == 1
        assert f"finetune: {message}" in result.stderr and "Traceback" not in result.stderr, result.stderr
        assert "step" not in result.stdout and not losses(result.stdout)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(EXAMPLES / "finetune.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    # A kernel of this Python, whichever others the machine has.
    install = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(tmp_path), "--name", "of-this-test"]
    subprocess.run(install, check=True, capture_output=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    for name, value in (script_environment() | {"ROUNDPIPE_DEVICES": DEVICES}).items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="of-this-test", resources=resources).execute()
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    printed = losses(text)
    assert printed["after"] < 0.6 * printed["before"]


def test_tiny_tokenizer_has_a_token_a_byte() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 260
    assert tokenizer.decode(tokenizer("é a")["input_ids"]) == "é a"
