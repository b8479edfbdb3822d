"""The examples that are loops of their own learn what they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from programs import ProgramRunner

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


DEVICES = "virtual:2,threads=1"


@pytest.mark.long
def test_language_model(runner: ProgramRunner, tmp_path: Path) -> None:
    result = runner.run(EXAMPLES / "language_model.py", "--epochs", "20", "--out", tmp_path, ROUNDPIPE_DEVICES=DEVICES)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d+  loss ([\d.]+)", result.stdout)]
    # A guess among the six colours, as the one word of five that is not always the same, costs 1.79 / 5.
    assert len(losses) == 2 and losses[-1] < 0.36
    assert re.search(r"\d of 6 answers are right", result.stdout)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 3


@pytest.mark.long
def test_image_classifier(runner: ProgramRunner) -> None:
    result = runner.run(
        EXAMPLES / "image_classifier.py", "--epochs", "2", "--pictures", "600", ROUNDPIPE_DEVICES=DEVICES
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d  loss ([\d.]+)", result.stdout)]
    assert len(losses) == 2 and losses[-1] < losses[0] < 2.08  # log 8: a guess
    assert float(result.stdout.rpartition("test accuracy ")[2]) > 0.25


def test_shapes(runner: ProgramRunner, tmp_path: Path) -> None:
    """Its losses are those of transformers alone; whether it learns is tried by hand, in minutes."""
    arguments = (tmp_path / "shapes", "--pictures", "200", "--epochs", "3")
    result = runner.run(EXAMPLES / "shapes.py", *arguments, ROUNDPIPE_DEVICES=DEVICES)
    assert result.returncode == 0, result.stderr
    losses = re.search(r"before training was ([\d.]+), by transformers alone ([\d.]+)", result.stdout)
    assert losses is not None and abs(float(losses[1]) - float(losses[2])) < 1e-5
    evaluations = re.findall(r"held-out loss ([\d.]+)\n", result.stdout)
    assert float(evaluations[-1]) < float(evaluations[0]) - 0.2
    assert re.search(r"% of 180 new pictures are named right, after [\d.]+ minutes", result.stdout)
