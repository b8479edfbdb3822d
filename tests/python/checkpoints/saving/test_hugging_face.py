"""Checkpoints of transformers and peft models: they are folders that these load, and trainings resume from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import roundpipe
from causal_models import build, padded_batch
from roundpipe import RoundPipe, wrap_model_to_roundpipe

pytestmark = pytest.mark.usefixtures("two_devices")


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(model.forward_backward(input_kwargs=padded_batch())))
        roundpipe_model = model if isinstance(model, RoundPipe) else model.base_model.model
        roundpipe_model.step(optimizer)
    roundpipe_model.synchronize()
    return losses


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "gemma2"])
def test_transformers_loads_the_folder(name: str, tmp_path: Path) -> None:
    model = wrap_model_to_roundpipe(build(name))
    model.train()
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
    train(model, optimizer, 2)
    folder = Path(roundpipe.save_checkpoint(tmp_path, model, optimizer, wait=True).folder)
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(plain).__name__ == type(build(name)).__name__
    for (key, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key
    expected = train(model, optimizer, 2)
    again = wrap_model_to_roundpipe(build(name, seed=3))
    again.train()
    its_optimizer = roundpipe.optim.AdamW(again, lr=1e-2)
    roundpipe.load_checkpoint(folder, again, its_optimizer)
    assert train(again, its_optimizer, 2) == expected


@pytest.mark.parametrize("order", ["peft first", "pipeline first"])
def test_adapters(order: str, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        config = peft.LoraConfig(r=3, task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"])
        torch.manual_seed(seed)
        if order == "peft first":
            model = wrap_model_to_roundpipe(peft.get_peft_model(build("llama"), config))
        else:
            model = peft.get_peft_model(wrap_model_to_roundpipe(build("llama")), config)
        model.train()
        return model, roundpipe.optim.AdamW(model, lr=1e-2)

    model, optimizer = make(1)
    train(model, optimizer, 2)
    folder = Path(roundpipe.save_checkpoint(tmp_path, model, optimizer, wait=True).folder)
    assert not list(folder.glob("model*"))
    loaded = peft.PeftModel.from_pretrained(build("llama"), folder)
    ours = {name: value for name, value in model.named_parameters() if value.requires_grad}
    theirs = dict(loaded.named_parameters())
    assert len(ours) > 10
    for name, value in ours.items():
        key = name if name in theirs else f"base_model.model.{name}"
        assert torch.equal(value, theirs[key]), name
    expected = train(model, optimizer, 2)
    again, its_optimizer = make(2)
    roundpipe.load_checkpoint(tmp_path, again, its_optimizer)
    assert train(again, its_optimizer, 2) == expected


def test_another_base_is_refused(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
        model = wrap_model_to_roundpipe(peft.get_peft_model(build("llama", seed=seed), config))
        return model, roundpipe.optim.AdamW(model, lr=1e-2)

    model, optimizer = make(0)
    roundpipe.save_checkpoint(tmp_path, model, optimizer, wait=True)
    other, its_optimizer = make(1)
    with pytest.raises(ValueError, match="expected the same base"):
        roundpipe.load_checkpoint(tmp_path, other, its_optimizer)


def test_a_model_wrapped_part_by_part(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.scale = nn.Parameter(torch.ones(8))
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
            self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.body(self.embedding(tokens)) * self.scale
            for layer in self.others:
                hidden = layer(hidden)
            return hidden

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = wrap_model_to_roundpipe(Parts(), use_sequential_preset=False, lower_threshold=0, name="parts")
        return model, roundpipe.optim.AdamW(model, lr=1e-2)

    def steps(model: Any, optimizer: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            tokens = torch.randint(11, (6, 4))
            losses.append(float(model.forward_backward((tokens,), loss_fn=lambda out, _: out.square().mean())))
            model.step(optimizer)
        model.synchronize()
        return losses

    model, optimizer = make(1)
    steps(model, optimizer, 2)
    roundpipe.save_checkpoint(tmp_path, model, optimizer, wait=True)
    expected = steps(model, optimizer, 3)
    again, its_optimizer = make(2)
    roundpipe.load_checkpoint(tmp_path, again, its_optimizer)
    assert steps(again, its_optimizer, 3) == expected
