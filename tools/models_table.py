"""Writes docs/reference/models.md: which models of text with pictures, videos and sounds hold, and to which bits.

python tools/models_table.py

Each cell is tried: a tiny model with random weights takes steps on virtual devices, beside the plain model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "reference" / "models.md"
sys.path.insert(0, str(ROOT / "tests" / "python" / "support"))

import transformers  # noqa: E402

from multimodal_models import MODELS  # noqa: E402
from multimodal_others import OTHERS  # noqa: E402
from multimodal_trials import ALL, CASES, LARGEST, MIXED, TRAINED, cases_of, tried  # noqa: E402

COLUMNS = [*CASES, MIXED]
HEAD = f"""# Models of text with pictures, videos and sounds

`python tools/models_table.py` makes this page, here with transformers {transformers.__version__}. For each cell, a tiny
model with random weights takes steps with one microbatch and with three, on one to four virtual devices. It trains all
of it, and LoRA adapters of the language model beside a frozen tower.

- **bits**: with one microbatch, the loss and every gradient have the bits of the plain model. With three, they are
  within {LARGEST:.0e} of the largest gradient.
- **bits'**: the same, but the bits with one microbatch are those of the plain model with torch's activation
  checkpointing, which recomputes its layers as the pipeline does. A convolution over tokens then has other last bits,
  on some processors in more cells than here.
- **bits of one**: this holds with one microbatch. Several are refused by name, or warned of, see below the table.
- **refused**: by name, see below the table.
- **no**: it does not hold.
- An empty cell: the model takes no such batch.

Rows are of uneven lengths and padded. Uneven pictures are two in the first row, none in the second and one in the
third, all of different sizes; pictures and videos are rows with these, and rows with those.
"""
OTHERS_HEAD = """## Others

These are tried in the same way.
"""
REFUSALS_HEAD = """What is refused or warned of, and the reason that is given:
"""


def cell(name: str, case: str) -> tuple[str, str | None]:
    """What holds for a model and a kind of batch, and the first refusal."""
    if case not in cases_of(ALL[name]):
        return "", None
    recomputed = False
    refusals: dict[int, str] = {}
    for number, (trained, microbatches) in enumerate((t, m) for t in TRAINED for m in (1, 3)):
        try:
            found = tried(name, case, trained, microbatches, 1 + number)
        except ValueError as reason:
            refusals.setdefault(microbatches, str(reason))
            continue
        if not found.holds(microbatches) and found.warned:
            refusals.setdefault(microbatches, found.warned)
        elif not found.holds(microbatches):
            return "no", None
        recomputed |= found.recomputed
    mark = "bits'" if recomputed else "bits"
    if refusals:
        mark = "refused" if 1 in refusals else f"{mark} of one"
    return mark, next(iter(refusals.values()), None)


def rows(name: str) -> list[str]:
    """A model's row of the table, and a line for each of its refusals."""
    cells = {case: cell(name, case) for case in COLUMNS}
    reasons: dict[str, list[str]] = {}
    for case, (_, reason) in cells.items():
        if reason is not None:
            reasons.setdefault(reason, []).append(case)
    table = f"| {name} | {' | '.join(mark for mark, _ in cells.values())} |"
    return [table, *(f"- {name}, {', '.join(cases)}: `{reason}`" for reason, cases in reasons.items())]


def table(names: Iterable[str]) -> list[str]:
    """The table of some models, and what is refused."""
    every = [rows(name) for name in names]
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|", *(row for row, *_ in every)]
    refusals = [line for _, *more in every for line in more]
    return [*lines, "", REFUSALS_HEAD, *refusals] if refusals else lines


def text() -> str:
    """The text of the page."""
    return "\n".join([HEAD, *table(MODELS), "", OTHERS_HEAD, *table(OTHERS)]) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
