"""`roundpipe export`: merged folders against peft's own merge, memory, and everything that is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from roundpipe.cli import app, main
from roundpipe.export.merge import merge_adapter
from roundpipe.files import new_folder
from sweeps import sweep

COMMON: dict[str, Any] = {"vocab_size": 96, "max_position_embeddings": 64}


def llama(**changes: Any) -> transformers.PretrainedConfig:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaConfig(**COMMON | sizes | changes)


def gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)


def gemma2() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip


def qwen3_moe() -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **COMMON, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=12, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip


def save_base(
    folder: Path, config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float32, shard: str = "16KB"
) -> Path:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():  # biases and norms start as constants
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """An adapter whose every tensor has been trained, as far as anyone can tell."""
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                offset = 0.1 * torch.rand_like(parameter) if "magnitude" in name else 0.1 * torch.randn_like(parameter)
                parameter += offset
    wrapped.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def peft_merges(base: Path, adapter: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def assert_same_model(out: Path, expected: transformers.PreTrainedModel) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.tie_word_embeddings == expected.config.tie_word_embeddings
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (llama, {"target_modules": [*ATTENTION, "up_proj"], "r": 4, "lora_alpha": 7}),
    "rslora": (llama, {"target_modules": ATTENTION, "r": 3, "use_rslora": True}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj"], "r": 4, "use_dora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ATTENTION,
            "r": 4,
            "rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 5},
            "alpha_pattern": {"k_proj": 9},
        },
    ),
    "all-linear": (llama, {"target_modules": "all-linear"}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 4}),
    "embedding dora": (llama, {"target_modules": ["embed_tokens"], "r": 4, "use_dora": True}),
    "modules_to_save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "bias all": (lambda: llama(attention_bias=True, mlp_bias=True), {"target_modules": ["q_proj"], "bias": "all"}),
    "bias lora_only": (lambda: llama(attention_bias=True), {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "lora_bias": (lambda: llama(attention_bias=True), {"target_modules": ["q_proj"], "lora_bias": True}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 90]}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "conv1d bias": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "tied": (gemma2, {"target_modules": ATTENTION}),
    "tied embedding": (gemma2, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding and head": (gemma2, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied head dora": (gemma2, {"target_modules": ["lm_head"], "use_dora": True}),
    "tied tokens": (gemma2, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 7]}}),
    "untied head": (gemma2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "untied embedding": (gemma2, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "both untied": (gemma2, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "kept tied": (
        gemma2,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "adapters tied": (gemma2, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "moe attention": (qwen3_moe, {"target_modules": ATTENTION}),
    "moe experts": (
        qwen3_moe,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}


@sweep("case, dtype", CASES, [torch.float32, torch.bfloat16], ids=str, together=1)
@pytest.mark.filterwarnings("ignore")
def test_the_merged_folder_is_what_peft_merges(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, settings = CASES[case]
    base = save_base(tmp_path / "base", config(), dtype)
    adapter = save_adapter(tmp_path / "adapter", base, **settings)
    before = weights(base)
    out = merge_adapter(base, adapter, tmp_path / "out")
    assert_same_model(out, peft_merges(base, adapter))
    assert any(not torch.equal(value, before[name]) for name, value in weights(out).items() if name in before)
    assert not list(tmp_path.glob(".*"))


def test_names_and_files_stay(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    (base / "pytorch_model.bin").write_bytes(b"old")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    steps: list[tuple[int, int]] = []
    out = merge_adapter(
        base, adapter, tmp_path / "new" / "out", progress=lambda done, total: steps.append((done, total))
    )
    kept = {path.name for path in base.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in out.iterdir()} == kept and len(list(out.glob("*.safetensors"))) > 3
    index = "model.safetensors.index.json"
    assert json.loads((out / index).read_text()) == json.loads((base / index).read_text())
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.5}'
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as new, safe_open(base / file.name, "pt") as old:
            assert set(new.keys()) == set(old.keys()) and new.metadata()["format"] == "pt"
    changed = {name for name, value in weights(out).items() if not torch.equal(value, weights(base)[name])}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] == sum(v.nbytes for v in weights(base).values())


def test_a_single_file_stays_a_single_file(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama(), shard="1GB")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    out = merge_adapter(str(base), str(adapter), str(tmp_path / "out"))
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    assert_same_model(out, peft_merges(base, adapter))


def test_a_base_whose_files_leave_the_prefix_out(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", gpt2(), shard="1GB")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["c_attn"], fan_in_fan_out=True)
    expected = peft_merges(base, adapter)
    short = {name.removeprefix("transformer."): value for name, value in weights(base).items()}
    save_file(short, base / "model.safetensors", {"format": "pt"})
    out = merge_adapter(base, adapter, tmp_path / "out")
    assert weights(out).keys() == short.keys()
    assert_same_model(out, expected)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_single_experts(tmp_path: Path) -> None:
    """As peft made them when each expert was a module: the base's files still hold them one by one."""
    base = save_base(tmp_path / "base", qwen3_moe())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], r=4, lora_alpha=8)
    edit_json(adapter / "adapter_config.json", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(2) for expert in range(12)]
    for expert in experts:
        for name, columns, rows in (("gate_proj", 32, 16), ("up_proj", 32, 16), ("down_proj", 16, 32)):
            tensors[f"base_model.model.{expert}.{name}.lora_A.weight"] = torch.randn(4, columns)
            tensors[f"base_model.model.{expert}.{name}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(tensors, path, {"format": "pt"})
    out = merge_adapter(base, adapter, tmp_path / "out")
    assert_same_model(out, peft_merges(base, adapter))
    merged, before = weights(out), weights(base)
    for expert in experts:
        a, b = (tensors[f"base_model.model.{expert}.up_proj.lora_{part}.weight"] for part in "AB")
        expected = before[f"{expert}.up_proj.weight"] + 2 * b @ a
        torch.testing.assert_close(merged[f"{expert}.up_proj.weight"], expected)


def test_a_base_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "cache" / "models--maker--tiny"
    base = save_base(model / "snapshots" / "0a1b", llama())
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0a1b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="maker/tiny")
    result = CliRunner().invoke(app, ["export", "--merge", str(adapter), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert_same_model(tmp_path / "out", peft_merges(base, adapter))


def test_the_adapters_tokenizer_wins(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    (base / "added_tokens.json").write_text("{}")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    (adapter / "tokenizer_config.json").write_text('{"trained": true}')
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    out = merge_adapter(base, adapter, tmp_path / "out")
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"trained": True}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (out / "added_tokens.json").exists()


def test_the_callers_random_numbers_stay(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    merge_adapter(base, adapter, tmp_path / "out")
    assert torch.equal(torch.rand(3), expected)


MERGE_AND_WATCH = """
import sys
from pathlib import Path
from roundpipe.export.merge import merge_adapter

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
# A merge of one layer first, so that libraries and arenas are there already.
merge_adapter(folder / "small", folder / "small-adapter", folder / "small-out")
before = peak = resident()
def watch(done, total):
    global peak
    peak = max(peak, resident())
merge_adapter(folder / "base", folder / "adapter", folder / "out", progress=watch)
print(peak - before)
"""


@pytest.mark.long
def test_memory_is_that_of_a_layer(tmp_path: Path) -> None:
    model_bytes = 0
    for prefix, layers in (("small-", 1), ("", 4)):
        sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 8}
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=2000, **sizes))
        model_bytes = sum(p.nbytes for p in model.parameters())
        model.save_pretrained(tmp_path / (prefix.removesuffix("-") or "base"), max_shard_size="40MB")
        lora = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=8)
        get_peft_model(model, lora).save_pretrained(tmp_path / f"{prefix}adapter")
    command = [sys.executable, "-W", "ignore", "-c", MERGE_AND_WATCH, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    growth = int(result.stdout.split()[-1])
    assert model_bytes > 150e6 and growth < 60e6
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


# --- the command ---


def test_the_command(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    result = CliRunner().invoke(app, ["export", "--merge", str(adapter), str(tmp_path / "out")])
    assert result.exit_code == 0 and result.stdout == "" and "merged into" in result.stderr
    assert_same_model(tmp_path / "out", peft_merges(base, adapter))
    result = CliRunner().invoke(app, ["export", "--merge", str(adapter), "--base", str(base), str(tmp_path / "out2")])
    assert result.exit_code == 0 and weights(tmp_path / "out2").keys() == weights(base).keys()


def test_the_command_refuses_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["roundpipe", "export", "--merge", str(tmp_path / "none"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "holds no adapter_config.json" in error and "Traceback" not in error


def test_help_needs_no_torch() -> None:
    program = "import sys, roundpipe.export.command; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_interrupted_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("roundpipe.export.merge.bytes_of_tensor", stop)  # in the middle of a shard
    result = CliRunner().invoke(app, ["export", "--merge", str(adapter), str(tmp_path / "out")])
    assert result.exit_code == 130 and "interrupted, nothing was written" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_nothing_half_written_is_left(interrupt: type[BaseException], tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    seen = []

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            seen.extend(path.name for path in tmp_path.glob(".out*"))
            raise interrupt

    with pytest.raises(interrupt):
        merge_adapter(base, adapter, tmp_path / "out", progress=stop)
    assert len(seen) == 1 and {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


# --- bad input ---


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def first_shard(base: Path) -> Path:
    return sorted(base.glob("*.safetensors"))[0]


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def other_sizes(base: Path, adapter: Path) -> None:
    shutil.rmtree(base)
    save_base(base, llama(hidden_size=64))


def fewer_layers(base: Path, adapter: Path) -> None:
    shutil.rmtree(base)
    save_base(base, llama(num_hidden_layers=1))


def other_family(base: Path, adapter: Path) -> None:
    shutil.rmtree(base)
    save_base(base, gpt2())


def an_index_that_lies(base: Path, adapter: Path) -> None:
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = index["weight_map"]["model.embed_tokens.weight"], index["weight_map"]["model.norm.weight"]
    assert first != last
    index["weight_map"]["model.norm.weight"] = first
    path.write_text(json.dumps(index))


def a_tensor_less(base: Path, adapter: Path) -> None:
    path = base / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    for file in base.glob("*.safetensors"):
        rewrite(file, lambda tensors: tensors.pop("model.norm.weight", None))


def drop_lora(base: Path, adapter: Path) -> None:
    rewrite(adapter / "adapter_model.safetensors", lambda tensors: tensors.pop(sorted(tensors)[0]))


def nan_lora(base: Path, adapter: Path) -> None:
    rewrite(adapter / "adapter_model.safetensors", lambda tensors: next(iter(tensors.values())).fill_(float("nan")))


def as_pickle(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()


def quantised(base: Path, adapter: Path) -> None:
    edit_json(base / "config.json", quantization_config={"quant_method": "gptq"})


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
Break = Callable[[Path, Path], object]
REFUSED: dict[str, tuple[Break, str]] = {
    "no base": (lambda b, a: shutil.rmtree(b), "neither a folder nor a model in the local Hugging Face cache"),
    "no weights": (lambda b, a: [f.unlink() for f in b.glob("*.safetensors*")], "holds no weights, expected model"),
    "shard missing": (lambda b, a: first_shard(b).unlink(), "which is not in .*fetch the missing shard"),
    "index wrong": (an_index_that_lies, "says that model.norm.weight lies in .*which does not hold it"),
    "index damaged": (
        lambda b, a: (b / "model.safetensors.index.json").write_text("{"),
        "index.json is damaged: the index is no",
    ),
    "tensor missing": (a_tensor_less, "no tensor in .* becomes model.norm.weight"),
    "pointer": (lambda b, a: first_shard(b).write_text(POINTER), "is a pointer of Git LFS.*git lfs pull"),
    "cut off": (lambda b, a: first_shard(b).write_bytes(first_shard(b).read_bytes()[:-7]), "is damaged: it has"),
    "no header": (lambda b, a: first_shard(b).write_bytes(b"hello"), "is damaged"),
    "header no JSON": (lambda b, a: first_shard(b).write_bytes(b"\x04" + b"\0" * 7 + b"abcd"), "is damaged"),
    "config missing": (lambda b, a: (b / "config.json").unlink(), "cannot build the model"),
    "quantised": (quantised, "has the quant_method 'gptq', expected bitsandbytes, mxfp4, compressed-tensors or fp8"),
    "other sizes": (other_sizes, r"of shape .*, expected .*give the base it was trained on"),
    "fewer layers": (fewer_layers, r"has no place for.*give another --base"),
    "other family": (other_family, "peft cannot place the adapter"),
    "no adapter": (lambda b, a: shutil.rmtree(a), "holds no adapter_config.json"),
    "adapter config damaged": (lambda b, a: (a / "adapter_config.json").write_text("{"), "is not JSON"),
    "adapter config a list": (lambda b, a: (a / "adapter_config.json").write_text("[]"), "is not a JSON object"),
    "no adapter weights": (lambda b, a: (a / "adapter_model.safetensors").unlink(), "holds no weights, expected adap"),
    "a pickle": (
        as_pickle,
        "holds only adapter_model.bin, a pickle, .* expected adapter_model.safetensors.*peft writes one",
    ),
    "adapter damaged": (lambda b, a: (a / "adapter_model.safetensors").write_bytes(b"abc"), "cannot be read"),
    "adapter pointer": (lambda b, a: (a / "adapter_model.safetensors").write_text(POINTER), "is a pointer of Git LFS"),
    "tensor of the adapter missing": (drop_lora, "holds no tensor for"),
    "not finite": (nan_lora, "holds NaN or infinity"),
    "other type": (lambda b, a: edit_json(a / "adapter_config.json", peft_type="IA3"), "peft_type 'IA3', expected 'LO"),
    "unknown type": (lambda b, a: edit_json(a / "adapter_config.json", peft_type="NEW"), "peft_type 'NEW'"),
    "classifier": (lambda b, a: edit_json(a / "adapter_config.json", task_type="SEQ_CLS"), "task_type 'SEQ_CLS'"),
    "pissa": (lambda b, a: edit_json(a / "adapter_config.json", init_lora_weights="pissa"), "changes the base's"),
    "layers repeated": (lambda b, a: edit_json(a / "adapter_config.json", layer_replication=[[0, 1]]), "repeats layer"),
    "aLoRA": (lambda b, a: edit_json(a / "adapter_config.json", alora_invocation_tokens=[1]), "from certain tokens"),
    "module to save missing": (lambda b, a: edit_json(a / "adapter_config.json", modules_to_save=["norm"]), "no tenso"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    break_it, message = REFUSED[case]
    break_it(base, adapter)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(
        ValueError, match=re.compile(r"\[(export|checkpoint|quantised folder)\].*" + message, re.DOTALL)
    ):
        merge_adapter(base, adapter, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == before


def test_peft_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"merging needs peft.*pip install 'roundpipe-engine\[lora\]'"):
        merge_adapter(tmp_path, tmp_path, tmp_path / "out")


def test_lora_bias_without_a_bias_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", llama())
    with pytest.warns(UserWarning, match="has no bias"):
        adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ValueError, match=r"cannot be merged at model\.layers\.0.*no bias"):
        merge_adapter(base, adapter, tmp_path / "out")


def test_the_output_must_be_free_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out, message in [("full", "is not empty"), ("full/file", "is a file")]:
        with pytest.raises(ValueError, match=message):
            merge_adapter(tmp_path, tmp_path, tmp_path / out)
    with (
        pytest.raises(ValueError, match=r"iB left, expected 909494\.70 TiB"),
        new_folder(tmp_path / "out", "export", 10**18),
    ):
        pass
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty", "export", 1) as folder:
        (folder / "file").touch()
    assert (tmp_path / "empty" / "file").exists()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "not allowed")))
    with pytest.raises(ValueError, match=r"cannot create .*: not allowed"), new_folder(tmp_path / "out", "export", 1):
        pass
