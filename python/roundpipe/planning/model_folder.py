"""Reads a model's configuration from a folder for the planner, offline and without the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from roundpipe.files import first_lines
from roundpipe.planning.shapes import ModelShapes, make_model, measure

Train = Literal["full", "lora"]
LORA_RANK = 16


def is_model(source: str) -> bool:
    """Whether `source` is a folder, or a JSON file that configures a transformers model."""
    path = Path(source)
    if path.is_dir():
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return False  # the reader of cost files then reports the error
    return isinstance(document, dict) and "model_type" in document


def measure_folder(source: str, tokens: int, train: Train) -> ModelShapes:
    """Measures the model of a folder or of a config.json for a microbatch of one row, in bf16.

    Raises:
        ValueError: there is no config.json, or transformers cannot make a causal language model of it.
    """
    from transformers import AutoConfig

    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"[plan] {path} has no config.json, expected the folder of a model of transformers")
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"[plan] {file} is not a configuration of transformers: {first_lines(error)}") from error
    model = make_model(config, LORA_RANK if train == "lora" else None)
    return measure(model, tokens, (path if path.is_dir() else path.parent).resolve().name)
