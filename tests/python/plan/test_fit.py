"""What a model takes, from its configuration alone, against runs with values; and what `roundpipe plan` says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlavaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

import roundpipe
from roundpipe import _core
from roundpipe.cli import app, main
from roundpipe.following.language_model import LanguageModel
from roundpipe.following.layers.shell import PythonLayer
from roundpipe.following.layers.values import split
from roundpipe.model.call.loss_function import MicrobatchLoss
from roundpipe.plan.fit import ROW_STEP, Fit, card_of_tflops, costs_of_shapes, fit, layers_of_shapes, longest_row
from roundpipe.plan.schedules import Request
from roundpipe.plan.shapes import ModelShapes, make_model, measure
from sweeps import mostly_long

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
    core = _core.ModelCore(_core.Pipeline("run", layers, False), None, None, measures=False, checks_loss=False)
    batch = _core.CallArguments(
        [split(call, is_call=True)], [split(None)], MicrobatchLoss(loss), False, (), passages=[None]
    )
    return core.footprints(batch, _core.RunOptions()), layers


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
    monkeypatch.setattr("roundpipe.ops.token_wise.LONG_ROW_TOKENS", 256)
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


def test_adapters_are_those_of_the_text_beside_a_larger_tower() -> None:
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, **SIZES}
    tower = {"model_type": "clip_vision_model", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    tower |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    model = make_model(LlavaConfig(text_config=text, vision_config=tower), lora_rank=4, kind="pictures")
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    of_text = {name.rpartition(".")[2] for name in adapted if ".language_model.layers." in name}
    assert of_text == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in adapted} == of_text  # not out_proj, fc1 and fc2 of the tower


def test_a_model_without_fused_attention_is_refused() -> None:
    from transformers import GptOssConfig

    config = GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=4, **SIZES)
    with pytest.raises(ValueError, match="GptOssForCausalLM runs with attention 'eager', expected 'sdpa'"):
        make_model(config)


def predicted(shapes: ModelShapes, memory: int) -> Fit:
    costs = costs_of_shapes(shapes, card_of_tflops(1))
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


def with_adapters(memory: int, host_room: int | None = None) -> Fit:
    """One device behind links on which the weights of a step take as long as its work."""
    shapes = measure(make_model(SMALL, lora_rank=4), 64)
    costs = costs_of_shapes(shapes, card_of_tflops(0.2))
    work_ms = sum(layer.forward_ms * 2 + layer.backward_ms for layer in costs.layers) * 4
    rate = sum(layer.size.weights for layer in shapes.layers) / (work_ms * 1e6)
    costs.rates = {"link_up_gb_per_s": rate, "link_down_gb_per_s": rate, "host_gb_per_s": 0.0}
    links = costs.cluster(1, with_links=True)
    request = Request(costs, costs.cluster(1), microbatches=4, mode="sync", keep_layers=1, effort=100_000, links=links)
    return fit(request, layers_of_shapes(shapes), memory, host_room=host_room)


def test_frozen_weights_that_stay_are_not_moved() -> None:
    base = sum(layer.size.frozen_bytes for layer in measure(make_model(SMALL, lora_rank=4), 64).layers)
    all_stay, none_stays = with_adapters(10**9), with_adapters(2_600_000)
    assert all_stay.device.resident == pytest.approx(base, rel=0.01) and none_stays.device.resident < 0.2 * base
    assert all_stay.fits and none_stays.fits
    # Then nothing but adapters and values moves.
    work_ms = all_stay.choices[0].work_ms
    assert all_stay.choices[0].step_ms < 1.1 * work_ms and none_stays.choices[0].step_ms > 2 * work_ms
    some_stay = with_adapters(3_000_000)
    assert some_stay.request.resident_bytes == some_stay.device.resident > 0.5 * base
    assert all_stay.choices[0].step_ms < some_stay.choices[0].step_ms < none_stays.choices[0].step_ms


@pytest.mark.long
@pytest.mark.parametrize("memory", mostly_long([3_000_000, 10**9], 3_000_000))
def test_plans_whose_weights_stay_keep_to_the_room_on_the_host(memory: int) -> None:
    free, least = with_adapters(memory), with_adapters(memory, host_room=1)
    assert least.of_a_step < free.of_a_step
    for room in (free.of_a_step, (free.of_a_step + least.of_a_step) // 2, least.of_a_step):
        assert with_adapters(memory, host_room=room).of_a_step <= room


# --- the command ---


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments, "--search-seconds", "0.001"], catch_exceptions=False)
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
    small = json.loads(run(str(folder), *options, "100MB", "--host-memory", "12MB", "--json"))["memory"]
    host = small["predicted_host_bytes"]
    parameters = measure(make_model(SMALL), 64).parameters
    assert host["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert host["moments"] == 8 * parameters and host["fp32_masters"] == 2 * parameters
    assert not small["fits"] and "it would with --moments 8bit" in small["verdict"]
    assert "--train lora" in run(str(folder), *options, "100MB", "--host-memory", "6MB").splitlines()[-1]
    assert "fits (predicted)" in run(str(folder), *options, "100MB", "--host-memory", "6MB", "--train", "lora")


def change_in(verdict: str) -> list[str]:
    found = re.search(r"^does not fit \(predicted\): .*; it would with (--.*)$", verdict)
    assert found, verdict
    return found[1].split()


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"--memory": "60MB", "--tokens": "16384"}, ["--tokens"]),
        ({"--memory": "1MB", "--tokens": "512"}, ["--memory"]),
        ({"--memory": "1GB", "--tokens": "8192", "--host-memory": "32MB", "--microbatches": "12"}, ["--microbatches"]),
        ({"--memory": "1GB", "--tokens": "2048", "--host-memory": "12MB", "--microbatches": "3"}, ["--moments"]),
        (
            {"--memory": "1GB", "--tokens": "8192", "--host-memory": "12MB", "--microbatches": "12"},
            ["--moments", "--microbatches"],
        ),
        ({"--memory": "1GB", "--tokens": "512", "--host-memory": "6MB"}, ["--train"]),
        ({"--memory": "1GB", "--tokens": "512", "--host-memory": "2MB"}, ["--host-memory"]),
        pytest.param(
            {"--memory": "60MB", "--tokens": "16384", "--host-memory": "12MB"},
            ["--tokens", "--moments"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_change_that_is_named_fits(options: dict[str, str], changed: list[str], folder: Path) -> None:
    def verdict(given: dict[str, str]) -> str:
        return run(str(folder), "--devices", "2", *(word for pair in given.items() for word in pair)).splitlines()[-1]

    change = change_in(verdict(options))
    assert change[::2] == changed
    assert verdict(options | dict(zip(change[::2], change[1::2], strict=True))).startswith("fits (predicted)")


# --- what waits on the host ---


def waiting(host_room: int | None, memory: int = 10**9, tokens: int = 64) -> Fit:
    sizes = SIZES | {"vocab_size": 1000, "num_hidden_layers": 12}
    config = Qwen3Config(hidden_size=128, intermediate_size=512, tie_word_embeddings=False, **sizes)
    shapes = measure(make_model(config), tokens)
    costs = costs_of_shapes(shapes, card_of_tflops(1))
    request = Request(costs, costs.cluster(2), microbatches=4, effort=100_000)
    return fit(request, layers_of_shapes(shapes), memory, host_room=host_room)


def test_stages_get_longer_until_what_waits_has_room() -> None:
    free = waiting(None)
    boundary = 4 * 64 * SMALL.hidden_size * 2
    assert free.values > 11 * boundary
    for room in (free.values, free.values * 2 // 3, free.values // 2, 3 * boundary):
        found = waiting(room)
        assert found.fits and found.values <= room
    # The head's inputs wait in any plan.
    least = waiting(boundary // 2)
    assert boundary <= least.values <= 3 * boundary


@pytest.mark.parametrize("memory", mostly_long([20_000_000, 30_000_000], 20_000_000))
def test_on_a_small_device_fewer_boundaries_are_recomputed_from_layer_by_layer(memory: int) -> None:
    free = waiting(None, memory, tokens=1024)
    assert free.fits and free.grain == "stage"
    few = waiting(free.values // 3, memory, tokens=1024)
    assert few.fits and few.grain == "layer" and few.values <= free.values // 3
    # All layers but the last of each stage go forward once more, on two devices.
    forward_ms = few.request.costs.layers[1].forward_ms
    again = few.again_ms * 2 / (4 * forward_ms)
    assert 12 - len(few.choices[0].backward) <= again <= 12 and free.again_ms == 0
    assert few.step_ms - few.choices[0].step_ms == pytest.approx(few.again_ms)


def test_without_a_number_of_microbatches_it_is_that_of_training_or_fewer(folder: Path) -> None:
    options = [str(folder), "--devices", "3", "--tokens", "8192", "--memory", "1GB", "--json"]
    assert json.loads(run(*options))["microbatches"] == 4
    few = json.loads(run(*options, "--host-memory", "19MB"))
    assert few["memory"]["fits"] and few["microbatches"] < 4
    as_given = json.loads(run(*options, "--host-memory", "19MB", "--microbatches", "4"))
    assert as_given["microbatches"] == 4 and not as_given["memory"]["fits"]


@pytest.mark.parametrize(
    ("options", "of_a_parameter"),
    [
        (["--optimizer", "adamw"], 8),
        (["--optimizer", "adam", "--moments", "8bit"], 2),
        (["--optimizer", "lion"], 4),
        (["--optimizer", "sgd"], 0),
        (["--optimizer", "rmsprop"], 4),
        (["--optimizer", "adafactor"], 0),
    ],
)
def test_moments_are_those_of_the_optimizer(options: list[str], of_a_parameter: int, folder: Path) -> None:
    parameters = measure(make_model(SMALL), 64).parameters
    for model, count in ((str(folder), parameters), ("qwen3-1.7b", None)):
        host = json.loads(run(model, *options, "--json"))["memory"]["predicted_host_bytes"]
        trained = host["gradients"] / 2 if count is None else count
        assert host["moments"] == pytest.approx(of_a_parameter * trained, rel=0.02, abs=0.05 * trained)


def test_masters_of_24_bits_take_one_byte(folder: Path) -> None:
    for model in (str(folder), "qwen3-1.7b"):
        exact, narrow = (
            json.loads(run(model, "--masters", masters, "--json"))["memory"]["predicted_host_bytes"]
            for masters in ("fp32", "24bit")
        )
        assert narrow == exact | {"fp32_masters": exact["fp32_masters"] // 2, "together": narrow["together"]}


def test_moments_beside_muon_are_those_of_adamw(folder: Path) -> None:
    named = make_model(SMALL).named_parameters()
    expected = sum(p.numel() * (4 if p.dim() == 2 and ".layers." in name else 8) for name, p in named)
    host = json.loads(run(str(folder), "--optimizer", "muon", "--json"))["memory"]["predicted_host_bytes"]
    assert host["moments"] == expected
    host = json.loads(run("qwen3-1.7b", "--optimizer", "muon", "--json"))["memory"]["predicted_host_bytes"]
    assert host["moments"] == pytest.approx(4 * host["gradients"] / 2, rel=0.02)


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
        (["--optimizer", "adagrad"], "--optimizer is adagrad, expected one of adam, adamw,"),
        (["--moments", "4bit"], "--moments is 4bit"),
        (["--optimizer", "lion", "--moments", "8bit"], "--moments is 8bit, expected fp32 for lion"),
        (["--mode", "inference", "--moments", "8bit"], "--moments has no effect here"),
        (["--masters", "16bit"], "--masters is 16bit, expected fp32 or 24bit"),
        (["--mode", "inference", "--masters", "24bit"], "--masters has no effect here"),
        (["--gradients-at-once"], "--gradients-at-once has no effect here, expected it only with --mode sync"),
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
    result = CliRunner().invoke(app, ["plan", str(file), "--search-seconds", "0.01", "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["memory"]["fits"], found["memory"]["verdict"]
    assert found["memory"]["device_memory"] in (500_000_000, 4_000_000_000)
    alike = CliRunner().invoke(
        app, ["plan", str(file), "--search-seconds", "0.01", "--memory", "500MB", "--json"], catch_exceptions=False
    )
    assert not json.loads(alike.stdout)["memory"]["fits"]
    costs["devices"][1]["memory_bytes"] = 1_500_000_000
    file.write_text(json.dumps(costs))
    result = CliRunner().invoke(app, ["plan", str(file), "--search-seconds", "0.01"], catch_exceptions=False)
    assert "on a device of 1.50 GB" in result.stdout
