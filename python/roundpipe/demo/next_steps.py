"""Instructions for training one's own model, in a form that works where the demo was started."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_PROGRAM = Path("examples", "finetune.py")

_LINES = """\
  import roundpipe
  model = roundpipe.from_pretrained("MODEL_FOLDER")  # or a name on the Hub
  model.train()
  optimizer = roundpipe.optim.AdamW(model, lr=2e-5)
  for batch in batches:  # dicts with input_ids and labels
      loss = model.forward_backward(input_kwargs=batch)
      model.step(optimizer, max_grad_norm=1.0)
  model.save_pretrained("OUT_FOLDER")  # plain transformers loads it"""


def own_model(folder: Path) -> str:
    """How to train one's own model: a command if `folder` is a checkout, else the lines of a program."""
    program = folder / _PROGRAM
    # Other projects may have an examples/finetune.py as well.
    if program.is_file() and "import roundpipe" in program.read_text(encoding="utf-8", errors="replace"):
        return (
            "your own model, a folder or a name on the Hub, learns from conversations (docs/full-fine-tuning.md):\n"
            f"  {_python(folder)} {_PROGRAM} MODEL_FOLDER CHAT.jsonl OUT_FOLDER"
        )
    return "your own model (docs/full-fine-tuning.md in the repository has a whole program):\n" + _LINES


def _python(folder: Path) -> str:
    """The command that starts this Python from `folder`."""
    mine = Path(sys.executable)
    if mine.is_relative_to(folder):
        return str(mine.relative_to(folder))
    found = shutil.which("python")
    return "python" if found is not None and os.path.samefile(found, mine) else str(mine)
