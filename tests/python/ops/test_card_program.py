"""The program of a card: compiled by NVRTC as packages of PyPI have it, kept on disk, and read from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundpipe import _core

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are kept, nothing yet."""
    monkeypatch.setenv("ROUNDPIPE_KERNEL_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def program(architecture: str) -> bytes:
    try:
        return _core.card_program(architecture)
    except RuntimeError as error:
        if "libnvrtc.so was not found" in str(error):
            pytest.skip("nvidia-cuda-nvrtc is not installed; make test-all installs it")
        raise


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_it_is_compiled_once(folder: Path, architecture: str) -> None:
    compiled = program(architecture)
    assert compiled.startswith(b"\x7fELF")
    for name in (b"rms_norm_bf16\0", b"add_wide_fp32\0", b"rms_norm_backward_fp16_fp32\0"):
        assert name in compiled
    (kept,) = folder.iterdir()
    before = kept.stat()
    assert program(architecture) == compiled
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # else a new file had replaced it


def test_what_the_compiler_says_is_told(folder: Path) -> None:
    program("sm_90")
    with pytest.raises(RuntimeError, match=r"\[kernels\] NVRTC .* with --gpu-architecture=sm_1: NVRTC_ERROR"):
        _core.card_program("sm_1")
    assert len(list(folder.iterdir())) == 1
