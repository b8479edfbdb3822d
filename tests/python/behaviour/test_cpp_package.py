"""The engine as a C++ library: it is installed, an application finds it and its torch, links it and trains with it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from cpp_projects import PRINTED, ROOT, TORCH, needs_cmake, run
from language_program import make_folder
from token_files import write_tokens

BUILD = ROOT / "build" / "release"
VERSION_HEADER = Path("include", "torch", "headeronly", "version.h")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (BUILD / "CMakeCache.txt").exists(), reason="the package was not built in build/release"),
    needs_cmake,
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def libtorch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch as in libtorch's archives: without Python."""
    folder = tmp_path_factory.mktemp("libtorch")
    for part in ("include", "share"):
        (folder / part).symlink_to(TORCH / part)
    (folder / "lib").mkdir()
    for file in (TORCH / "lib").iterdir():
        if not file.name.startswith("libtorch_python"):
            (folder / "lib" / file.name).symlink_to(file)
    return folder


def configure(prefix: Path, build: Path, *options: str, fails: bool = False) -> str:
    """What CMake says of the application, in one line."""
    command = ["cmake", "-S", ROOT / "tests" / "cpp_package", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"]
    said = run(*command, *options, fails=fails)
    return " ".join(said.split())


def trains(prefix: Path, build: Path, *options: str) -> None:
    configure(prefix, build, *options)
    run("cmake", "--build", build)
    assert run(build / "application") == PRINTED
    loaded = run("ldd", build / "application")
    assert f"{prefix}/" in loaded and "not found" not in loaded
    assert "libpython" not in loaded and "libtorch_python" not in loaded


@pytest.mark.long
def test_an_application_with_a_torch_that_knows_no_python(prefix: Path, libtorch: Path, tmp_path: Path) -> None:
    trains(prefix, tmp_path, f"-DROUNDPIPE_TORCH_DIR={libtorch}")
    assert f"{libtorch}/lib/libtorch_cpu.so" in run("ldd", tmp_path / "application")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((f"-DROUNDPIPE_PYTHON={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug"), id="of a Python"),
        pytest.param((f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-G", "Ninja"), id="by Torch_DIR"),
        pytest.param(("-DCMAKE_BUILD_TYPE=Release",), id="that the library was built with"),
        pytest.param((f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-DTORCH_TOO=before"), id="find_package(Torch) before"),
        pytest.param((f"-DTorch_DIR={TORCH}/share/cmake/Torch", "-DTORCH_TOO=after"), id="find_package(Torch) after"),
    ],
)
@pytest.mark.long
def test_an_application_with_the_torch(options: tuple[str, ...], prefix: Path, tmp_path: Path) -> None:
    if any("TORCH_TOO" in option for option in options) and torch.version.cuda:
        pytest.skip("find_package(Torch) asks for the CUDA toolkit")
    trains(prefix, tmp_path, *options)


def build_with_cmake(source: Path, prefix: Path, libtorch: Path) -> None:
    options = ("-G", "Ninja", "-DCMAKE_CXX_FLAGS_RELEASE=-O0")  # to compile them takes longer than to run them
    run("cmake", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={prefix};{libtorch}", *options)
    run("cmake", "--build", source / "build")


def learns(program: Path, *arguments: str | Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", run(program, *arguments))]
    assert len(losses) > 1 and losses[-1] < losses[0], (program, losses)


@pytest.mark.long
def test_the_examples_run_against_an_installed_copy(prefix: Path, libtorch: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "cpp", tmp_path / "examples")
    build_with_cmake(tmp_path / "examples", prefix, libtorch)
    model, adapter = make_folder(tmp_path / "model", {"model_type": "llama"}), tmp_path / "adapter"
    documents = [[(3 * start + place) % 61 for place in range(20)] for start in range(40)]
    text = write_tokens(tmp_path / "text.tokens", documents, 61)
    learns(tmp_path / "examples/build/lora", model, text, adapter, "60")
    assert (adapter / "adapter_config.json").exists()
    learns(tmp_path / "examples/build/classifier", "40")
    learns(tmp_path / "examples/build/language_model", Path(re.__file__), "40")


@pytest.mark.long
def test_the_page_s_program_runs_against_an_installed_copy(prefix: Path, libtorch: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cpp.md").read_text()
    for language, name in (("cmake", "CMakeLists.txt"), ("cpp", "first.cpp")):
        block = re.search(rf"`{name}`:\n\n```{language}\n(.*?)```", page, re.S)
        assert block is not None
        (tmp_path / name).write_text(block[1])
    build_with_cmake(tmp_path, prefix, libtorch)
    learns(tmp_path / "build/first")


def test_a_python_s_torch_is_found_without_running_torch(prefix: Path, tmp_path: Path) -> None:
    configure(prefix, tmp_path, f"-DROUNDPIPE_PYTHON={sys.executable}", "-G", "Ninja")
    commands = run("ninja", "-C", tmp_path, "-t", "commands", "application")
    assert f"-isystem {TORCH}/include " in commands and f"-Wl,-rpath,{prefix}/lib" in commands


def test_headers_are_complete_and_need_torch_only(prefix: Path) -> None:
    headers = sorted((prefix / "include").rglob("*.h"))
    assert prefix / "include/roundpipe/roundpipe.h" in headers
    # The engine is declared there, and no more: what includes it is built again with each of its changes.
    private = (
        "runtime/pipeline.h",
        "training/model_core.h",
        "device/event.h",
        "files/file_system.h",
        "ops",
        "memory",
    )
    assert not [name for name in private if (prefix / "include/roundpipe" / name).exists()]
    assert len(headers) <= 43
    for header in headers:
        for included in re.findall(r"(?m)^#include <([^>]+/[^>]+)>", header.read_text()):
            if included.startswith("roundpipe/"):
                assert (prefix / "include" / included).exists(), f"{header} includes {included}, which is not there"
            else:
                assert included.split("/")[0] in ("ATen", "c10", "torch", "sys"), f"{header} includes {included}"
                assert "python" not in included, f"{header} includes {included}"


def test_the_library_s_name_has_the_version_of_its_interface(prefix: Path) -> None:
    version = re.search(r'(?m)^version = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert version is not None
    major, minor, _ = version[1].split(".")
    interface = f"libroundpipe.so.{major}" if major != "0" else f"libroundpipe.so.0.{minor}"
    (plain,) = prefix.rglob("libroundpipe.so")
    assert plain.readlink() == Path(interface)
    assert (plain.parent / interface).readlink() == Path(f"libroundpipe.so.{version[1]}")
    assert not plain.resolve().is_symlink()
    assert f"[{interface}]" in run("readelf", "--dynamic", plain)


def test_only_the_engine_s_names_are_exported(prefix: Path) -> None:
    (library,) = prefix.rglob("libroundpipe.so")
    names = [line.split()[-1] for line in run("nm", "--dynamic", "--defined-only", library).splitlines()]
    assert len(names) > 100 and all("9roundpipe" in name for name in names)
    assert sorted(path.name for path in prefix.iterdir()) in (
        ["bin", "include", library.parent.name],
        ["include", library.parent.name],
    )


def test_a_torch_that_does_not_fit_is_refused(prefix: Path, libtorch: Path, tmp_path: Path) -> None:
    def refusal(*options: str) -> str:
        clean = ("-UROUNDPIPE_TORCH_DIR", "-UROUNDPIPE_PYTHON", "-UTorch_DIR")
        said = configure(prefix, tmp_path / "build", *clean, *options, fails=True)
        assert "[RoundPipe] " in said, said
        return said

    other = tmp_path / "other"
    (other / VERSION_HEADER).parent.mkdir(parents=True)
    text = (TORCH / VERSION_HEADER).read_text()
    (other / VERSION_HEADER).write_text(re.sub(r"(VERSION_MINOR) \d+", r"\1 7", text))
    (other / "lib").symlink_to(libtorch / "lib")
    said = refusal(f"-DROUNDPIPE_TORCH_DIR={other}")
    built_with = torch.__version__.split("+")[0]
    assert re.search(rf"with torch {built_with}, and {other} is torch 2\.7\.\d+, expected 2\.\d+\.\*;", said), said

    (other / "lib").unlink()
    (other / "lib").mkdir()
    (other / "lib" / "libtorch_cpu.so").touch()
    (other / "lib" / "libc10.so").write_bytes(b"\0_ZN3c105ErrorC1ESs\0")  # of strings as they were once
    (other / VERSION_HEADER).write_text(text)
    said = refusal(f"-DROUNDPIPE_TORCH_DIR={other}")
    assert f"built with _GLIBCXX_USE_CXX11_ABI=1, and the torch in {other} with 0" in said

    said = refusal(f"-DROUNDPIPE_TORCH_DIR={tmp_path}")
    assert f"ROUNDPIPE_TORCH_DIR is {tmp_path}, expected a folder of torch's" in said
    said = refusal("-DROUNDPIPE_PYTHON=/bin/false")
    assert "/bin/false has no torch; install torch into this Python" in said


def test_a_package_whose_torch_is_gone_says_how_to_name_one(prefix: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved)
    (config,) = moved.rglob("RoundPipeConfig.cmake")
    config.write_text(config.read_text().replace(f'"{TORCH}"', '"/gone"'))
    said = configure(moved, tmp_path / "build", fails=True)
    assert "[RoundPipe] no torch was named; name its folder" in said and "-DROUNDPIPE_PYTHON=..." in said
