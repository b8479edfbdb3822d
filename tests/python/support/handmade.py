"""Checkpoints made by hand, as roundpipe/files/manifest.h describes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundpipe import _core


def make_step(run: Path, step: int, files: Mapping[str, bytes], nodes: int = 1) -> Path:
    """Writes a complete checkpoint with these files into the folder `run`, as that of several nodes if there are."""
    folder = run / f"step-{step}"
    folder.mkdir(parents=True)
    records = []
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
        records.append({"name": name, "bytes": len(contents), "crc32c": f"{_core.crc32c(contents):08x}"})
    manifest: dict[str, Any] = {
        "format": "roundpipe checkpoint",
        "version": "1.0" if nodes == 1 else "2.0",
        "step": step,
        "writer": {"by": "hand"},
        **({} if nodes == 1 else {"nodes": nodes}),
        "files": records,
    }
    text = json.dumps(manifest, indent=2).removesuffix("\n}")
    (folder / "manifest.json").write_text(f'{text},\n  "manifest_crc32c": "{_core.crc32c(text.encode()):08x}"\n}}\n')
    return folder
