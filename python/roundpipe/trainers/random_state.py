"""What dropout in a model in the pipeline draws from, as a file of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roundpipe.files import read_json, write_text


def _file(folder: Path, index: int) -> Path:
    return folder / ("roundpipe_state.json" if not index else f"roundpipe_state_{index}.json")


def save_random_state(folder: Path, model: Any, index: int = 0) -> None:
    """Writes the state of the `index`-th model; nothing if it has none, as it is not one pipeline."""
    if isinstance(getattr(model, "calls", None), int):
        write_text(_file(folder, index), json.dumps({"calls": model.calls, "random_seed": model.random_seed}))


def load_random_state(folder: Path, model: Any, index: int = 0) -> None:
    """Reads it; nothing if the checkpoint has none, as it was written without a pipeline."""
    if _file(folder, index).exists() and isinstance(getattr(model, "calls", None), int):
        state = read_json(_file(folder, index), "checkpoint", "the random state of a model")
        model.calls, model.random_seed = state["calls"], state["random_seed"]
