"""Writes a sharded model of so many layers, 0.14 GB each, loads it, and prints what memory that took, as JSON.

Run by test_direct_loading.py in a process of its own, with a folder, the number of layers and, to encode, a format.
Half of the tensors are experts, which are stacked. Beyond what is there before, the process may map a fifth more
writable memory than the model takes, or an allocation fails.
"""

from __future__ import annotations

import json
import resource
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import roundpipe
from process_memory import status

PAGE_BYTES = 64 << 20
SHARDS = 4
SLACK_BYTES = 64 << 20  # stacks of threads


def config(layers: int, hidden: int, inner: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        dtype=torch.float32,
    )


def tensors_of_files(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What the files hold, by name: each expert by itself, which the model has stacked."""
    for name, parameter in model.named_parameters():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            yield name, parameter.detach()
            continue
        for index, expert in enumerate(parameter.detach()):
            if kind == "down_proj":
                yield f"{experts}.{index}.down_proj.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{experts}.{index}.gate_proj.weight", gate
                yield f"{experts}.{index}.up_proj.weight", up


def write_model(folder: Path, layers: int) -> dict[str, int]:
    """Random weights from one page of memory, each tensor from another place in it; returns checksums."""
    model_config = config(layers, hidden=2048, inner=384)
    model_config.architectures = ["Qwen3MoeForCausalLM"]
    model_config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(model_config)
    page: Any = (torch.randn(PAGE_BYTES // 4) * 0.02).view(torch.uint8).numpy()
    sums: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    tensors = list(enumerate(tensors_of_files(model)))
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header: dict[str, Any] = {}
        chunks = []
        end = 0
        for index, (name, tensor) in tensors[shard::SHARDS]:
            size = 4 * tensor.numel()
            chunks.append(memoryview(page)[4 * 101 * index :][:size])
            sums[name] = zlib.crc32(chunks[-1])
            weight_map[name] = file
            header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.writelines([len(text).to_bytes(8, "little"), text, *chunks])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sums


def load_encoded(folder: Path, layers: int, format: str) -> None:
    """Prints what the encoded model takes, beside one layer's plain weights."""
    import peft

    adapters = peft.LoraConfig(r=1, task_type="CAUSAL_LM", target_modules=["q_proj"])
    roundpipe.from_pretrained(folder / "small", peft_config=adapters, quantise=format)
    write_model(folder, layers)
    layer = sum(file.stat().st_size for file in folder.glob("*.safetensors")) // layers
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    model: Any = roundpipe.from_pretrained(folder, peft_config=adapters, quantise=format)
    peak = status("VmHWM") - before
    final = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"final_bytes": final, "peak_bytes": peak, "layer_bytes": layer}))


def main(folder: Path, layers: int, format: str = "") -> None:
    torch.set_num_threads(2)
    roundpipe.devices("virtual:1")
    Qwen3MoeForCausalLM(config(layers=2, hidden=64, inner=64)).save_pretrained(folder / "small")
    if format:
        load_encoded(folder, layers, format)
        return
    roundpipe.from_pretrained(folder / "small")  # what is imported and started once is none of the model's memory
    sums = write_model(folder, layers)
    final = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = status("VmData") + final + final // 5 + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    model: Any = roundpipe.from_pretrained(folder)
    peak = status("VmHWM") - before
    found = {name: zlib.crc32(t.view(torch.uint8).numpy()) for name, t in tensors_of_files(model._original_model)}
    different = sorted(found.items() ^ sums.items())
    print(json.dumps({"final_bytes": final, "peak_bytes": peak, "different": different}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
