"""The data of a run: samples on disk, and the batches of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundpipe.data.batches import Batches
from roundpipe.data.chat import padding_token_id
from roundpipe.train.config import TrainConfig

# A run of so many steps reads the data again and again; an epoch has at least one step.
_ENDLESS = 1_000_000_000


@dataclass(frozen=True)
class RunData:
    """Batches of a run.

    Attributes:
        train: of the steps; remembers its position.
        held_out: of an evaluation; empty without held-out data.
        held_out_samples: that these batches are made of.
        steps: the number of steps.
        summary: what was read, for reports.
    """

    train: Batches
    held_out: Batches | list[Any]
    held_out_samples: Any
    steps: int
    summary: Any


def read_data(config: TrainConfig, tokenizer: Any, folder: Path) -> RunData:
    """Reads and tokenizes the data of a run.

    Raises:
        ValueError: a file is missing or malformed, or as in `make_batches`.
    """
    from roundpipe.data.chat import load_chat

    assert config.data
    data = load_chat(config.data[0], tokenizer, held_out=config.held_out, seed=config.seed)
    return make_batches(data.train, data.held_out, None, tokenizer, config)


def make_batches(train: Any, held_out: Any, summary: Any, tokenizer: Any, config: TrainConfig) -> RunData:
    """Cuts samples into the batches of a run.

    Raises:
        ValueError: there is nothing to learn from, or the tokenizer has no token to pad with.
    """
    sizes: dict[str, Any] = {
        "batch_tokens": config.tokens_of_step,
        "max_length": config.length,
        "packed": config.packed,
        "pad_token_id": padding_token_id(tokenizer),
    }
    epochs = config.epochs if config.steps is None else _ENDLESS
    batches = Batches(train, epochs=epochs, seed=None if config.in_order else config.seed, **sizes)
    steps = len(batches) if config.steps is None else config.steps
    return RunData(batches, Batches(held_out, **sizes) if len(held_out) else [], held_out, steps, summary)
