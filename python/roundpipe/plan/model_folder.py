"""Reads a model's configuration from a folder for the planner, offline and without the weights."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from roundpipe.files import first_lines, read_json
from roundpipe.ops.functional import Arithmetic
from roundpipe.plan.shapes import ModelShapes, make_model, measure

Train = Literal["full", "lora"]
LORA_RANK = 16
# By a part of the field's name.
_MOST = {"num_": 4096, "_size": 1 << 20}


def is_model(source: str) -> bool:
    """Whether `source` is a folder, or a JSON file that configures a transformers model."""
    path = Path(source)
    try:
        if path.is_dir():
            return True
        if path.suffix != ".json" or not path.is_file():
            return False
        document = read_json(path, "plan", "a cost file")
    except (OSError, ValueError):
        return False  # the reader of cost files then reports the error
    return isinstance(document, dict) and "model_type" in document


def measure_folder(
    source: str,
    tokens: int,
    train: Train,
    arithmetic: Arithmetic,
    quantise: str | None = None,
    keep: Sequence[str] = (),
) -> ModelShapes:
    """Measures the model of a folder or of a config.json for a microbatch of one row, in bf16.

    Args:
        quantise: the format of frozen weights, and `keep` the modules whose weights stay, as of `make_model`.

    Raises:
        ValueError: there is no config.json, or transformers cannot make a causal language model of it.
    """
    from transformers import AutoConfig

    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"[plan] {path} has no config.json, expected the folder of a model of transformers")
    document = read_json(file, "plan", "a configuration of transformers")
    _refuse_huge(document, file)
    try:
        config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        # Its validators, and the models themselves, raise errors of any type for a field that makes no sense.
        rank = LORA_RANK if train == "lora" else None
        if rank is None and getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"[plan] the weights of {path} are quantised, so that only adapters can be trained, expected "
                "--train lora"
            )
        folder = path if path.is_dir() else None
        model = make_model(config, rank, quantise=quantise, keep=keep, folder=folder)
        name = (path if path.is_dir() else path.parent).resolve().name
        return measure(model, tokens, name, arithmetic=arithmetic)
    except Exception as error:
        if str(error).startswith("["):
            raise
        raise ValueError(f"[plan] transformers makes no model of {file}: {first_lines(error)}") from error


def _refuse_huge(document: Any, file: Path) -> None:
    """Refuses numbers for which making the model would take hours, even without data."""
    for field, value in document.items() if isinstance(document, dict) else ():
        for part, most in _MOST.items():
            if part in field and isinstance(value, int) and value > most:
                raise ValueError(f"[plan] {field} in {file} is {reprlib.repr(value)}, expected at most {most}")
