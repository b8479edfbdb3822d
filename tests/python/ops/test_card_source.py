"""The kernels' source, compiled for cards without a card: by NVRTC, as packages of PyPI have it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from roundpipe import _core

ENTRIES = (
    "rms_norm",
    "rms_norm_backward",
    "column_sum",
    "rotary",
    "gate",
    "gate_backward",
    "cross_entropy",
    "add_wide",
)
# Of numbers in 4 and 8 bits.
FORMS = ("nf4", "mxfp4", "int4", "int8", "fp8")
ENCODINGS = tuple(f"{way}_{form}" for form in FORMS for way in ("decode", "encode"))
DTYPES = ("bf16", "fp16", "fp32")
# A100, RTX 3090, RTX 4090, H100 and H200, RTX 5090
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
MOST_REGISTERS = 128  # two blocks of 256 threads have room on every one


def library() -> ctypes.CDLL | None:
    """NVRTC, from the folders of the `nvidia` packages."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        for path in sorted(Path(folder).glob("cu*/lib/libnvrtc.so.*")):
            if "builtins" not in path.name:
                return ctypes.CDLL(str(path))
    return None


def compiled(nvrtc: ctypes.CDLL, architecture: str) -> tuple[bool, str]:
    """Whether it compiles, and what the compiler says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = "#define ROUNDPIPE_ON_CARD\n" + _core.card_source()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=false", "--ptxas-options=-v"]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    works = nvrtc.nvrtcCompileProgram(program, len(options), given) == 0
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return works, log.value.decode()


def test_the_source_includes_nothing_and_has_every_kernel() -> None:
    source = _core.card_source()
    assert "#include" not in source
    for name in ENTRIES:
        assert re.search(rf"ROUNDPIPE_KERNEL\({name}_##suffix", source)
    for name in FORMS:
        assert f"ROUNDPIPE_ENCODINGS_OF(suffix, T, {name}," in source
    for name in DTYPES:
        assert f"ROUNDPIPE_KERNELS_OF({name}," in source


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_cards(architecture: str) -> None:
    nvrtc = library()
    if nvrtc is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed; make test-all installs it")
    works, log = compiled(nvrtc, architecture)
    assert works, log
    assert "warning" not in log, log
    names = re.findall(r"Compiling entry function '(\w+)'", log)
    assert sorted(names) == sorted(
        [f"{kernel}_{dtype}" for kernel in (*ENTRIES, *ENCODINGS) for dtype in DTYPES]
        + [f"{kernel}_{dtype}_fp32" for kernel in ENTRIES[:2] for dtype in DTYPES[:2]]
    )
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
    assert spilled and not any(spilled), log
    assert max(int(number) for number in re.findall(r"Used (\d+) registers", log)) <= MOST_REGISTERS, log
