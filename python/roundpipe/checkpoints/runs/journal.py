"""The journal of a run: a synced record of each completed step, with which a resumed run is compared."""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any

from roundpipe import _core


class RunJournal:
    """Records each completed step of a run. A step is completed when its record is on the disk.

    A run that was killed resumes from its newest checkpoint and does the steps after it again. The journal knows what
    they gave, and says so when a step does not reproduce its loss: other data, another version, or a device that
    computes wrongly.

        journal = RunJournal(folder, after_step=loaded.step)
        for step, batch in enumerate(batches, start=loaded.step + 1):
            loss = model.forward_backward(input_kwargs=batch)
            norm = model.step(optimizer, max_grad_norm=1.0)
            journal.record(step, loss=float(loss))

    Args:
        folder: the run's folder, that of `save_checkpoint`.
        after_step: the step that training goes on from; 0 for a new run.

    Attributes:
        replays_until: the last step that the journal knows beyond `after_step`; None if there is none.
        differences: how many recorded values were not reproduced.

    Raises:
        RoundPipeError: another process writes to the folder, or the journal is damaged before its end.
    """

    def __init__(self, folder: str | os.PathLike[str], after_step: int = 0) -> None:
        self._journal = _core.run_folder(os.fspath(folder)).open_journal(after_step)
        if self._journal.notice:
            print(f"[journal] {self._journal.notice}", file=sys.stderr)
        self.replays_until = self._journal.last_recorded()
        self.differences = 0
        if self.replays_until is not None:
            print(
                f"[journal] steps {after_step + 1} to {self.replays_until} were completed before the run ended; they "
                "are done again",
                file=sys.stderr,
            )

    def record(self, step: int, **values: Any) -> bool:
        """Records a completed step, and returns when the record is on the disk.

        Args:
            step: its number.
            **values: what is known of it, such as `loss=float(loss)`, `norm=`, `position=`: numbers, strings, lists and
                dicts of these. Values of a step that is done again are compared, bit for bit.

        Returns:
            Whether the step reproduces what was recorded of it, or nothing was.

        Raises:
            ValueError: a value is of another type.
            RoundPipeError: the record could not be written; the step does not count as completed.
        """
        try:
            text = json.dumps({name: _exact(value) for name, value in values.items()})
        except TypeError as error:
            raise ValueError(
                f"[journal] a value of step {step} cannot be recorded ({error}), expected numbers, strings, lists and "
                "dicts; give float(loss)"
            ) from None
        known = self._journal.recorded(step)
        differs = []
        if known is not None:
            before = json.loads(known)
            ours = json.loads(text)
            differs = [name for name in before if name in ours and before[name] != ours[name]]
            for name in differs:
                print(
                    f"[journal] step {step} does not reproduce its {name}: {values[name]!r}, and before the run ended "
                    f"{_shown(before[name])!r}; look at the data and versions, or run `roundpipe selftest`",
                    file=sys.stderr,
                )
        self.differences += len(differs)
        self._journal.append(step, text)
        return not differs


def _exact(value: Any) -> Any:
    """Floats as their bits, so that NaN equals NaN and nothing is rounded."""
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex(), "about": repr(value)}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    if isinstance(value, dict):
        return {name: _exact(item) for name, item in value.items()}
    return value


def _shown(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"float", "about"}:
        return struct.unpack(">d", bytes.fromhex(value["float"]))[0]
    return value


def read_journal(folder: str | os.PathLike[str], after_step: int = 0) -> dict[int, dict[str, Any]]:
    """Returns the recorded values of the completed steps after `after_step`, by step. Takes no lock."""
    records = _core.read_journal(os.fspath(folder), after_step).records
    return {record.step: {name: _shown(value) for name, value in json.loads(record.text).items()} for record in records}
