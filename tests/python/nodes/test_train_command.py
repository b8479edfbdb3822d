"""`roundpipe train` on several nodes: the steps of one, what is written once, stopping, going on, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from node_processes import NodeProcesses
from robustness import script_environment
from tiny_chat import byte_tokenizer, chat_file, model_folder, tiny_llama
from tiny_pictures import llava, picture_model_folder, shape_file

STEPS, LENGTH = 4, 64
TRAIN, STOP = "train_programs:train", "train_programs:train_and_stop"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("train")
    model_folder(place / "model", num_hidden_layers=1)
    chat_file(place / "chat.jsonl", 120)
    return {
        "model": str(place / "model"),
        "data": [str(place / "chat.jsonl")],
        "length": LENGTH,
        "steps": STEPS,
        "learning_rate": 2e-3,
        "devices": "virtual:1",
        "samples": 1,
        "sample_tokens": 4,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "loss", "grad_norm", "learning_rate", "tokens", "evaluation_loss", "evaluation_tokens")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name in kept} for line in lines]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same but for the order of sums in fp32."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_steps_of_one_node(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in nodes.results(1, TRAIN, {**usual, "out": str(one)})] == [0]
    (first, shown), (second, silent) = nodes.results(2, TRAIN, {**usual, "out": str(two)})
    assert (first, second) == (0, 0)
    assert f"step {STEPS}/{STEPS}" in shown and not silent
    assert_close(metrics(two), metrics(one))
    assert sorted(path.name for path in two.iterdir()) == sorted(path.name for path in one.iterdir())
    assert "2 nodes; on rank 0: " in (two / "report.html").read_text()
    expected = AutoModelForCausalLM.from_pretrained(one / "model").state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(two / "model").state_dict().items():
        # As a whole: Adam moves an element whose gradient is all rounding as far as any other.
        assert (value - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


def test_a_node_without_rows(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    values = {**usual, "batch_tokens": LENGTH, "steps": 2}  # one row
    one, two = tmp_path / "one", tmp_path / "two"
    nodes.results(1, TRAIN, {**values, "out": str(one)})
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    assert_close(metrics(two), metrics(one))


@pytest.mark.parametrize("task", ["dpo", pytest.param("kto", marks=pytest.mark.long), "reward"])
def test_answers_are_compared_as_on_one_node(
    task: str, nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path
) -> None:
    data = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{i}", "chosen": "ab" * (1 + i % 4), "rejected": "z" * (1 + i % 3)} for i in range(9)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    values = {**usual, "data": [str(data)], "task": task, "optimizer": "sgd", "held_out": 2.0, "batch_tokens": 150}
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in nodes.results(1, TRAIN, {**values, "out": str(one)})] == [0]
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    assert_close(metrics(two), metrics(one))


@pytest.mark.parametrize("freeze", [None, ["language_model", "lm_head"]], ids=["all", "tower"])
def test_conversations_with_pictures(
    freeze: list[str] | None, nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path
) -> None:
    picture_model_folder(tmp_path / "model", llava())
    data = str(shape_file(tmp_path / "data", 9, uneven=True))
    # Three rows to a step, so that a node has rows without pictures in some.
    values = {**usual, "model": str(tmp_path / "model"), "data": [data], "held_out": 2.0, "batch_tokens": 200}
    values |= {"freeze": freeze, "optimizer": "sgd", "length": 128}
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in nodes.results(1, TRAIN, {**values, "out": str(one)})] == [0]
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    assert_close(metrics(two), metrics(one))
    expected = load_file(one / "model" / "model.safetensors")
    for name, value in load_file(two / "model" / "model.safetensors").items():
        assert (value - expected[name]).abs().max() < 1e-4, name


def test_gradients_at_once(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    values = {**usual, "gradients_at_once": True, "clip_by": "last_norm", "clip": 0.1, "optimizer": "sgd"}
    one, two, stopped = tmp_path / "one", tmp_path / "two", tmp_path / "stopped"
    assert [code for code, _ in nodes.results(1, TRAIN, {**values, "out": str(one)})] == [0]
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    assert_close(metrics(two), metrics(one))
    assert [code for code, _ in nodes.results(2, STOP, {**values, "out": str(stopped)}, 1, 2)] == [130, 130]
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(stopped)}, True)] == [0, 0]
    assert metrics(stopped) == metrics(two)  # which the norm of the last step before the stop has clipped


@pytest.mark.long
@pytest.mark.parametrize(("stopped", "later"), [(1, 2), (0, 3), (1, 1)])
def test_a_signal_on_one_node_stops_all(
    stopped: int, later: int, nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path
) -> None:
    values = {**usual, "lora": True, "held_out": 0, "asynchronous": True}
    if later == 2:
        values["lora_dropout"] = 0.2
    whole, out = tmp_path / "whole", tmp_path / "run"
    nodes.results(2, TRAIN, {**values, "out": str(whole)})
    ended = nodes.results(2, STOP, {**values, "out": str(out)}, stopped, 2)
    assert [code for code, _ in ended] == [130, 130]
    assert f"torchrun ... -m roundpipe train --resume --out {out}" in ended[0][1]
    assert 0 < len(metrics(out)) < STEPS
    again = nodes.results(later, TRAIN, {**values, "out": str(out)}, True)
    assert {code for code, _ in again} == {0}
    if later != 2:
        assert_close(metrics(out), metrics(whole))
        return
    assert metrics(out) == metrics(whole)
    expected = load_file(whole / "adapter" / "adapter_model.safetensors")
    for name, value in load_file(out / "adapter" / "adapter_model.safetensors").items():
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"seed": 1}, "[train] the nodes have other options: seed: rank 0 has 0, rank 1 has 1; expected the same"),
        ({"out": "elsewhere"}, "[data] elsewhere/data has no prepared.json, expected a folder of prepared data; if "),
    ],
    ids=["options", "folder"],
)
def test_nodes_that_differ_are_refused(
    others: dict[str, Any], expected: str, nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path
) -> None:
    for error, _ in nodes.results(2, TRAIN, {**usual, "out": str(tmp_path / "run")}, False, {1: others}):
        assert isinstance(error, str) and error.startswith(expected)


def test_two_passes_are_refused_before_work_begins(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    values = {**usual, "gradients_at_once": True, "clip_by": "two_passes", "out": str(tmp_path / "run")}
    for error, _ in nodes.results(2, TRAIN, values):
        assert isinstance(error, str) and error.startswith("[train] --clip-by is two_passes, expected last_norm over")
    assert not (tmp_path / "run").exists()


def test_what_rank_0_refuses_is_told_to_all(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error, _ in nodes.results(2, TRAIN, {**usual, "out": str(tmp_path / "file")}):
        assert isinstance(error, str) and "a file, expected a folder" in error


@pytest.mark.long
def test_under_torchrun(usual: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "roundpipe", "train", "--out", str(tmp_path / "run"), "--data", usual["data"][0]]
    for name in ("model", "length", "steps", "devices"):
        command += [f"--{name}", str(usual[name])]
    ended = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("the report is") == 1
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.long
def test_in_float16_all_nodes_have_one_scale(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    loud = tmp_path / "loud"
    model = tiny_llama(num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(1000)  # the first scales overflow
    model.save_pretrained(loud)
    byte_tokenizer().save_pretrained(loud)
    values = {**usual, "model": str(loud), "dtype": "float16", "samples": 0}
    one, two = tmp_path / "one", tmp_path / "two"
    nodes.results(1, TRAIN, {**values, "out": str(one)})
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    scaling = [
        [(line["loss_scale"], line["skipped_steps"]) for line in map(json.loads, lines) if "loss" in line]
        for lines in ((folder / "metrics.jsonl").read_text().splitlines() for folder in (one, two))
    ]
    assert scaling[0] == scaling[1] and scaling[0][1] == (32768, scaling[0][1][1]) and scaling[0][0] == (65536, 1)
    losses = [[line["loss"] for line in metrics(folder) if "loss" in line] for folder in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_adapters_on_an_encoded_base(nodes: NodeProcesses, usual: dict[str, Any], tmp_path: Path) -> None:
    values = {**usual, "lora": True, "quantise": "nf4"}
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in nodes.results(1, TRAIN, {**values, "out": str(one)})] == [0]
    assert [code for code, _ in nodes.results(2, TRAIN, {**values, "out": str(two)})] == [0, 0]
    assert_close(metrics(two), metrics(one))
