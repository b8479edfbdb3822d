"""TRL's SFTTrainer with a processor, beside the same trainer in the pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import trl
from PIL import Image

from roundpipe.huggingface import RoundPipeSFTTrainer
from tiny_pictures import llava, shape_file
from trainer_runs import ROUNDING, arguments, curve, difference
from trl_runs import offline as offline

pytestmark = pytest.mark.usefixtures("one_torch_thread", "offline")


def rows(folder: Path) -> Any:
    file = shape_file(folder, 12)
    records = [json.loads(line) for line in file.open()]
    for record in records:
        record["messages"][0]["content"] = record["messages"][0]["content"].replace("<image>", "")
        record["images"] = [Image.open(file.parent / name) for name in record["images"]]
    return datasets.Dataset.from_list(records)


def test_its_curve_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    curves = []
    for kind in (trl.SFTTrainer, RoundPipeSFTTrainer):
        model, processor = llava()
        settings: dict[str, Any] = {"bf16": False, "max_length": None, "learning_rate": 1e-3}
        trainer: Any = kind(
            model=model,
            args=arguments(tmp_path / kind.__name__, trl.SFTConfig, **settings),
            train_dataset=rows(tmp_path / f"data-{kind.__name__}"),
            processing_class=processor,
        )
        trainer.train()
        curves.append(curve(trainer))
    assert trainer.model.calls > 0
    assert difference(*curves) < ROUNDING
