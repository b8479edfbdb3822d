"""roundpipe-train: a training by the program of C++ alone, its options, and going on after it was stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from damaging import sign
from language_program import make_folder
from metric_lines import metric_lines, repeatable_lines
from roundpipe.data.packing import pack
from sweeps import mostly_long, sweep
from token_files import write_tokens

PROGRAM = Path(__file__).resolve().parents[3] / "build" / "release" / "programs" / "train" / "roundpipe-train"
pytestmark = [pytest.mark.skipif(not PROGRAM.exists(), reason="make build-tests has not made the program")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDPIPE_DEVICES": "virtual:2"}
VOCABULARY = 50
LENGTH = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, attention_bias=True, **sizes)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def documents() -> list[list[int]]:
    generator = random.Random(3)
    lengths = [generator.randrange(2, 15) for _ in range(30)]
    return [[generator.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens") / "some.tokens", documents(), VOCABULARY)


Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(model: Path, tokens: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def of(**options: Any) -> list[str]:
        """The command with these options; None leaves one out, True is a flag."""
        given = {"model": model, "tokens": tokens, "out": tmp_path / "run", "length": LENGTH, "learning_rate": 0.01}
        words = [str(PROGRAM)]
        for name, value in (given | options).items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return words

    return of


@pytest.fixture
def train(command: Callable[..., list[str]]) -> Train:
    def run(**options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(**options), env=ENVIRONMENT, capture_output=True, text=True, check=False)

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def torchs_optimizers(rule: str, plain: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Those of a run with this rule and a weight decay of 0.1."""
    named = dict(plain.named_parameters())
    vectors = {"params": [weight for weight in named.values() if weight.dim() == 1], "weight_decay": 0.0}
    tables = [weight for name, weight in named.items() if "embed_tokens" in name or "lm_head" in name]
    matrices = [weight for name, weight in named.items() if "_proj.weight" in name]
    assert len(tables) + len(matrices) + len(vectors["params"]) == len(named)
    if rule == "adamw":
        return [torch.optim.AdamW([{"params": [*tables, *matrices], "weight_decay": 0.1}, vectors])]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": tables, "weight_decay": 0.1}, vectors]),
    ]


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_it_is_the_loop_of_plain_torch(rule: str, train: Train, model: Path, tmp_path: Path) -> None:
    options = {"batch_tokens": 2 * LENGTH, "weight_decay": 0.1, "warmup_steps": 2, "schedule": "constant"}
    done = train(**options, optimizer=rule, in_order=True, epochs=2, attention="sdpa")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pack([{"input_ids": torch.tensor(document)} for document in documents()], LENGTH)
    plain = AutoModelForCausalLM.from_pretrained(model)
    optimizers = torchs_optimizers(rule, plain)
    lines = metric_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, len(rows) + 1))
    assert 0 < lines[-1]["devices_busy"] <= 1
    for step, line in enumerate(lines):
        rate = 0.01 * min(1.0, (step + 1) / 2)
        two = [rows[(2 * step + place) % len(rows)] for place in range(2)]
        counted = sum(int((row["labels"][:, 1:] != -100).sum()) for row in two)
        loss = sum(plain(**row, use_cache=False, num_items_in_batch=counted).loss for row in two)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        # Muon's products, in bf16, round what differs in the last bits of gradients.
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4 if rule == "adamw" else 1e-3), step
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-3 if rule == "adamw" else 1e-2), step
        assert line["learning_rate"] == pytest.approx(rate)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


