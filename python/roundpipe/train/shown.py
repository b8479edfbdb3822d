"""Samples as text, with what is learnt of them marked, so that a mistake in the data is seen before a run."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from roundpipe.data.samples import IGNORED
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import read_data
from roundpipe.train.model import pictures_of, tokenizer_of
from roundpipe.train.nodes import RunNodes
from roundpipe.train.run_folder import DATA_FOLDER

_BEGIN, _END = "\u27e6", "\u27e7"
_REPEATED = re.compile(r"(<[^<>\s]+>)(?: ?\1){3,}")  # as of a picture
_BOLD, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def marked(pieces: Iterable[tuple[str, bool]]) -> str:
    """The text of pieces, with \u27e6 \u27e7 around those that are learnt, which are green on a terminal. A token that
    stands many times in a row is counted."""
    begin, end = (_BOLD + _BEGIN, _END + _PLAIN) if sys.stdout.isatty() else (_BEGIN, _END)
    shorter = ((_REPEATED.sub(_counted, text), is_learnt) for text, is_learnt in pieces)
    return "".join(f"{begin}{text}{end}" if is_learnt else text for text, is_learnt in shorter)


def _counted(found: re.Match[str]) -> str:
    return f"{found[1]} x {found[0].count(found[1])}"


def show(config: TrainConfig, count: int, say: Callable[[str], None]) -> None:
    """Reads the data, says what became of it, and shows the first samples whole. Writes nothing into the run's folder.

    Raises:
        ValueError: the data cannot be used.
    """
    tokenizer = tokenizer_of(config)
    with tempfile.TemporaryDirectory() as temporary:
        pictures = pictures_of(config, tokenizer)
        data = read_data(config, tokenizer, Path(temporary) / DATA_FOLDER, RunNodes.alone(), pictures=pictures)
        say(str(data.summary))
        for number, sample in enumerate(islice(data.samples, count), start=1):
            say(f"sample {number} of {len(data.samples):,}, what is learnt between {_BEGIN} {_END}:")
            for name in ("chosen", "rejected") if "chosen" in sample else ("",):
                rated = "" if "is_good" not in sample else "good" if sample["is_good"] else "bad"
                if name or rated:
                    say(f"{name or rated}:")
                say(marked(_pieces(tokenizer, sample[name] if name else sample)))


def _pieces(tokenizer: Any, sample: Any) -> list[tuple[str, bool]]:
    tokens = zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True)
    return [
        (str(tokenizer.decode([token for token, _ in group])), is_learnt)
        for is_learnt, group in groupby(tokens, lambda pair: pair[1] != IGNORED)
    ]
