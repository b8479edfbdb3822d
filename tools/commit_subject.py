"""Checks the message of a commit: a subject with a scope, at most 72 characters, and an empty line before the body.

python tools/commit_subject.py FILE
"""

import re
import sys
from pathlib import Path

LONGEST = 72
# "runtime: retry keeps its loss function"; a scope may be a path or several names: "bench/gpu", "following, docs".
SUBJECT = re.compile(r"[a-z0-9_./-]+(?:, [a-z0-9_./-]+)*: \S")
# What git writes by itself.
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def mistakes(message: str) -> list[str]:
    """What is wrong with a message, in the order of its lines. Lines that begin with # are git's comments."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return []  # git itself refuses it
    subject = lines[0]
    if subject.startswith(MADE_BY_GIT):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, expected at most {LONGEST}")
    if not SUBJECT.match(subject):
        found.append(
            "the subject has no scope, expected 'scope: what changes', as 'runtime: retry keeps its loss function'"
        )
    if len(lines) > 1 and lines[1].strip():
        found.append("the second line is not empty; the body begins on the third")
    return found


def main() -> None:
    found = mistakes(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for mistake in found:
        print(f"[commit] {mistake}", file=sys.stderr)
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
