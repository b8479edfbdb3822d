"""Runs of transformers' and TRL's trainers on tiny models and data made here, and what is compared of two runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 64


def small_llama() -> Any:
    """The same weights each time."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes))


def rows_of_text(count: int = 18) -> list[dict[str, Any]]:
    """Rows of different lengths, with a column that no model takes."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": ids, "attention_mask": [1] * length, "unused": [0]})
    return rows


def accelerate_epoch(accelerator: Any, model: Any, optimizer: Any, schedule: Any, loader: Iterable[Any]) -> list[float]:
    """An epoch of the loop in accelerate's documentation: the loss of each batch, and before it a step's norm."""
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A data collator for `rows_of_text`."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


class EventLog(TrainerCallback):
    """Notes every event, with the step and the names of what it is given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, list[str]]] = []


def _noting(name: str) -> Any:
    def note(self: EventLog, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append((name, state.global_step, sorted(given)))

    return note


for _name in dir(TrainerCallback):
    if _name.startswith("on_"):
        setattr(EventLog, _name, _noting(_name))


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> Any:
    """Ten steps of two epochs over `rows_of_text()`, on the host, logged each."""
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return kind(output_dir=str(folder), **{**settings, **options})


def make_trainer(kind: type[Trainer], folder: Path, model: Any, given: dict[str, Any], **options: Any) -> Any:
    """A trainer of rows of text.

    Args:
        kind: the trainer's class.
        folder: its output_dir.
        model: the model, or None if `given` has model_init.
        given: other arguments of the trainer, which replace those made here.
        **options: TrainingArguments.
    """
    defaults = {"train_dataset": rows_of_text(), "eval_dataset": rows_of_text()[:6], "data_collator": padded}
    args = given.get("args") or arguments(folder, **options)
    return kind(model=model, **{**defaults, **given, "args": args})


_CLOCK = ("runtime", "per_second", "epoch", "flos", "time")


def curve(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged, but for what a clock measured."""
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in _CLOCK)}
        for entry in trainer.state.log_history
    ]


def losses(trainer: Any) -> list[float]:
    """The losses of the logged steps."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# Of two curves whose sums were made in different orders, as microbatches' are: Adam magnifies it.
ROUNDING = 1e-3


def difference(expected: list[dict[str, float]], found: list[dict[str, float]]) -> float:
    """The largest difference between two curves, relative where values are above 1; both have the same entries."""
    assert [sorted(entry) for entry in found] == [sorted(entry) for entry in expected]
    pairs = [(entry[name], other[name]) for entry, other in zip(expected, found, strict=True) for name in entry]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


# One without Adam's division, which makes of a gradient's rounding a step of full length.
SGD = {"optim": "sgd", "learning_rate": 0.1}


def agree(trainers: list[Any]) -> None:
    """Of two trainers that have trained: the logged losses and the weights are equal, but for 1e-5 of them."""
    plain, ours = trainers
    for name in ("loss", "eval_loss"):
        expected, found = ([entry[name] for entry in curve(each) if name in entry] for each in trainers)
        assert found == pytest.approx(expected, rel=1e-5)
    assert difference(curve(plain), curve(ours)) < 1e-4
    weights = ours.model.state_dict()
    assert set(weights) == set(plain.model.state_dict())
    for name, expected in plain.model.state_dict().items():
        # What is added to all keys changes no attention: its gradients are rounding, and nothing else.
        nothing = name.endswith(("key.bias", "k_proj.bias"))
        limit = 1e-6 if nothing else 1e-5 * float(expected.abs().max())
        assert float((weights[name] - expected).abs().max()) <= limit, name


def some_in_short(names: Iterable[str], short: set[str]) -> list[Any]:
    """Parameters of a test, of which `make test` takes those in `short`."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in names]
