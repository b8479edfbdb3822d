"""What encoded weights take on the host, on the link and on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import roundpipe
from roundpipe.quantise import encoded_bytes

IDS = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=[pytest.param("llama", marks=pytest.mark.long), "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
    fields = {**SIZES, **(experts if request.param == "qwen3_moe" else {})}
    path = tmp_path_factory.mktemp("models") / request.param
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **fields)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> Any:
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    return roundpipe.from_pretrained(folder, peft_config=config, **options).train()


def moved(model: Any) -> tuple[int, int]:
    """Bytes that a call uploads, and the most memory that it takes on a device."""
    pool = roundpipe.devices("virtual:1,resident=0,memory=1GiB")
    pool.reset_peak_memory()
    before = pool.transfer_report()[0]["uploaded_bytes"]
    model.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
    model.synchronize()
    return pool.transfer_report()[0]["uploaded_bytes"] - before, pool.memory_report()[0]["peak_bytes"]


def test_a_quarter_of_the_bytes_on_the_host_and_on_the_link(folder: Path) -> None:
    plain = load(folder)
    uploaded, peak = moved(plain)
    linear = encoded_bytes(load(folder, quantise="nf4")).decoded
    for format, share in (("nf4", 0.2813), ("nf4-double", 0.265), ("mxfp4", 0.2657), ("int8", 0.51)):
        model = load(folder, quantise=format)
        counted = encoded_bytes(model)
        assert counted.decoded == linear > 0.9 * sum(p.nbytes for p in plain.parameters()) - 2**20
        assert counted.encoded <= share * linear
        assert sum(p.nbytes for p in model.parameters()) == counted.encoded + sum(counted.others.values())
        assert not any(".mlp." in name and "gate.weight" not in name for name in counted.others)
        own_uploaded, own_peak = moved(model)
        passes = round((uploaded - own_uploaded) / (linear - counted.encoded), 2)
        assert passes == round(passes) >= 1  # how often the weights went up: nothing else differs
        assert own_peak < peak
    assert "iB encoded (5" in str(counted)
