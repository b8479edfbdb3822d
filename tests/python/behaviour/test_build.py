"""The build: what a machine lacks is named first, what `make demo` has compiled stays compiled, and an extension that
does not fit is refused by name."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import roundpipe
from roundpipe import _built_with, compatibility

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.timeout(600)


def configure(folder: Path, path: str, *options: str) -> list[str]:
    """Configures as the Makefile does; returns the commands that make the extension, launchers included."""
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={folder / 'out'}", "-DCMAKE_BUILD_TYPE=Release", *options]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ninja = [str(Path(path, "ninja")), "-C", str(folder), "-t", "commands", "_core"]
    return subprocess.run(ninja, capture_output=True, text=True, check=True).stdout.splitlines()


def compiled(commands: list[str]) -> list[str]:
    return [command for command in commands if " -c " in command]


def link_programs(folder: Path, without: Callable[[Path], bool]) -> str:
    """A PATH of one folder: links to all programs that this one has, but for some."""
    folder.mkdir()
    for place in [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]:
        for program in Path(place).glob("*"):
            link = folder / program.name
            if not without(program) and os.access(program, os.X_OK) and not link.exists():
                link.symlink_to(program.absolute())
    return str(folder)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """Without ccache, whatever the machine has."""
    return link_programs(tmp_path / "tools", lambda program: "ccache" in str(program))


VERSION = "python{}.{}".format(*sys.version_info)
# What a Python without these parts answers.
WITHOUT_PIP = 'import sys\nsys.modules["ensurepip"] = None\n'
WITHOUT_HEADERS = 'import sysconfig\nsysconfig.get_path = lambda name: "/nowhere"\n'


def environment_of(tmp_path: Path, path: str, python_lacks: str = "") -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(python_lacks)
    kept = {name: value for name, value in os.environ.items() if name != "CXX" and not name.startswith("MAKE")}
    return kept | {"PATH": path, "PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("python", "python_lacks", "lacks", "packages"),
    [
        (sys.executable, "", [], ""),
        ("/nowhere/python3", "", ["/nowhere/python3, a Python of at least 3.11"], "python3 python3-venv python3-dev"),
        (sys.executable, WITHOUT_PIP, [f"{sys.executable}'s venv module"], f"{VERSION}-venv"),
        (sys.executable, WITHOUT_HEADERS, [f"{sys.executable}'s C headers (Python.h)"], f"{VERSION}-dev"),
    ],
    ids=["compiler", "Python", "venv", "headers"],
)
def test_what_a_machine_lacks_is_named_before_anything_is_installed(
    python: str, python_lacks: str, lacks: list[str], packages: str, tmp_path: Path
) -> None:
    path = link_programs(tmp_path / "programs", lambda program: "++" in program.name or "clang" in program.name)
    called = tmp_path / "called"
    for name in ("apt-get", "sudo", "pip"):
        program = tmp_path / "programs" / name
        program.unlink(missing_ok=True)
        program.write_text(f"#!/bin/sh\necho {name} >>{called}\n")
        program.chmod(0o755)
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", checkout / "tools")
    shutil.copy(ROOT / "Makefile", checkout)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={python}"], env=environment_of(tmp_path, path, python_lacks), cwd=checkout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    *errors, advice, typed, makes_own = done.stderr.splitlines()
    assert errors == [f"error: this machine lacks {what}" for what in ["a C++20 compiler", *lacks]]
    assert "Debian and Ubuntu" in advice and makes_own.startswith("make: ***")
    sudo = "" if os.geteuid() == 0 else "sudo "
    assert typed.strip() == f"{sudo}apt-get install g++ {packages}".strip()
    assert done.returncode != 0 and done.stdout == ""
    assert not (checkout / ".venv").exists() and not called.exists()


@pytest.mark.parametrize("own_torch", [[], ["own-torch"]], ids=["", "own torch"])
def test_a_machine_that_lacks_nothing_is_told_nothing(own_torch: list[str], tmp_path: Path) -> None:
    environment = environment_of(tmp_path, os.environ["PATH"], WITHOUT_PIP if own_torch else "")
    command = [str(ROOT / "tools" / "need.sh"), sys.executable, *own_torch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_packages_are_installed_with_few_words(tmp_path: Path) -> None:
    wheel = tmp_path / "index" / "large-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("large.bin", bytes(12_000_000))
        archive.writestr("large-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: large\nVersion: 1\n")
        archive.writestr("large-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("large-1.dist-info/RECORD", "")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=wheel.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def install(what: str) -> subprocess.CompletedProcess[str]:
            command = [str(ROOT / "tools" / "pip_install.sh"), sys.executable, "--no-cache-dir", "--no-index", what]
            command += ["--find-links", "/nowhere", "--find-links", f"http://127.0.0.1:{server.server_port}"]
            command += ["--target", str(tmp_path / "installed")]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        done, refused = install("large"), install("not-there")
        server.shutdown()
    # pip warns of /nowhere.
    assert (done.returncode, done.stdout, done.stderr) == (0, "  downloading large-1-py3-none-any.whl (12.0 MB)\n", "")
    assert (tmp_path / "installed" / "large.bin").exists()
    assert refused.returncode != 0 and "No matching distribution found for not-there" in refused.stderr
    assert "/nowhere" in refused.stderr


@pytest.mark.skipif(shutil.which("cmake", path=str(Path(sys.executable).parent)) is None, reason="cmake is not here")
@pytest.mark.long
def test_a_build_folder_keeps_its_commands_when_tests_and_ccache_come(tmp_path: Path, tools: str) -> None:
    build = tmp_path / "build"
    first = configure(build, tools)
    assert len(compiled(first)) > 20 and not any("ccache" in command for command in first)
    ccache = Path(tools, "ccache")
    ccache.write_text('#!/bin/sh\nexec "$@"\n')
    ccache.chmod(0o755)
    assert configure(build, tools, "-DROUNDPIPE_BUILD_TESTS=ON") == first

    # A folder that is new keeps to what it found as well.
    other = configure(tmp_path / "other", tools)
    assert all(str(ccache) in command for command in compiled(other))
    ccache.unlink()
    assert configure(tmp_path / "other", tools) == other


def test_another_torch_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    compatibility.require_fitting_build()
    monkeypatch.setattr(_built_with, "TORCH", "2.7.1+cpu")
    with pytest.raises(ImportError, match=r"built with torch 2\.7\.1\+cpu, and torch .* expected 2\.7\.\*") as refused:
        compatibility.require_fitting_build()
    assert "install the wheel" in str(refused.value)


def test_a_patch_release_of_torch_is_the_same_build(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, *_ = _built_with.TORCH.split("+")[0].split(".")
    monkeypatch.setattr(_built_with, "TORCH", f"{major}.{minor}.99+cu130")
    compatibility.require_fitting_build()


def test_another_python_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_built_with, "PYTHON", "3.9")
    with pytest.raises(ImportError, match=r"built for Python 3\.9, and this is Python 3\."):
        compatibility.require_fitting_build()


@pytest.mark.parametrize("missing", [("_core*.so", "_built_with.py"), ("_core*.so",)], ids=["nothing", "C++ alone"])
def test_a_package_without_its_engine_says_how_to_build_it(missing: tuple[str, ...], tmp_path: Path) -> None:
    package = Path(roundpipe.__file__).parent
    shutil.copytree(package, tmp_path / "roundpipe", ignore=shutil.ignore_patterns(*missing, "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.meta_path = "
         "[f for f in sys.meta_path if 'Inplace' not in type(f).__name__]; import roundpipe"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1 and "the engine has not been built" in done.stderr and "make build" in done.stderr


@pytest.mark.long
def test_an_environment_of_another_python_s_packages_needs_no_package_index(tmp_path: Path) -> None:
    # Its torch is a name, and it has another package of our name.
    theirs, environment = tmp_path / "theirs", tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(theirs)], check=True)
    packages = next((theirs / "lib").glob("python*/site-packages"))
    for name in ("torch", "roundpipe"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("origin = 'theirs'")
    offline = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    offline |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}

    def own_torch(*arguments: str) -> str:
        command = [str(ROOT / "tools" / "own_torch.sh"), *arguments]
        done = subprocess.run(command, env=offline, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    own_torch("make", str(environment), str(theirs / "bin" / "python"))
    noted = own_torch("install", str(environment), "pip", "not-there>=1,<2")
    assert noted == "note: not installed, since no package index has answered: not-there>=1,<2\n"
    assert own_torch("package", str(environment), "-e", str(tmp_path / "nothing")).startswith(
        "note: the package is used"
    )
    code = "import torch, importlib.util as found; print(torch.origin, found.find_spec('roundpipe').origin)"
    python = [str(environment / "bin" / "python"), "-P", "-c", code]
    seen = subprocess.run(python, env=offline, capture_output=True, text=True, check=True).stdout.split()
    assert seen == ["theirs", str(ROOT / "python" / "roundpipe" / "__init__.py")]


def test_the_published_package_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """Both have the folder `roundpipe`; an import takes files of either."""
    packages = tmp_path / "packages"
    (packages / "roundpipe").mkdir(parents=True)
    for name in ("__init__.py", "compatibility.py"):
        shutil.copy(Path(compatibility.__file__).with_name(name), packages / "roundpipe")
    told = packages / "roundpipe-0.1.1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: roundpipe\nVersion: 0.1.1\n")
    program = f"import sys; sys.path.insert(0, {str(packages)!r}); import roundpipe"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False, cwd=tmp_path)
    said = run([sys.executable, "-S", "-c", program]).stderr
    assert "[roundpipe] roundpipe 0.1.1 of PyPI is installed into the same folder as roundpipe-engine" in said
    assert "pip uninstall roundpipe roundpipe-engine" in said
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "roundpipe").mkdir(parents=True)
    told.rename(elsewhere / told.name)
    assert "of PyPI" not in run([sys.executable, "-S", "-c", program]).stderr
    program = f"import sys; sys.path.append({str(elsewhere)!r}); {program}"
    said = run([sys.executable, "-S", "-c", program]).stderr
    assert f"roundpipe 0.1.1 of PyPI is installed as well, in {elsewhere / 'roundpipe'}" in said
