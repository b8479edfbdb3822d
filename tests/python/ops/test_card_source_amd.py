"""The kernels' source, compiled for AMD's cards without a card and without ROCm: by clang alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from roundpipe import _core

# MI250, MI300, RX 7900, RX 9070; wavefronts of 64 lanes and of 32
ARCHITECTURES = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
# Two blocks of 256 threads have room on every one.
MOST_REGISTERS = 128
# What hipRTC defines by itself.
PRELUDE = """
#define ROUNDPIPE_ON_CARD
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
struct Number { unsigned x; };
#define threadIdx (Number{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Number{__builtin_amdgcn_workgroup_id_x()})
#define __syncthreads() (__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"), __builtin_amdgcn_s_barrier(), \\
                         __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"))
#define __float_as_uint(x) __builtin_bit_cast(unsigned, x)
#define __uint_as_float(x) __builtin_bit_cast(float, x)
#define sqrtf __builtin_sqrtf
"""
OPTIONS = (
    *("-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib"),
    *("-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Werror", "-S", "-o", "-", "-"),
)


def clang() -> str | None:
    """The newest one with AMD's instructions."""
    for name in ("clang", *(f"clang-{version}" for version in range(30, 17, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        targets = subprocess.run([path, "--print-targets"], capture_output=True, text=True, check=True).stdout
        version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True).stdout
        if "amdgcn" in targets and int(version.split(".")[0]) >= 18:
            return path
    return None


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_amds_cards(architecture: str, tmp_path: Path) -> None:
    compiler = clang()
    if compiler is None:
        pytest.skip("no clang 18 or newer with the target amdgcn; apt-get install clang-19")
    made = subprocess.run(
        [compiler, f"--offload-arch={architecture}", *OPTIONS],
        input=PRELUDE + _core.card_source(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    names = re.findall(r"\.amdhsa_kernel (\w+)", made.stdout)
    assert len(names) == len(set(names)) == 46 and "rms_norm_backward_bf16_fp32" in names

    def numbers(field: str) -> list[int]:
        found = [int(number) for number in re.findall(rf"^ +\.{field}: +(\d+)$", made.stdout, re.MULTILINE)]
        assert len(found) == len(names)
        return found

    assert max(numbers("vgpr_count")) <= MOST_REGISTERS
    for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert not any(numbers(field)), field
