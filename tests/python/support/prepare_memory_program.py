"""Prepares texts, and prints how far the memory of the process rose above what a small part of them takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from process_memory import status
from roundpipe.data.records.prepare import DataOptions, prepare
from tiny_chat import byte_tokenizer


def main(folder: Path) -> None:
    tokenizer, options = byte_tokenizer(), DataOptions(max_length=8192)
    prepare([folder / "first.jsonl"], tokenizer, options, folder / "warm")
    before = status("VmHWM")
    data = prepare([folder / "all.jsonl"], tokenizer, options, folder / "all")
    print(json.dumps({"rose": status("VmHWM") - before, "tokens": data.summary.tokens}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
