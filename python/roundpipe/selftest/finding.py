"""What a check found, and what all findings say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# In place of a device's name where several worked together.
TOGETHER = "all"


@dataclass(frozen=True)
class Finding:
    """One check of one device.

    Attributes:
        device: its name in the pool; for plain PyTorch, torch's name of it; TOGETHER for all of a kind at once.
        check: "links", "compute" or "training".
        what: what was tried.
        ok: whether the bits were right.
        detail: what was counted, or what differs.
        suspects: the devices that may be wrong, if the check failed. One is certain, as far as the check can tell.
    """

    device: str
    check: str
    what: str
    ok: bool
    detail: str
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What all findings say.

    Attributes:
        wrong: by device, then by check, what was found wrong.
        unclear: checks that failed because of one or more of several devices, none of which is in `wrong`.
    """

    wrong: dict[str, dict[str, list[str]]]
    unclear: list[Finding]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong and not self.unclear


def verdict(findings: Iterable[Finding]) -> Verdict:
    """A check with several suspects counts against those of them that another check has found alone."""
    failed = [finding for finding in findings if not finding.ok]
    certain = {finding.suspects[0] for finding in failed if len(finding.suspects) == 1}
    wrong: dict[str, dict[str, list[str]]] = {}
    for finding in failed:
        check = f"{finding.check} together" if finding.device == TOGETHER else finding.check
        for name in sorted(certain.intersection(finding.suspects)):
            wrong.setdefault(name, {}).setdefault(check, []).append(finding.what)
    return Verdict(wrong, [finding for finding in failed if not certain.intersection(finding.suspects)])


def minority(values: Sequence[int]) -> tuple[int, ...]:
    """The places of the values that differ from the most common one; all places if no value is alone most common."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return ()
    if counts[0][1] == counts[1][1]:
        return tuple(range(len(values)))
    return tuple(place for place, value in enumerate(values) if value != counts[0][0])
