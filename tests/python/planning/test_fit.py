"""What a model takes, from its configuration alone, against runs with values; and what `roundpipe plan` says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

import roundpipe
from roundpipe import _core
from roundpipe.cli import app, main
from roundpipe.following.language_model import LanguageModel
from roundpipe.layers.shell import PythonLayer
from roundpipe.layers.values import split
from roundpipe.memory.footprint import measure as measure_run
from roundpipe.planning.fit import ROW_STEP, Fit, costs_of_shapes, fit, layers_of_shapes, longest_row
from roundpipe.planning.schedules import Request
from roundpipe.planning.shapes import ModelShapes, make_model, measure

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = {"vocab_size": 8000, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
QWEN = Qwen3Config(hidden_size=128, intermediate_size=512, tie_word_embeddings=False, **SIZES)
CONFIGS = {
    "qwen3": QWEN,
    "tied": Qwen3Config(hidden_size=128, intermediate_size=512, tie_word_embeddings=True, **SIZES),
    "llama": LlamaConfig(hidden_size=128, intermediate_size=512, **SIZES),
    "experts": Qwen3MoeConfig(
        hidden_size=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=512, **SIZES
    ),
}
SMALL = Qwen3Config(hidden_size=128, intermediate_size=512, tie_word_embeddings=False, **SIZES | {"vocab_size": 1000})


def run_with_values(config: PretrainedConfig, tokens: int) -> tuple[list[_core.LayerFootprint], list[PythonLayer]]:
    """What each layer of the followed model really holds."""
    roundpipe.devices("virtual:1")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    followed = LanguageModel(model)
    layers = [PythonLayer(part, str(n), n == len(followed.chain) - 1) for n, part in enumerate(followed.chain)]
    ids = torch.randint(config.vocab_size, (1, tokens))
    (call,) = followed.prepare([((), {"input_ids": ids, "labels": ids})], loss_only=True)
    loss = LanguageModel.mean_loss(1)
    return measure_run(
        layers, split(call, is_call=True), lambda outputs: [loss(outputs, None)], torch.device("cpu"), trains=True
    ), layers


@pytest.mark.parametrize("name", list(CONFIGS))
def test_shapes_tell_what_a_run_holds(name: str) -> None:
    found, layers = run_with_values(CONFIGS[name], tokens=700)
    shapes = measure(make_model(CONFIGS[name]), 700)
    assert len(shapes.layers) == len(found)
    for mine, real, layer in zip(shapes.layers, found, layers, strict=True):
        is_last = mine.name == "after"
        for field in ("inputs", "outputs", "output_gradients", "forward", "saved", "backward"):
            # Positions of tokens travel or not, and a mask of some bytes; softmax is not in place on every device.
            most = 1.7 if is_last and field == "forward" else 1.03
            low, high = 0.97 * getattr(real, field) - 1000, most * getattr(real, field) + 1000
            assert low <= getattr(mine.footprint, field) <= high, (mine.name, field)
        parameters = sum(parameter.nbytes for _, parameter in layer.parameters())
        assert parameters <= mine.size.weights <= parameters + 1000, mine.name
    assert shapes.trained == shapes.parameters


def test_long_rows_are_taken_in_chunks_as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure(make_model(QWEN), 700).layers[1].footprint
    monkeypatch.setattr("roundpipe.following.token_wise.LONG_ROW_TOKENS", 256)
    found, _ = run_with_values(QWEN, tokens=700)
    mine = measure(make_model(QWEN), 700).layers[1].footprint
    assert mine.saved < 0.8 * whole.saved
    assert mine.saved == pytest.approx(found[1].saved, rel=0.03)
    assert mine.backward == pytest.approx(found[1].backward, rel=0.06)


def test_adapters_alone_train() -> None:
    shapes = measure(make_model(CONFIGS["experts"], lora_rank=4), 64)
    assert 0 < shapes.trained < 0.05 * shapes.parameters
    assert shapes.first_trained == 1 and shapes.layers[0].size.gradients == 0
    assert shapes.host().gradients == 4 * shapes.trained  # adapters are in fp32


def test_a_model_without_fused_attention_is_refused() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=4, **SIZES)
    with pytest.raises(ValueError, match="GptOssForCausalLM runs with attention 'eager', expected 'sdpa'"):
        make_model(config)


def predicted(shapes: ModelShapes, memory: int) -> Fit:
    costs = costs_of_shapes(shapes, 1)
    request = Request(costs, costs.cluster(2), microbatches=4, replicas=False, effort=100_000)
    return fit(request, layers_of_shapes(shapes), memory)


def test_stages_get_shorter_until_the_plan_fits() -> None:
    shapes = measure(make_model(SMALL), 64)
    free, tight, none = (predicted(shapes, memory) for memory in (10**9, 3_000_000, 1_000_000))
    assert free.device.total > 3_000_000
    assert free.fits and tight.fits
    assert not none.fits and none.device.total > 1_000_000


def test_the_longest_row() -> None:
    model, memory = make_model(SMALL), 75_000_000
    tokens, found = longest_row(lambda length: predicted(measure(model, length), memory), limit=16 * ROW_STEP)
    assert found is not None and found.fits and 3 * ROW_STEP <= tokens < 8 * ROW_STEP
    assert not predicted(measure(model, tokens + ROW_STEP), memory).fits
    assert longest_row(lambda length: predicted(measure(model, length), 1_000_000), limit=ROW_STEP) == (0, None)


# --- the command ---


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments, "--effort", "100000"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SMALL.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_plan_of_a_folder_says_whether_it_fits(folder: Path) -> None:
    options = ["--devices", "2", "--tokens", "512", "--memory"]
    text = run(str(folder), *options, "100MB", "--host-memory", "1GB")
    assert text.splitlines()[-1].startswith("fits (predicted): ") and "512 tokens a microbatch" in text
    assert (
        run(str(folder / "config.json"), *options, "100MB", "--host-memory", "1GB").splitlines()[2:]
        == (text.splitlines()[2:])
    )
    small = json.loads(run(str(folder), *options, "100MB", "--host-memory", "17MB", "--json"))["memory"]
    host = small["predicted_host_bytes"]
    parameters = measure(make_model(SMALL), 64).parameters
    assert host["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert host["moments"] == 8 * parameters and host["fp32_masters"] == 2 * parameters
    assert not small["fits"] and 'moments="8bit"' in small["verdict"]
    assert "--train lora" in run(str(folder), *options, "100MB", "--host-memory", "13MB").splitlines()[-1]
    assert "fits (predicted)" in run(str(folder), *options, "100MB", "--host-memory", "13MB", "--train", "lora")


def test_the_smallest_change_is_one_that_fits(folder: Path) -> None:
    options = ["--devices", "2", "--memory", "60MB"]
    verdict = run(str(folder), *options, "--tokens", "16384").splitlines()[-1]
    change = re.search(
        r"does not fit \(predicted\): a device needs .* smallest change that would: --tokens (\d+)", verdict
    )
    assert change, verdict
    assert "fits (predicted)" in run(str(folder), *options, "--tokens", change[1]).splitlines()[-1]
    verdict = run(str(folder), "--devices", "2", "--tokens", "512", "--memory", "1MB").splitlines()[-1]
    change = re.search(r"smallest change that would: --memory (\S+)$", verdict)
    assert change, verdict
    assert "fits (pre" in run(str(folder), "--devices", "2", "--tokens", "512", "--memory", change[1]).splitlines()[-1]


def test_plan_of_a_preset_says_what_is_not_known() -> None:
    text = run("qwen3-1.7b", "--host-memory", "64GB")
    assert "not known: embeddings" in text and "fits (predicted)" in text.splitlines()[-1]
    assert "does not fit (predicted): a device needs" in run("qwen3-235b-lora", "--memory", "4GB").splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train", "half"], "--train is half"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--tflops", "-1"], "--tflops is -1"),
        (["--mode", "inference"], "--mode is inference"),
    ],
)
def test_bad_options_end_with_code_2(
    options: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, expected in (([str(folder), *options], message), ([str(folder.parent)], "has no config.json")):
        monkeypatch.setattr("sys.argv", ["roundpipe", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert expected in capsys.readouterr().err


def test_options_of_a_model_are_refused_for_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roundpipe", "plan", "qwen3-1.7b", "--tokens", "4096"])
    with pytest.raises(SystemExit):
        main()
    assert "--tokens has no effect here, expected it only with a model's folder" in capsys.readouterr().err


def test_verdicts_leave_nothing_unsaid(folder: Path, tmp_path: Path) -> None:
    assert run(str(folder), "--devices", "2", "--tokens", "512").splitlines()[-1].startswith("not compared")
    costs: dict[str, Any] = {"schema": "roundpipe-costs", "version": 1, "layers": [{"forward_ms": 1, "backward_ms": 2}]}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    assert "not compared" in run(str(tmp_path / "costs.json"), "--devices", "1")


def test_each_device_has_its_own_memory(tmp_path: Path) -> None:
    # The head fits only the last device, so a plan for the memory of the others would not exist.
    layer = {"forward_ms": 2, "backward_ms": 4, "weight_bytes": 50_000_000, "activation_bytes": 1_000_000}
    costs = {
        "schema": "roundpipe-costs",
        "version": 1,
        "layers": [{"count": 6, **layer}],
        "head": {**layer, "weight_bytes": 500_000_000},
        "devices": [{"count": 2, "memory_bytes": 500_000_000}, {"memory_bytes": 4_000_000_000}],
    }
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs))
    result = CliRunner().invoke(app, ["plan", str(file), "--effort", "2000000", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["memory"]["fits"], found["memory"]["verdict"]
    assert found["memory"]["device_memory"] in (500_000_000, 4_000_000_000)
    alike = CliRunner().invoke(
        app, ["plan", str(file), "--effort", "2000000", "--memory", "500MB", "--json"], catch_exceptions=False
    )
    assert not json.loads(alike.stdout)["memory"]["fits"]
    costs["devices"][1]["memory_bytes"] = 1_500_000_000
    file.write_text(json.dumps(costs))
    result = CliRunner().invoke(app, ["plan", str(file), "--effort", "2000000"], catch_exceptions=False)
    assert "on a device of 1.50 GB" in result.stdout
