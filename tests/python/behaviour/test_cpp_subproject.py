"""The engine as a part of another project's build: by FetchContent, and by add_subdirectory."""

from __future__ import annotations

import re
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from cpp_projects import PRINTED, ROOT, TORCH, needs_cmake, run

pytestmark = [pytest.mark.timeout(600), needs_cmake]

SOURCE = ROOT / "tests" / "cpp_subproject"
# What RoundPipe's build reads, but for tests, programs and Python.
PARTS = ("CMakeLists.txt", "pyproject.toml", "cmake", "roundpipe", "third_party")


def configure(build: Path, *options: str, roundpipe: Path | str = ROOT, fails: bool = False) -> str:
    """What CMake says of the application, in one line."""
    command = ("cmake", "-G", "Ninja", "-S", SOURCE, "-B", build, f"-DROUNDPIPE={roundpipe}")
    return " ".join(run(*command, *options, fails=fails).split())


def commands(build: Path) -> list[str]:
    """Those of the build that is made without a target's name."""
    return run("ninja", "-C", build, "-t", "commands", "all").splitlines()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-DBY=FetchContent", f"-DROUNDPIPE_PYTHON={sys.executable}"), id="FetchContent"),
        pytest.param(
            ("-DBY=add_subdirectory", f"-DROUNDPIPE_TORCH_DIR={TORCH}"), id="add_subdirectory", marks=pytest.mark.long
        ),
        pytest.param(
            ("-DBY=FetchContent", f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-DTORCH_TOO=before"),
            id="find_package(Torch) before",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("-DBY=FetchContent", f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-DTORCH_TOO=after"),
            id="find_package(Torch) after",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_library_alone_is_built_and_settings_stay_apart(options: tuple[str, ...], tmp_path: Path) -> None:
    if any("TORCH_TOO" in option for option in options) and torch.version.cuda:
        pytest.skip("find_package(Torch) asks for the CUDA toolkit")
    configure(tmp_path, *options)  # which fails if RoundPipe has changed a setting, or made other targets than its own
    made = commands(tmp_path)
    others = re.compile(rf" -c {ROOT}/(tests/cpp/|programs|python|bench|roundpipe/compare)")
    assert not [line for line in made if others.search(line)]
    assert sum("-soname,libroundpipe.so." in line for line in made) == 1

    of_engine = [line for line in made if f" -c {ROOT}/roundpipe/" in line]
    assert len(of_engine) > 20
    for line in of_engine:
        assert " -fvisibility=default" in line and " -fvisibility=hidden" not in line and " -std=c++20" in line, line
        assert line.rindex(" -Wno-error") > line.rindex(" -Werror") and " -O3" in line, line
    (of_core,) = [line for line in made if " -o CMakeFiles/core.dir/" in line]
    assert " -Werror" in of_core and " -std=gnu++2" in of_core and " -fvisibility=hidden" in of_core
    assert " -Wno-" not in of_core and "ccache" not in of_core and " -fno-semantic-interposition" not in of_core
    assert f" -isystem {ROOT} " in of_core and f" -isystem {TORCH}/include " in of_core


def test_another_torch_than_the_application_s_is_refused(tmp_path: Path) -> None:
    if torch.version.cuda:
        pytest.skip("find_package(Torch) asks for the CUDA toolkit")
    other = tmp_path / "other"
    (other / "lib").mkdir(parents=True)
    (other / "include").symlink_to(TORCH / "include")
    for name in ("libc10.so", "libtorch_cpu.so"):
        (other / "lib" / name).write_bytes((TORCH / "lib" / "libc10.so").read_bytes())
    options = (f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-DTORCH_TOO=before", f"-DROUNDPIPE_TORCH_DIR={other}")
    said = configure(tmp_path / "build", *options, fails=True)
    assert (
        f"[build] find_package(Torch) has found {TORCH}/lib/libtorch_cpu.so, and RoundPipe was to use {other}" in said
    )


def test_the_page_s_lines(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cpp.md").read_text()
    (block,) = re.findall(r"```cmake\n(cmake_minimum_required[^`]*FetchContent_Declare[^`]*)```", page)
    (tmp_path / "CMakeLists.txt").write_text(block.replace("/path/to/roundpipe", str(ROOT)))
    (tmp_path / "first.cpp").touch()
    run("cmake", "-G", "Ninja", "-S", tmp_path, "-B", tmp_path / "build", f"-DROUNDPIPE_TORCH_DIR={TORCH}")
    assert "libroundpipe.so" in commands(tmp_path / "build")[-1]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_archive_is_built_with_the_application(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "roundpipe.tar.gz", "w:gz", compresslevel=1) as archive:
        for part in PARTS:
            archive.add(ROOT / part, f"roundpipe/{part}")
    # To compile them takes longer than to run them.
    options = (f"-DROUNDPIPE_TORCH_DIR={TORCH}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")
    configure(tmp_path / "build", *options, roundpipe=f"file://{tmp_path}/roundpipe.tar.gz")
    run("cmake", "--build", tmp_path / "build")
    assert run(tmp_path / "build" / "application") == PRINTED
    run("cmake", "--install", tmp_path / "build", "--prefix", tmp_path / "installed")
    installed = [path.relative_to(tmp_path / "installed") for path in (tmp_path / "installed").rglob("*.*")]
    assert not installed and (tmp_path / "installed" / "bin" / "application").exists()
