"""Trainer of transformers and accelerate's loop, unchanged, over a model in the pipeline: a plain model's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from sweeps import mostly_long
from trainer_runs import accelerate_epoch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCABULARY = 16, 8, 64


def make_model() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config)


def make_rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (LENGTH,), generator=generator) for _ in range(ROWS)]
    # "unused" is no argument of the model's forward: Trainer looks at its signature, and leaves it out.
    return [{"input_ids": row, "labels": row, "unused": torch.zeros(1)} for row in rows]


def wrapped(model: nn.Module, microbatches: int) -> Any:
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    return wrap_model_to_roundpipe(model, model_run_config=config).train()


def train(model: Any, folder: Path, optimizer: Any = None, **options: Any) -> tuple[list[float], list[float], float]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=1,
        seed=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=make_rows(),
        eval_dataset=make_rows()[:4],
        optimizers=(optimizer, None),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    return [entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps], evaluated


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "not clipped": {"max_grad_norm": 0.0},
    "sgd": {"optim": "sgd"},
}


@pytest.mark.parametrize("setting", mostly_long(SETTINGS, "bf16"))
def test_trainer_trains_the_same_bits(setting: str, tmp_path: Path) -> None:
    plain, ours = make_model(), make_model()
    expected = train(plain, tmp_path, **SETTINGS[setting])
    found = train(wrapped(ours, 1), tmp_path, **SETTINGS[setting])
    assert found == expected
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("devices", mostly_long([1, 2, 4], 2))
def test_trainer_with_microbatches(devices: int, tmp_path: Path) -> None:
    roundpipe.devices(f"virtual:{devices}")
    expected = train(make_model(), tmp_path)
    found = train(wrapped(make_model(), 4), tmp_path)
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


@pytest.mark.parametrize("setting", mostly_long(["fp32", "bf16", "accumulated"], "accumulated"))
def test_trainer_with_a_fused_optimizer(setting: str, tmp_path: Path) -> None:
    plain, model = make_model(), wrapped(make_model(), 1)
    expected = train(plain, tmp_path, torch.optim.AdamW(plain.parameters(), lr=1e-3), **SETTINGS[setting])
    found = train(model, tmp_path, roundpipe.optim.AdamW(model, lr=1e-3), **SETTINGS[setting])
    # The fused step rounds elsewhere, see docs/exactness.md.
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=1e-5)


@pytest.fixture(autouse=True)
def no_accelerator_yet() -> None:
    """accelerate keeps one setting a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def accelerate_loop(model: Any, precision: str, which: str) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    parameters = model.optim_parameters() if which == "copies" else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in make_rows()]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(rows, 4), schedule)
    losses: list[float] = []
    for _ in range(2):
        losses += accelerate_epoch(accelerator, model, optimizer, schedule, loader)
    unwrapped = accelerator.unwrap_model(model)
    losses.append(unwrapped(**rows_as_batch()).loss.item())
    return losses


def rows_as_batch() -> dict[str, torch.Tensor]:
    rows = make_rows()
    return {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerates_own_loop(precision: str) -> None:
    plain, ours = make_model(), make_model()
    expected = accelerate_loop(plain, precision, "own")
    found = accelerate_loop(wrapped(ours, 1), precision, "own")
    assert found == expected
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*parameters.. outside of step_fn")
def test_accelerates_loop_over_the_optimizers_parameters() -> None:
    expected = accelerate_loop(make_model(), "no", "own")
    assert accelerate_loop(wrapped(make_model(), 1), "no", "copies") == expected