def test_a_stopped_training_goes_on_with_the_same_bits(
    train: Train, command: Callable[..., list[str]], tmp_path: Path
) -> None:
    options = {
        "rows": "stream",
        "dtype": "bfloat16",
        "steps": 40,
        "evaluation_tokens": 20,
        "evaluate_every": 8,
        "save_every": 7,
        "keep": 2,
        "warmup_steps": 3,
        "moments": "8bit",
        "momentum": None,
    }
    done = train(**options, out=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    process = subprocess.Popen(command(**options), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 10/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait() == 0  # preemption is no failure
    stopped = metric_lines(tmp_path / "run")[-1]["step"]
    assert 10 <= stopped < 40 and not (tmp_path / "run" / "model").exists()
    assert (tmp_path / "run" / f"step-{stopped}" / "config.json").exists()

    said = train(**options)
    assert said.returncode == 2 and "add --resume to go on from it" in said.stderr
    said = train(**(options | {"learning_rate": 0.02}), resume=True)
    assert said.returncode == 2 and "--learning-rate is 0.02" in said.stderr, said.stderr
    done = train(**options, resume=True)
    assert done.returncode == 0 and f"resumed from {tmp_path}/run/step-{stopped}" in done.stdout, done.stderr
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)

    assert repeatable_lines(tmp_path / "whole") == repeatable_lines(tmp_path / "run")
    evaluated = [line["step"] for line in metric_lines(tmp_path / "run") if "evaluation_loss" in line]
    assert evaluated == [8, 16, 24, 32, 40]


@sweep("evaluate_every, asynchronous", [2, None], [True, None], together=0)
def test_a_run_that_is_resumed_settles_at_the_same_steps(
    asynchronous: bool | None, evaluate_every: int | None, train: Train, tmp_path: Path
) -> None:
    # As many evaluations at the end; a constant rate does not know how many steps there are.
    options = {"asynchronous": asynchronous, "evaluation_tokens": 20, "evaluate_every": evaluate_every}
    options |= {"schedule": "constant", "save_every": 3, "keep": 9}
    done = train(**options, steps=8, out=tmp_path / "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    # It goes on from a checkpoint, and from the end of a shorter training.
    (tmp_path / "part").mkdir()
    shutil.copytree(tmp_path / "whole" / "step-3", tmp_path / "part" / "step-3")
    assert train(**options, steps=5, out=tmp_path / "longer").returncode == 0
    shutil.rmtree(tmp_path / "longer" / "model")
    for name in ("part", "longer"):
        done = train(**options, steps=8, out=tmp_path / name, resume=True)
        assert done.returncode == 0, done.stdout + done.stderr
        expected, found = (
            {line["step"]: line["loss"] for line in metric_lines(tmp_path / each) if "loss" in line}
            for each in ("whole", name)
        )
        assert found == {step: loss for step, loss in expected.items() if step in found} and len(found) >= 5
        assert all(
            torch.equal(value, weights(tmp_path / name)[key]) for key, value in weights(tmp_path / "whole").items()
        )


@pytest.mark.long
def test_a_run_goes_back_behind_damage_and_saves_over_it(train: Train, tmp_path: Path) -> None:
    options = {"steps": 8, "save_every": 2, "keep": 2, "out": tmp_path / "run"}
    assert train(**options).returncode == 0
    whole = weights(tmp_path / "run")
    for damaged in (("step-8", "state.json"), ("step-8", "optimizer.safetensors")):
        shutil.rmtree(tmp_path / "run" / "model")
        file = tmp_path / "run" / damaged[0] / damaged[1]
        file.write_bytes(file.read_bytes()[::-1])
        done = train(**options, resume=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "going back from step 8 to step 6, which loses 2 steps" in done.stderr and damaged[1] in done.stderr
        assert all(torch.equal(value, weights(tmp_path / "run")[key]) for key, value in whole.items())
    # Saved anew, so nothing is passed over any more.
    shutil.rmtree(tmp_path / "run" / "model")
    done = train(**options, resume=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for step in ("step-6", "step-8"):
        (tmp_path / "run" / step / "state.json").unlink()
    shutil.rmtree(tmp_path / "run" / "model")
    done = train(**options, resume=True)
    assert done.returncode != 0 and "has no checkpoint that is whole" in done.stderr


def test_a_run_of_another_order_of_rows_is_refused(train: Train, tmp_path: Path) -> None:
    assert train(steps=1, save_every=1).returncode == 0
    step = tmp_path / "run" / "step-1"
    state = json.loads((step / "state.json").read_text())
    del state["state"]["roundpipe-train order"]
    (step / "state.json").write_text(json.dumps(state))
    sign(step)
    said = train(steps=1, save_every=1, resume=True)
    assert said.returncode == 2 and "in an order that is no longer made" in said.stderr, said.stderr


@pytest.mark.long
def test_rows_of_each_kind_and_every_optimizer_train(train: Train, tmp_path: Path) -> None:
    for number, options in enumerate(
        (
            {"rows": "padded", "optimizer": "lion", "batch_tokens": 4 * LENGTH, "asynchronous": True},
            {"rows": "packed", "optimizer": "sgd", "momentum": 0.9, "schedule": "linear"},
            {"optimizer": "adafactor", "recompute_by_layer": True, "dtype": "bfloat16", "clip": 0},
            {"optimizer": "muon", "momentum": 0.9, "dtype": "float16", "asynchronous": True},
            {"optimizer": "muon", "lora": True, "beta1": 0.8},
        )
    ):
        done = train(**options, steps=3, out=tmp_path / str(number))
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in metric_lines(tmp_path / str(number)))


def test_adapters_go_on_with_the_same_bits(train: Train, model: Path, tmp_path: Path) -> None:
    options = {
        "lora": True,
        "lora_rank": 3,
        "lora_targets": "q_proj,down_proj",
        "lora_dropout": 0.2,
        "save_every": 2,
        "schedule": "constant",
    }
    for out, steps in (("whole", 6), ("run", 3)):
        done = train(**options, steps=steps, out=tmp_path / out)
        assert done.returncode == 0, done.stdout + done.stderr
    done = train(**options, steps=6, resume=True, replace_model=True, merge=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = tmp_path / "run" / "step-6"
    assert stored.stat().st_size and not any(
        "q_proj.weight" in name for name in load_file(stored / "model.safetensors")
    )
    whole, again = (load_file(tmp_path / out / "adapter" / "adapter_model.safetensors") for out in ("whole", "run"))
    assert len(whole) == 8 and whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "run" / "adapter")
    assert peft.peft_config["default"].target_modules == {"q_proj", "down_proj"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in peft.merge_and_unload().state_dict().items())
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()

    done = train(adapter=tmp_path / "run" / "adapter", out=tmp_path / "further", steps=2)
    assert done.returncode == 0, done.stdout + done.stderr
    further = load_file(tmp_path / "further" / "adapter" / "adapter_model.safetensors")
    assert further.keys() == whole.keys() and not torch.equal(next(iter(further.values())), next(iter(whole.values())))


def test_two_passes_have_the_bits_of_clipping_by_the_norm(train: Train, tmp_path: Path) -> None:
    options = {
        "lora": True,
        "lora_dropout": 0.2,
        "steps": 3,
        "clip": 0.01,
        "evaluation_tokens": 20,
        "evaluate_every": 2,
    }
    passes = {"clip_by": "two_passes", "gradients_at_once": True}
    for out, more in (("plain", {}), ("passes", passes)):
        done = train(**options, **more, out=tmp_path / out)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, ours = (load_file(tmp_path / out / "adapter" / "adapter_model.safetensors") for out in ("plain", "passes"))
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    assert repeatable_lines(tmp_path / "plain") == repeatable_lines(tmp_path / "passes")
    assert all(line["grad_norm"] > 0.01 for line in metric_lines(tmp_path / "passes") if "grad_norm" in line)


def test_weight_decay_is_of_matrices_alone(train: Train, tmp_path: Path) -> None:
    """Biases of experts are stacked, and matrices of experts as well."""
    folder = make_folder(tmp_path / "model", {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8})
    saved = []
    for decay in (0.0, 0.5):
        out = tmp_path / str(decay)
        done = train(model=folder, out=out, optimizer="sgd", weight_decay=decay, steps=1, clip=0)
        assert done.returncode == 0, done.stdout + done.stderr
        saved.append(load_file(out / "model" / "model.safetensors"))
    for name in load_file(folder / "model.safetensors"):
        decays = not name.endswith(("bias", "norm.weight", "sinks"))
        assert torch.equal(saved[0][name], saved[1][name]) != decays, name


def test_a_dry_run_leaves_nothing(train: Train, tmp_path: Path) -> None:
    done = train(dry_run=True)
    assert done.returncode == 0 and "predicted memory" in done.stdout and "fp32 masters" not in done.stderr
    assert not (tmp_path / "run").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "--model is required"),
    "no folder": ({"model": "/nowhere"}, "there is no /nowhere/config.json"),
    "no tokens": ({"tokens": "/nowhere"}, "/nowhere"),
    "an unknown option": ({"learning_rates": 1}, "--learning-rates"),
    "a rows' kind": ({"rows": "rows"}, "--rows: rows not in {packed,stream,padded}"),
    "long rows": ({"length": 33}, "--length is 33, expected at most 32"),
    "no held-out tokens": ({"evaluate_every": 2}, "--evaluate-every is given, expected --evaluation-tokens"),
    "all held out": ({"evaluation_tokens": 100_000}, "nothing is left to train on"),
    "a target": ({"lora": True, "lora_targets": "q_proj,lm_head"}, "the target 'lm_head' is no linear layer"),
    "no adapter": ({"adapter": "/nowhere"}, "there is no /nowhere/adapter_config.json"),
    "nothing to merge": ({"merge": True}, "--merge is given, expected --lora or --adapter beside it"),
    "a dtype": ({"dtype": "float8"}, "--dtype: float8 not in {float32,bfloat16,float16}"),
    "devices": ({"devices": "virtual:0"}, "virtual:0"),
    "host memory": ({"host_memory": "1KB"}, "expected at most 1000 B, the --host-memory"),
    "host memory without a unit": ({"host_memory": "12", "model": "/nowhere"}, "--host-memory"),
    "no host memory": ({"host_memory": "0"}, "--host-memory is 0"),
    "a device's memory without a unit": ({"device_memory": "20"}, "--device-memory is 20, expected bytes above 0"),
    "little memory of a device": ({"device_memory": "1KB"}, "the --device-memory"),
    "a dropout that is no number": (
        {"lora": True, "lora_dropout": "-nan"},
        "--lora-dropout is nan, expected at least 0",
    ),
    "device memory": ({"devices": "virtual:1,memory=4KiB"}, "virtual:0 has 4.00 KiB"),
}


def test_an_option_is_given_once(command: Callable[..., list[str]]) -> None:
    words = [*command(steps=1), "--clip", "1", "--clip", "2"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--clip is given 2 times, expected once" in done.stderr, done.stderr


@pytest.mark.long
def test_the_hosts_memory_is_that_of_the_optimizer(train: Train, tmp_path: Path) -> None:
    def predicted(**options: Any) -> int:
        done = train(dry_run=True, host_memory="1KB", **options)
        assert done.returncode == 2, done.stdout + done.stderr
        size, unit = done.stderr.split("predicted to take ")[1].split()[:2]
        return int(float(size) * {"B": 1, "KiB": 1024, "MiB": 1024**2}[unit])

    adam, eight_bit, sgd = predicted(), predicted(moments="8bit"), predicted(optimizer="sgd")
    assert sgd < adam and eight_bit != adam
    assert predicted(optimizer="sgd", momentum=0.9) > sgd
    done = train(dry_run=True, optimizer="sgd", host_memory=f"{(sgd + adam) // 2}B")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", mostly_long(REFUSED, *list(REFUSED)[::8]))
def test_refused(name: str, train: Train, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    done = train(**options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr + done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_adapters_are_not_merged_into_encoded_weights(train: Train, model: Path, tmp_path: Path) -> None:
    encoded = shutil.copytree(model, tmp_path / "encoded")
    config = json.loads((encoded / "config.json").read_text())
    (encoded / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    done = train(model=encoded, lora=True, merge=True)
    assert done.returncode == 2 and "--merge is given and the weights of" in done.stderr, done.stderr


@pytest.mark.parametrize("size", mostly_long(["1", "2"], "2"))
def test_one_of_several_processes_is_refused(size: str, command: Callable[..., list[str]], tmp_path: Path) -> None:
    done = subprocess.run(
        command(steps=1), env=ENVIRONMENT | {"WORLD_SIZE": size}, capture_output=True, text=True, check=False
    )
    if size == "1":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2 and done.stdout == ""
    assert "WORLD_SIZE is 2" in done.stderr and "start one process" in done.stderr
    assert "`roundpipe train` for several machines" in done.stderr
    assert not (tmp_path / "run").exists()


def test_other_vocabularies_and_damaged_tokens(train: Train, tokens: Path, tmp_path: Path) -> None:
    larger = write_tokens(tmp_path / "larger.tokens", documents(), VOCABULARY + 1)
    done = train(tokens=larger)
    assert done.returncode == 2 and "a vocabulary of 51 tokens, expected at most the model's 50" in done.stderr
    bytes_of = bytearray(tokens.read_bytes())
    bytes_of[70] ^= 1
    (tmp_path / "damaged.tokens").write_bytes(bytes_of)
    done = train(tokens=tmp_path / "damaged.tokens", verify_tokens=True)
    assert done.returncode == 1 and "its tokens do not have their checksum" in done.stderr


def test_the_program_knows_no_python() -> None:
    said = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in said.splitlines()]
    assert any(name.startswith("libroundpipe.so.") for name in names) and "not found" not in said
    assert "libtorch.so" in names  # which brings the backends of accelerators
    assert not any("python" in name for name in names), names
