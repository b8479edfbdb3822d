"""`roundpipe quantise`, and `from_pretrained` of folders whose weights are encoded, ours and those of others."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import causal_models
import roundpipe
from encoded_folders import describe, eight_bits
from roundpipe import _core
from roundpipe.cli import app
from roundpipe.command_options import EncodedFormat
from roundpipe.export.merge import merge_adapter
from roundpipe.export.quantised_folder import quantise_folder
from roundpipe.plan.options import PlanOptions
from roundpipe.plan.within_memory import plan_within_memory
from roundpipe.quantise import encoded_bytes
from roundpipe.quantise.modules import decoded_parameters, encodings_of
from sweeps import sweep

IDS = torch.randint(3, causal_models.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
# Rows of whole blocks of every format.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def build(name: str, **sizes: int) -> PreTrainedModel:
    small = causal_models.build("llama" if name == "tied" else name)
    config = type(small.config)(**small.config.to_dict() | WIDE | MODELS[name] | sizes)
    torch.manual_seed(0)
    model: PreTrainedModel = type(small)(config)
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("models") / name
            build(name).save_pretrained(made[name])
        return made[name]

    return get


def adapters() -> peft.LoraConfig:
    return peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])


def load(folder: Path, **options: Any) -> roundpipe.RoundPipe:
    return roundpipe.from_pretrained(folder, peft_config=adapters(), **options).train()


def numbers(model: Any) -> dict[str, torch.Tensor]:
    """By their names without adapters."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): values
        for name, values in decoded_parameters(model)
        if "lora_" not in name
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, values in found.items() if not torch.equal(values, expected[name])]


FORMATS = ["nf4", "nf4-double", "mxfp4", "int8"]


@sweep("name, format, frozen_weights", MODELS, FORMATS, ["memory", "mmap"], together=2)
def test_a_written_folder_has_the_numbers_of_encoding_while_loading(
    name: str, format: str, frozen_weights: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    made = quantise_folder(folder(name), tmp_path / "out", format)
    found = load(made.folder, frozen_weights=frozen_weights)
    expected = load(folder(name), quantise=format)
    differ = same(numbers(found), numbers(expected))
    if (format == "nf4-double" and name == "qwen3_moe") or (
        format == "mxfp4" and name == "gpt_oss"
    ):  # scales of each expert here, of the stack there
        assert all(".experts." in each for each in differ)
    else:
        assert not differ
    of_files = sum(tensor.nbytes for tensor in load_file(made.folder / "model.safetensors").values())
    assert made.encoded + sum(size for _, size in made.kept.values()) == of_files
    assert made.plain == encoded_bytes(expected).decoded
    assert made.kept["model.norm.weight"][0] == "no matrix of a linear layer or of experts"
    encoded = encodings_of(found)
    assert any("q_proj" in each for each in encoded)
    assert any(".experts." in each for each in encoded) == (name in ("qwen3_moe", "gpt_oss"))
    loss = found.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
    assert torch.isfinite(loss)


def test_openai_s_mxfp4_is_what_transformers_makes_of_it(folder: Callable[[str], Path], tmp_path: Path) -> None:
    quantise_folder(folder("gpt_oss"), tmp_path / "out", "mxfp4", keep=["self_attn"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4" and any("q_proj" in name for name in config["modules_to_not_convert"])
    dequantised = AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # which needs a card for more
    assert not same(numbers(load(tmp_path / "out")), dict(dequantised.named_parameters()))


def packed(folder: Path, out: Path, dtype: torch.dtype, bits: int, group: int | None) -> dict[str, torch.Tensor]:
    """A folder of compressed-tensors' "pack-quantized" weights, by its documentation, and its numbers."""
    out.mkdir()
    tensors, expected = load_file(folder / "model.safetensors"), {}
    half, in_word = 2 ** (bits - 1), 32 // bits
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        blocks = weight.view(len(weight), -1, group or weight.shape[1])
        scale = (blocks.abs().amax(2, keepdim=True) / (half - 0.5)).to(dtype)
        codes = (blocks / scale.float()).round().clamp(-half, half - 1).int()
        digits = (codes + half).view(len(weight), -1, in_word).long()
        words = torch.stack([digits[..., i] << (bits * i) for i in range(in_word)]).sum(0)
        tensors[f"{name}_packed"] = words.to(torch.int32)
        tensors[f"{name}_scale"], tensors[f"{name}_shape"] = scale.squeeze(2), torch.tensor(weight.shape)
        expected[name] = (codes.to(dtype) * scale).to(torch.bfloat16).view_as(weight)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": group}
    weights |= {"strategy": "group" if group else "channel", "actorder": None}
    described = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    describe(folder, out, {**PACKED, "config_groups": {"group_0": described}})
    return tensors | expected


PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "version": "0.20.1"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, None), (4, 32), (4, 64)])
def test_packed_weights(
    bits: int, group: int | None, dtype: torch.dtype, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = packed(folder("llama"), tmp_path / "out", dtype, bits, group)
    names = {name for name, _ in build("llama").named_parameters()}
    model = load(tmp_path / "out")
    found = numbers(model)
    assert found.keys() == names
    assert not same(found, {name: expected[name] for name in names})
    assert torch.isfinite(model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS}))


