"""NF4 decodes to the numbers of bitsandbytes, and is encoded as there; folders go both ways. `make test-all` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe import _core
from roundpipe.export.quantised_folder import quantise_folder
from roundpipe.quantise.modules import decoded_parameters
from sweeps import sweep

functional = pytest.importorskip("bitsandbytes.functional")
pytestmark = pytest.mark.long


@sweep("dtype, shape", [torch.float32, torch.bfloat16, torch.float16], [(64, 128), (3, 50), (5, 2)], ids=str)
def test_the_same_codes_scales_and_numbers(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    their_codes, state = functional.quantize_4bit(numbers.float(), blocksize=64, quant_type="nf4")
    codes, scales = _core.encode("nf4", numbers)
    assert torch.equal(scales, state.absmax)
    assert torch.equal(codes.flatten(), their_codes.flatten()[: codes.numel()])
    values = _core.Encoding("nf4", torch.float32).values([codes, scales])
    assert torch.equal(values, functional.dequantize_4bit(their_codes, state))


def test_scales_of_8_bits() -> None:
    numbers = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    their_codes, state = functional.quantize_4bit(numbers, blocksize=64, quant_type="nf4", compress_statistics=True)
    codes, scales, scale_scales, offset, scale_map = _core.encode("nf4-double", numbers)
    assert torch.equal(scale_map, state.state2.code)
    assert torch.allclose(scale_scales, state.state2.absmax)
    assert torch.allclose(offset, state.offset)
    parts = [codes, state.absmax.view(torch.uint8), state.state2.absmax, state.offset.view(1), state.state2.code]
    values = _core.Encoding("nf4-double", torch.float32).values(parts)
    assert torch.equal(values, functional.dequantize_4bit(their_codes, state))
    assert (scales.int() - state.absmax.int()).abs().max() <= 1


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def numbers_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder as bitsandbytes and transformers read it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    assert any(hasattr(parameter, "quant_state") for parameter in model.parameters())
    return {
        name: functional.dequantize_4bit(weight.data, weight.quant_state) if hasattr(weight, "quant_state") else weight
        for name, weight in model.named_parameters()
    }


@sweep("double, tied", [False, True], [False, True])
def test_folders_of_either_are_read_by_the_other(double: bool, tied: bool, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
    )
    AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=quantised, device_map="cpu"
    ).save_pretrained(tmp_path / "theirs")
    quantise_folder(tmp_path / "plain", tmp_path / "ours", "nf4-double" if double else "nf4")
    for folder in ("theirs", "ours"):
        adapters = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"])
        model: Any = roundpipe.from_pretrained(tmp_path / folder, peft_config=adapters)
        expected = numbers_of(tmp_path / folder)
        found = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): values
            for name, values in decoded_parameters(model)
            if "lora_" not in name
        }
        assert found.keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in found.items())
