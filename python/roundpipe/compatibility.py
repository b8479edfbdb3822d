"""Checks that the extension fits the installed Python and torch. Imports neither of them.

A C++ extension of torch works with the minor version of torch that it was built with, and with one minor version of
Python. With another version, the loader reports only an undefined symbol, or that `roundpipe._core` does not exist.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib import metadata
from pathlib import Path

_INSTALL = (
    "install the wheel that was made for this Python and this torch, or build the package here: "
    "`make build` in its source folder, or `pip install --no-build-isolation --force-reinstall --no-deps` of its source"
)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _installed_torch() -> str | None:
    """None if torch has no metadata, as in some builds from source: then the loader decides."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def package_version() -> str:
    """The version of this package."""
    try:
        return metadata.version("roundpipe-engine")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def _not_built(running: str) -> ImportError:
    return ImportError(
        f"[roundpipe] the engine has not been built in {__file__.rpartition('/')[0]}, expected "
        f"roundpipe._core for Python {running}; {_INSTALL}"
    )


def _refuse_the_other_package() -> None:
    """Raises ImportError if the published package was installed into the folder of this one, warns if into another."""
    try:
        other = metadata.distribution("roundpipe")
    except metadata.PackageNotFoundError:
        return
    here, there = Path(__file__).resolve().parent, Path(str(other.locate_file("roundpipe"))).resolve()
    if there == here:
        raise ImportError(
            f"[roundpipe] roundpipe {other.version} of PyPI is installed into the same folder as roundpipe-engine, "
            "expected one of them, as both are imported by this name; pip uninstall roundpipe roundpipe-engine, then "
            "install the one that you want, and the other in an environment of its own"
        )
    if there.is_dir():
        warnings.warn(
            f"[roundpipe] roundpipe {other.version} of PyPI is installed as well, in {there}; this is "
            f"roundpipe-engine, in {here}, expected one of them in an environment, as both are imported by this name",
            stacklevel=3,
        )


def require_fitting_build() -> None:
    """Raises ImportError if the extension cannot work here; the message gives the found and the expected versions."""
    _refuse_the_other_package()
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        import roundpipe._built_with as built_with
    except ImportError:
        raise _not_built(running) from None
    if running != built_with.PYTHON:
        raise ImportError(
            f"[roundpipe] the engine was built for Python {built_with.PYTHON}, and this is Python {running}; {_INSTALL}"
        )
    if importlib.util.find_spec("roundpipe._core") is None:  # a folder that was configured, and only C++ built there
        raise _not_built(running)
    torch = _installed_torch()
    if torch is not None and _minor(torch) != _minor(built_with.TORCH):
        raise ImportError(
            f"[roundpipe] the engine was built with torch {built_with.TORCH}, and torch {torch} is installed, "
            f"expected {_minor(built_with.TORCH)}.*; {_INSTALL}"
        )
