"""Mutated cost files, machine files and plans: each is read, or refused with a message, and takes little memory.

Input number n of a reader is the same in every run. 300 of each, and more until ROUNDPIPE_FUZZ_SECONDS are over. To
keep an input that has failed once, write it into tests/corpus/plan: every file there is also read as it is.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from roundpipe.plan import costs, machine, plans

CORPUS = Path(__file__).parents[2] / "corpus" / "plan"
SECONDS = float(os.environ.get("ROUNDPIPE_FUZZ_SECONDS", "0"))
# What a file's name in the corpus begins with, and who reads it.
READERS: dict[str, Callable[[str], object]] = {
    "costs": costs.load,
    "machine": machine.load,
    "plan": plans.load_plan,
}
TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b":", b",", b"=", b"[[devices]]", b"\n", b"0", b"-1", b"1e308", b"1e999", b"NaN"),
    *(b"Infinity", b"null", b"true", b"18446744073709551616", b"9" * 5000, b"[" * 2000, b'{"a":' * 500, b"\xff", b"\0"),
    *(b'"forward"', b"1.5", b'"count"', b"1000000000", b'"\\ud800"', b"''''", b"1979-05-27"),
]


def mutated(choose: random.Random, corpus: list[bytes]) -> bytes:
    text = bytearray(choose.choice(corpus))
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(text) + 1)
        end = min(len(text), at + choose.randint(1, choose.randint(1, 40)))
        match choose.randrange(5):
            case 0:
                text[at:at] = choose.choice(TOKENS)
            case 1:
                text[at:end] = choose.choice(TOKENS)
            case 2:
                del text[at:end]
            case 3:
                text[at:at] = text[at:end]
            case _:
                text[at:end] = bytes(choose.randrange(256) for _ in range(end - at))
    return bytes(text)


def is_taken(read: Callable[[str], object], path: Path) -> bool:
    message = ""
    try:
        read(str(path))
    except ValueError as refused:
        message = str(refused)
        if not message.startswith("[") or len(message) > 20_000:
            raise
    return not message


@pytest.mark.parametrize("name", READERS)
def test_no_input_crashes_or_holds_up_a_reader(name: str, tmp_path: Path) -> None:
    read = READERS[name]
    kept = sorted(CORPUS.glob(f"{name}*"))
    assert sum(is_taken(read, path) for path in kept) > 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number, until = 0, time.monotonic() + SECONDS
    while number < 300 or time.monotonic() < until:
        alike = random.Random(number).choice(kept)
        corpus = [path.read_bytes() for path in kept if path.suffix == alike.suffix]
        path = tmp_path / f"input{alike.suffix}"
        path.write_bytes(mutated(random.Random(number), corpus))
        try:
            is_taken(read, path)
        except BaseException as error:
            error.add_note(f"input number {number}: {path.read_bytes()!r}")
            raise
        number += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
