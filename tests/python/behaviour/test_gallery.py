"""tools/gallery.py, which draws the pictures of docs/evidence/gallery.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_every_picture_can_be_drawn_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    demo = [sys.executable, "-m", "roundpipe", "demo", "--steps", "4", "--out", str(run)]
    subprocess.run(demo, check=True, capture_output=True)
    command = [sys.executable, "tools/gallery.py", "--quick", "--out", str(tmp_path), "--run", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "evidence" / "gallery.md").read_text()
    for name in ("timeline", "memory", "scaling", "training"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"](../images/{name}.png)" in page
