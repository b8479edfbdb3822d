"""Runs language models by the C++ program `language_program`, and makes small models and batches for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

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


def documents_apart(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """The masks of packed rows, made by transformers' own functions, for a model that makes none from positions."""
    arguments: dict[str, Any] = {
        "config": model.config,
        "inputs_embeds": model.get_input_embeddings()(ids),
        "attention_mask": None,
        "cache": None,
        "position_ids": positions,
    }
    return {
        "full_attention": create_causal_mask(**arguments),
        "sliding_attention": create_sliding_window_causal_mask(**arguments),
    }


def load(folder: Path, **options: Any) -> Any:
    """transformers' model, with weights that lie where torch puts them: products of unaligned ones have other bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def expected(
    folder: Path, batch: dict[str, torch.Tensor], dtype: str, attention: str, microbatches: int
) -> dict[str, torch.Tensor]:
    """Loss, logits and gradients of a plain loop over transformers' model."""
    model = load(folder, dtype=dtype, attn_implementation=attention).train()
    names = {"ids": "input_ids", "positions": "position_ids"}
    arguments = {names.get(name, name): tensor for name, tensor in batch.items()}
    counted = int((batch["labels"][:, 1:] != -100).sum())
    logits, loss = [], torch.zeros(())
    for rows in torch.arange(len(batch["ids"])).tensor_split(microbatches):
        part = {name: tensor[rows] for name, tensor in arguments.items()}
        labels = part.pop("labels")
        if model.config.model_type == "gpt_oss" and attention == "eager" and "position_ids" in part:
            part["attention_mask"] = documents_apart(model, part["input_ids"], part["position_ids"])
        with torch.no_grad():
            logits.append(model(**part, use_cache=False).logits)
        outputs = model(**part, use_cache=False)
        added = model.loss_function(outputs.logits, labels, model.vocab_size, num_items_in_batch=counted)
        if getattr(outputs, "aux_loss", None) is not None:  # weighted by the microbatch's share of the labels
            share = (labels[:, 1:] != -100).sum().float() / counted
            added = added + model.config.router_aux_loss_coef * outputs.aux_loss * share
        if microbatches == 1:
            assert torch.equal(added, model(**part, labels=labels, use_cache=False).loss)
        added.backward()
        loss = added.detach() if rows[0] == 0 else loss + added.detach()
    gradients = {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss, "logits": torch.cat(logits), **gradients}


def compare(found: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Compares what the program has written with the bits that are expected."""
    tensors = load_file(found)
    del tensors["seeds"]
    assert tensors.pop("evaluated").item() == pytest.approx(wanted["loss"].item(), rel=1e-6)
    if "grad.lm_head.weight" not in wanted:  # tied: shown under both names
        assert torch.equal(tensors.pop("grad.lm_head.weight"), tensors["grad.model.embed_tokens.weight"])
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


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


def check_saved_folders(program: Program, model: Path, folder: Path) -> None:
    """Checks that a model which was loaded and saved is the same one, in fp32 and bf16."""
    source = folder / "source"
    shutil.copytree(model, source)
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("no part of it")
    for dtype, saving in (("float32", {}), ("bfloat16", {"file_bytes": 20_000})):
        saved = folder / dtype
        assert program.run(model=source, dtype=dtype, save=saved, **saving) == "ok"
        assert (len(list(saved.glob("*.safetensors"))) > 1) == (dtype == "bfloat16")
        assert (saved / "tokenizer.json").read_text() == "{}" and not (saved / "pytorch_model.bin").exists()
        assert json.loads((saved / "config.json").read_text())["dtype"] == dtype
        wanted = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        loaded = AutoModelForCausalLM.from_pretrained(saved)
        assert loaded.dtype == wanted.dtype and loaded.config.to_diff_dict() == wanted.config.to_diff_dict()
        for (one, parameter), (other, expected) in zip(
            loaded.named_parameters(), wanted.named_parameters(), strict=True
        ):
            assert one == other and torch.equal(parameter, expected), one
        again = folder / f"{dtype} again"
        assert program.run(model=saved, save=again) == "ok"  # in its own dtype, from its own files
        ours = load_file(again / "model.safetensors")
        theirs = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[weight]) for weight, tensor in ours.items())


def answer_to(program: Program, model: Path, folder: Path, changes: dict[str, Any]) -> str:
    """What the program says of a model whose config.json has other fields."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return program.run(model=folder)