WEIGHT = "model.layers.1.mlp.up_proj.weight"
LARGE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 128}
BLOCKS = {"square": (128, 128), "flat": (32, 128), "tensor": None}


@sweep("name, block, dtype", ["llama", "qwen3_moe"], BLOCKS, [torch.float32, torch.bfloat16], together=2)
def test_fp8_is_what_transformers_makes_of_it(name: str, block: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build(name, **LARGE).save_pretrained(tmp_path / "plain")
    eight_bits(tmp_path / "plain", tmp_path / "out", BLOCKS[block], dtype)
    with warnings.catch_warnings():  # that there is no card, so that it dequantises
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    model = load(tmp_path / "out")
    assert not same(numbers(model), dict(theirs.named_parameters()))
    assert any(".experts." in each for each in encodings_of(model)) == (name == "qwen3_moe")
    assert torch.isfinite(model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS}))


def test_rows_that_end_within_a_block(folder: Callable[[str], Path], tmp_path: Path) -> None:
    build("llama", **LARGE | {"intermediate_size": 384}).save_pretrained(tmp_path / "plain")
    codes = eight_bits(tmp_path / "plain", tmp_path / "out", (256, 128), torch.float32)
    found, stored = numbers(load(tmp_path / "out")), load_file(tmp_path / "out" / "model.safetensors")
    for name, each in codes.items():
        scales = stored[f"{name}_scale_inv"].repeat_interleave(256, 0)[: len(each)].repeat_interleave(128, 1)
        assert torch.equal(found[name], (each.float() * scales).to(torch.bfloat16)), name


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_float_quantized_weights(strategy: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    codes = eight_bits(folder("llama"), tmp_path / "out", None, torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, each in codes.items():
        scale = tensors.pop(f"{name}_scale_inv").view(1)
        if strategy == "channel":
            scale = (scale.view(1, 1) * torch.arange(1, len(each) + 1).view(-1, 1)).to(torch.bfloat16)
        tensors[f"{name}_scale"] = scale.contiguous()
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    described = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    describe(
        folder("llama"), tmp_path / "out", PACKED | {"format": "float-quantized", "config_groups": {"a": described}}
    )
    found = numbers(load(tmp_path / "out"))
    for name, each in codes.items():
        assert torch.equal(found[name], each.to(torch.bfloat16) * tensors[f"{name}_scale"]), name


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


def test_bytes_of_bitsandbytes_by_its_documentation(folder: Callable[[str], Path], tmp_path: Path) -> None:
    quantise_folder(folder("llama"), tmp_path / "out", "nf4-double")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    fields = [state[field] for field in ("quant_type", "blocksize", "dtype", "shape", "nested_blocksize")]
    assert fields == ["nf4", 64, "bfloat16", [64, 128], 256]
    assert torch.equal(tensors[f"{name}.quant_map"], torch.tensor(NF4))
    codes = tensors[name].view(-1)
    digits = torch.stack([codes >> 4, codes & 15], 1).view(-1).long()
    scales = tensors[f"{name}.nested_quant_map"][tensors[f"{name}.absmax"].long()]
    scales = scales * tensors[f"{name}.nested_absmax"].repeat_interleave(256)[: len(scales)] + state["nested_offset"]
    values = torch.tensor(NF4)[digits].view(-1, 64) * scales[:, None]
    assert torch.equal(numbers(load(tmp_path / "out"))[name], values.view(64, 128).to(torch.bfloat16))


def test_a_config_without_a_dtype(folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = shutil.copytree(folder("llama"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]
    (base / "config.json").write_text(json.dumps(config))
    out = quantise_folder(base, tmp_path / "out", "nf4").folder
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert not same(numbers(load(out)), numbers(load(base, quantise="nf4")))


def test_plans_count_the_bytes_of_the_files(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = quantise_folder(folder("qwen3_moe"), tmp_path / "out", "nf4", keep=["q_proj"]).folder

    def planned(model: Path, **options: Any) -> Any:
        return plan_within_memory(
            PlanOptions(model=str(model), train="lora", tokens=32, search_seconds=0.001, **options)
        )

    plain = planned(folder("qwen3_moe"))
    encoded = planned(folder("qwen3_moe"), quantise="nf4", quantise_keep=["q_proj"])
    assert planned(out).host == encoded.host
    moved = [[layer.weight_bytes for layer in each.fit.request.costs.layers] for each in (planned(out), encoded)]
    assert moved[0] == moved[1]
    assert planned(out).shapes.parameters == encoded.shapes.parameters == plain.shapes.parameters
    ours = encoded_bytes(load(out))
    assert plain.host.weights - encoded.host.weights == ours.decoded - ours.encoded
    for model, options, message in (
        (out, {"quantise": "int8"}, "no other format"),
        (out / "config.json", {}, "expected the folder of its files"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(model, **options)
    with pytest.raises(ValueError, match="only adapters can be trained, expected --train lora"):
        plan_within_memory(PlanOptions(model=str(out), tokens=32))
    with pytest.raises(ValueError, match=r"--quantise is nf5, expected one of nf4, nf4-double, mxfp4, int8"):
        planned(folder("llama"), quantise="nf5")
    with pytest.raises(ValueError, match="--quantise has no effect here, expected it only with --train lora"):
        PlanOptions(model=str(out), quantise="nf4")


def test_the_formats_of_commands_are_those_of_the_library() -> None:
    assert list(get_args(EncodedFormat)) == _core.format_names()


def test_adapters_go_on_on_a_folder(folder: Callable[[str], Path], tmp_path: Path) -> None:
    roundpipe.devices("virtual:2,debug")
    base = quantise_folder(folder("llama"), tmp_path / "base", "nf4").folder
    torch.manual_seed(0)  # of the adapters
    model = load(base)
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(float(model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})))
        model.step(optimizer, is_async=False)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "adapter")
    again = roundpipe.from_pretrained(tmp_path / "adapter")
    trained = dict(model.named_parameters())
    assert all(torch.equal(parameter, trained[name]) for name, parameter in again.named_parameters())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_an_adapter_merges_into_the_decoded_base(name: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    format = "mxfp4" if name == "gpt_oss" else "nf4"
    base = quantise_folder(folder(name), tmp_path / "base", format).folder
    model: Any = load(base)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if "lora_B" in each:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    decoded = build(name)
    decoded.load_state_dict(numbers(model))
    expected = peft.PeftModel.from_pretrained(decoded, tmp_path / "adapter").merge_and_unload()
    merged = merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    found = AutoModelForCausalLM.from_pretrained(merged)
    assert not same(dict(found.named_parameters()), dict(expected.named_parameters()))
    assert getattr(found.config, "quantization_config", None) is None
    again = quantise_folder(merged, tmp_path / "again", format)
    before, after = dict(found.named_parameters()), numbers(load(again.folder))
    encoded = [each for each in after if each.split(".")[-1] not in ("bias",) and each not in again.kept]
    wrong = sum(float((after[each].float() - before[each].float()).square().sum()) for each in encoded)
    assert again.error == pytest.approx(
        (wrong / sum(float(before[each].float().square().sum()) for each in encoded)) ** 0.5
    )
    assert 0.01 < again.error < 0.2


def damage(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = change(tensors.pop(name))
        save_file(tensors | ({} if changed is None else {name: changed}), folder / "model.safetensors")

    return apply


def plain_expert(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(EXPERT)}
    save_file(others | {EXPERT: torch.zeros(64, 64, dtype=torch.bfloat16)}, folder / "model.safetensors")


def configured(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= fields
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def groups(**fields: Any) -> Callable[[Path], None]:
    return configured(config_groups={"a": fields})


def state(**fields: Any) -> Callable[[Path], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        text = json.dumps(json.loads(bytes(tensor.tolist())) | fields)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return damage(f"{WEIGHT}.quant_state.bitsandbytes__nf4", change)


ROWS = {"type": "int", "symmetric": True, "dynamic": False}
SCALES = "model.layers.0.mlp.experts.down_proj_scales"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "codes": ("llama", "nf4", damage(WEIGHT, lambda t: t[:-1]), f"{WEIGHT} has 4095 bytes of codes, expected 4096"),
    "no scales": ("llama", "nf4", damage(f"{WEIGHT}.absmax", lambda t: None), f"lacks {WEIGHT}.absmax"),
    "scales": ("llama", "nf4", damage(f"{WEIGHT}.absmax", lambda t: t[1:]), f"{WEIGHT}.absmax has 127 numbers"),
    "scales of a dtype": ("llama", "nf4", damage(f"{WEIGHT}.absmax", torch.Tensor.half), "has the dtype F16, expected"),
    "a scale": ("llama", "nf4", damage(f"{WEIGHT}.absmax", lambda t: t / 0), f"{WEIGHT}.absmax has inf or NaN"),
    "the map": ("llama", "nf4", damage(f"{WEIGHT}.quant_map", lambda t: t + 0.1), "other numbers than the 16 of NF4"),
    "a block": ("llama", "nf4", state(blocksize=128), "__nf4 has blocksize 128, expected 64"),
    "a shape": ("llama", "nf4", state(shape=[2, 4096]), "have another shape there|would have the shape"),
    "a huge shape": ("llama", "nf4", state(shape=[1 << 40, 1 << 40]), "is too large"),
    "no JSON": ("llama", "nf4", damage(f"{WEIGHT}.quant_state.bitsandbytes__nf4", lambda t: t[:9]), "is not JSON"),
    "another dtype": ("llama", "nf4", state(dtype="float16"), f"{WEIGHT} decodes to Half and is to become BFloat16"),
    "an offset": ("llama", "nf4-double", state(nested_offset="0"), "has no number as nested_offset"),
    "a nested block": ("llama", "nf4-double", state(nested_blocksize=64), "has nested_blocksize 64, expected 256"),
    "8 bits": ("llama", "nf4", configured(load_in_8bit=True), "says load_in_8bit, expected weights of 4 bits"),
    "a method": ("llama", "nf4", configured(quant_method="gptq"), "the quant_method 'gptq', expected bitsandbytes"),
    "no method": ("llama", "nf4", configured(quant_method=None), "'quant_method' is of the type null"),
    "plain weights": ("llama", "nf4", configured(quant_method="mxfp4"), "no tensor is stored so|no place for"),
    "an expert": ("qwen3_moe", "nf4", plain_expert, f"is encoded and {EXPERT} is not"),
    "blocks": ("gpt_oss", "mxfp4", damage(SCALES, lambda t: t[:, :, :-1].contiguous()),
        r"down_proj_scales has the shape \[4, 64, 3\], expected \[4, 64, 4\]"),
    "activations": ("llama", "int8", groups(input_activations={}), "config_groups.a has input_activations"),
    "4 bits": ("llama", "int8", groups(weights={**ROWS, "num_bits": 4}), "has weights of num_bits 4, expected 8"),
    "a cache": ("llama", "int8", configured(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is set"),
    "rows": ("llama", "int8", damage(f"{WEIGHT}_scale", lambda t: t[1:]), f"{WEIGHT}_scale has 127 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_unknown_folders_are_refused_by_name(
    damage: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    name, format, apply, message = DAMAGES[damage]
    quantise_folder(folder(name), tmp_path / "out", format)
    apply(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{WEIGHT}_scale_inv"), f"lacks {WEIGHT}_scale_inv"),
        (lambda t: t[WEIGHT].view(torch.uint8)[3].fill_(255), f"{WEIGHT} has NaN"),
        (lambda t: t[f"{WEIGHT}_scale_inv"].fill_(float("inf")), f"{WEIGHT}_scale_inv has inf or NaN"),
        (lambda t: t.update({f"{WEIGHT}_scale_inv": torch.ones(3, 3)}), f"{WEIGHT}_scale_inv has 9 numbers"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].to(torch.float8_e5m2)}), f"{WEIGHT} has numbers of F8_E5M2"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.int8)}), f"{WEIGHT} has numbers of I8"),
        ({"scale_fmt": "ue8m0"}, r'quantization_config.scale_fmt is "ue8m0", expected "float"'),
        ({"weight_block_size": [128, 64]}, r"weight_block_size is \[128, 64\], expected rows and 128 columns"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], expected rows"),
        ({"modules_to_convert": ["lm_head"]}, "quantization_config.modules_to_convert is set"),
    ],
)
def test_damaged_fp8_is_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    build("llama", **LARGE).save_pretrained(tmp_path / "plain")
    out = tmp_path / "out"
    eight_bits(tmp_path / "plain", out, (128, 128), torch.float32)
    tensors = load_file(out / "model.safetensors")
    if callable(change):
        change(tensors)
        save_file(tensors, out / "model.safetensors")
    else:
        configured(**change)(out)
    with pytest.raises(ValueError, match=message):
        load(out)


def test_what_a_folder_cannot_be_used_for(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = quantise_folder(folder("llama"), tmp_path / "out", "nf4").folder
    with pytest.raises(ValueError, match=r"holds quantised weights .*, which are frozen, and no adapter is given"):
        roundpipe.from_pretrained(out)
    with pytest.raises(ValueError, match=r"is quantised already .* and quantise is given"):
        load(out, quantise="nf4")
    with pytest.raises(ValueError, match="decodes to BFloat16 and is to become Float, which would round it twice"):
        load(out, dtype=torch.float32)
    with pytest.raises(ValueError, match="its weights are quantised"):
        quantise_folder(out, tmp_path / "twice", "nf4")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(("name", "weight"), [("tied", "model.embed_tokens.weight"), ("llama", "lm_head.weight")])
def test_an_encoded_embedding_or_head_is_refused(
    name: str, weight: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    out = quantise_folder(folder(name), tmp_path / "out", "int8").folder
    tensors = load_file(out / "model.safetensors")
    codes, scales = _core.encode("int8", tensors.pop(weight))
    save_file(tensors | {weight: codes, f"{weight}_scale": scales.view(-1, 1)}, out / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{weight} is encoded in the files, expected a plain weight"):
        load(out)


def test_the_command(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def run(model: Path, out: str, *options: str) -> Any:
        return CliRunner().invoke(app, ["quantise", str(model), str(tmp_path / out), *options])

    made = run(folder("qwen3_moe"), "out", "--format", "int8", "--keep", "q_proj")
    assert made.exit_code == 0, made.output
    first, *kept = made.stdout.splitlines()
    assert first.startswith("int8: ") and "% of " in first
    assert any("in keep: model.layers.0.self_attn.q_proj.weight" in line for line in kept)
    again = run(folder("qwen3_moe"), "out")
    assert isinstance(again.exception, ValueError) and "is not empty" in str(again.exception)
    nothing = run(folder("llama"), "other", "--keep", "layers")
    assert isinstance(nothing.exception, ValueError) and "nothing can be encoded" in str(nothing.exception)
    assert not (tmp_path / "other").exists()
    nowhere = run(tmp_path / "nowhere", "other")
    assert "[quantise] the model" in str(nowhere.exception) and "--base" not in str(nowhere.exception)
