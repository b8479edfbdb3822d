"""Runs language models by the C++ program `language_program`, and makes small models and batches for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

PROGRAM = Path(__file__).resolve().parents[3] / "build" / "release" / "tests" / "language_program" / "language_program"
needs_program = pytest.mark.skipif(not PROGRAM.exists(), reason="make build-tests has not made the program")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENS = 12  # of a row


def make_folder(folder: Path, fields: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model with random weights."""
    fields = {**SIZES, **fields}
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Plain, padded and packed rows."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SIZES["vocab_size"], (4, TOKENS), generator=generator)
    labels = ids.clone()
    labels[1, :5] = -100
    kept = torch.ones_like(ids)
    kept[1, 7:] = 0
    kept[2, :3] = 0
    positions = torch.cat([torch.arange(n) for n in (5, 4, 3)]).repeat(4, 1)
    positions[3] = torch.arange(TOKENS)
    starts = labels.where(positions != 0, -100)
    return {
        "plain": {"ids": ids, "labels": labels},
        "padded": {"ids": ids, "labels": labels.where(kept != 0, -100), "attention_mask": kept},
        "packed": {"ids": ids, "labels": starts, "positions": positions},
    }


class Program:
    """The program that runs language models, for one job after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDPIPE_DEVICES": "virtual:2"}
        self._process = subprocess.Popen(
            [PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, **fields: object) -> str:
        """What the program answered to one job."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\t".join(f"{name}={value}" for name, value in fields.items()) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def peak_memory(self) -> int:
        """The most bytes of memory that it has had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait() == 0
