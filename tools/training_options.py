"""Writes python/roundpipe/train/option_table.json: the options that both training commands have.

python tools/training_options.py

The table itself is in roundpipe/command/training_options.cpp. `roundpipe train --help` reads the copy, so that it need
not load the engine.
"""

import json
from pathlib import Path

from roundpipe import _core

FILE = Path(__file__).resolve().parents[1] / "python" / "roundpipe" / "train" / "option_table.json"


def text() -> str:
    """The text of the file: by name, an option's help, default, and whether it is of one machine of several."""
    options = {
        each.name: {"help": each.help, "default": each.otherwise, "of_a_machine": each.of_a_machine}
        for each in _core.training_options()
    }
    return json.dumps(options, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
