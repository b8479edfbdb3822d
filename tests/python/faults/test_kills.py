"""A run that is killed at random moments, again and again, is always resumable and loses nothing that was reported."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundpipe
from killed_training import FAULT_AT, Life, Lives, Request
from robustness import script_environment
from roundpipe.checkpoints.runs.show import problems_of
from sweeps import mostly_long

LONGEST_DELAY_S, LONGEST_BEGINNING_S = 0.01, 0.2
# What a life that follows a killed one says of what it finds.
EXPECTED_WORDS = ("were completed before the run ended", "are no whole record", "[save_checkpoint] removed ")


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with Lives(script_environment()) as process:
        yield process


def newest_saved(folder: Path) -> int:
    """The newest checkpoint's step after every byte of it was compared with its checksum; 0 if there is none."""
    newest = roundpipe.latest(folder)
    if newest is None:
        return 0
    assert [problems for _, problems in problems_of(newest, print)] == [[]]
    return int(newest.name.removeprefix("step-"))


def killed(lives: Lives, request: Request, chance: random.Random) -> Life:
    """A life that ends by SIGKILL a random time after a random number of its words, or while it begins."""
    words = chance.randrange(20)
    delay_s = chance.uniform(0, LONGEST_DELAY_S if words else LONGEST_BEGINNING_S)
    is_killed = False
    for life in lives.live(request):
        if not is_killed and len(life.said) >= words:
            time.sleep(delay_s)
            os.kill(life.pid, signal.SIGKILL)
            is_killed = True
    return life


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.long)])
def test_kills_at_random_moments(kills: int, lives: Lives, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    folder = tmp_path / "run"
    kept = recorded = 0  # the newest checkpoint and the last record after the life before
    for kill in range(kills):
        life = killed(lives, Request(str(folder), steps=10**6), chance)
        where = f"seed {seed}, kill {kill} of {kills}: {life}"
        assert life.status == -signal.SIGKILL, where
        for line in life.errors.splitlines():
            assert any(words in line for words in EXPECTED_WORDS), where
        assert life.newest("loaded") in (kept, -1), where
        assert life.newest("failed") == -1, where
        kept_before, recorded_before = kept, recorded
        kept = newest_saved(folder) if folder.exists() else 0
        recorded = max(roundpipe.read_journal(folder) if folder.exists() else {}, default=0)
        assert kept >= max(kept_before, life.newest("saved")), where
        assert recorded >= max(recorded_before, life.newest("completed"), kept), where
    steps = recorded + 3
    last = lives.undisturbed(Request(str(folder), steps))
    expected = lives.undisturbed(Request(str(tmp_path / "undisturbed"), steps))
    where = f"seed {seed}: {last}"
    assert last.status == expected.status == 0, where
    assert "does not reproduce" not in last.errors, where
    assert len(finals(last)) == 1 and finals(last) == finals(expected), where
    ours, theirs = roundpipe.read_journal(folder), roundpipe.read_journal(tmp_path / "undisturbed")
    assert list(ours) == list(range(1, steps + 1)), where
    assert ours == theirs, where


def finals(life: Life) -> list[str]:
    """The checksum of weights, moments and random state."""
    return [line[1] for line in life.said if line[0] == "final"]


def test_a_run_that_is_asked_to_end_saves_first(lives: Lives, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    words = random.Random(seed).randrange(3, 12)
    is_asked = False
    for life in lives.live(Request(str(tmp_path), steps=10**6)):
        if not is_asked and len(life.said) >= words:
            os.kill(life.pid, signal.SIGTERM)
            is_asked = True
    where = f"seed {seed}: {life}"
    assert (life.status, life.errors) == (0, ""), where
    assert newest_saved(tmp_path) == life.newest("completed") == life.newest("saved"), where
    again = lives.undisturbed(Request(str(tmp_path), newest_saved(tmp_path)))
    assert again.newest("loaded") == life.newest("completed"), where
    assert again.errors == ""


@pytest.mark.parametrize("fault", mostly_long(["full", "read-only"], "full"))
def test_a_disk_that_takes_nothing(fault: str, lives: Lives, tmp_path: Path) -> None:
    life = lives.undisturbed(Request(str(tmp_path / "run"), 7, fault))
    assert life.status == 0, life
    assert f"step {FAULT_AT} was not saved; training goes on" in life.errors
    assert {"full": "File too large", "read-only": "Permission denied"}[fault] in life.errors
    saved = {int(line[1]) for line in life.said if line[0] == "saved"}
    assert (saved, life.newest("failed")) == ({2, 6}, FAULT_AT)
    assert sorted(path.name for path in (tmp_path / "run").glob("*step*")) == ["step-2", "step-6"]
    assert newest_saved(tmp_path / "run") == 6
    expected = lives.undisturbed(Request(str(tmp_path / "good"), 7))
    assert finals(life) == finals(expected)
    assert sorted(roundpipe.read_journal(tmp_path / "run")) == list(range(1, 8))
