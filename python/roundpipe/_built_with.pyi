# Written by CMake beside the extension, see cmake/built_with.py.in.

TORCH: str
PYTHON: str
