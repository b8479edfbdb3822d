"""Writes docs/reference/models.md: which models of text with pictures, videos and sounds hold, and to which bits.

python tools/models_table.py

Each cell is tried: a tiny model with random weights takes a step on virtual devices, beside the plain model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "reference" / "models.md"
sys.path.insert(0, str(ROOT / "tests" / "python" / "support"))

import transformers  # noqa: E402

from multimodal_models import MODELS  # noqa: E402
from multimodal_trials import CASES, LARGEST, MIXED, TRAINED, cases_of, tried  # noqa: E402

COLUMNS = [*CASES, MIXED]
HEAD = f"""# Models of text with pictures, videos and sounds

`python tools/models_table.py` makes this page, here with transformers {transformers.__version__}. For each cell, a tiny
model with random weights takes steps with one microbatch and with three, on one to four virtual devices. It trains all
of it, and LoRA adapters of the language model beside a frozen tower.

- **bits**: with one microbatch, the loss and every gradient have the bits of the plain model. With three, they are
  within {LARGEST:.0e} of the largest gradient.
- **bits'**: the same, but the bits with one microbatch are those of the plain model with torch's activation
  checkpointing, which recomputes its layers as the pipeline does. A convolution over tokens then has other last bits.
- **no**: it does not hold.
- An empty cell: the model takes no such batch.

Rows are of uneven lengths and padded. Uneven pictures are two in the first row, none in the second and one in the
third, all of different sizes; pictures and videos are rows with these, and rows with those.
"""


def cell(name: str, case: str) -> str:
    """What holds for a model and a kind of batch."""
    if case not in cases_of(MODELS[name]):
        return ""
    recomputed = False
    for number, (trained, microbatches) in enumerate((t, m) for t in TRAINED for m in (1, 3)):
        found = tried(name, case, trained, microbatches, 1 + number)
        if not found.holds(microbatches):
            return "no"
        recomputed |= found.recomputed
    return "bits'" if recomputed else "bits"


def text() -> str:
    """The text of the page."""
    lines = [HEAD, f"| model | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in MODELS:
        lines.append(f"| {name} | {' | '.join(cell(name, case) for case in COLUMNS)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
