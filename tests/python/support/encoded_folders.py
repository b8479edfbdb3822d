"""Folders whose weights are encoded as other programs do it, by their documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn


def describe(folder: Path, out: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


E4M3 = torch.float8_e4m3fn


def eight_bits(plain: Path, out: Path, block: tuple[int, int] | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Writes the weights of a folder as E4M3 numbers with scales of blocks, or of tensors, and returns their codes."""
    out.mkdir()
    tensors, codes = load_file(plain / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        rows, columns = block or weight.shape
        padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % rows))
        blocks = padded.view(-1, rows, weight.shape[1] // columns, columns)
        scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).to(dtype)
        codes[name] = (blocks / scale.float()).clamp(-448, 448).view(padded.shape)[: len(weight)].to(E4M3)
        tensors |= {name: codes[name], f"{name}_scale_inv": scale[:, 0, :, 0] if block else scale.view(())}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    describe(plain, out, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block})
    return codes
