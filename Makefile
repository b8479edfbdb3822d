# `make demo` and `make test` set up all they need. `make help` lists the rest.

# The Python that .venv is made from, and what its torch is asked for. Your own torch (2.11 and up) instead:
#   make setup TORCH=skip VENV_FLAGS=--system-site-packages
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV_FLAGS ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# More arguments for pytest and ctest: make test PYTEST_FLAGS="-k scaler"
PYTEST_FLAGS ?=
CTEST_FLAGS ?=
DEMO_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
CPP_FILES = $(shell find roundpipe python/src tests bench examples -name '*.cpp' -o -name '*.h' 2>/dev/null)
CONFIGURE = $(BIN)/cmake -G Ninja -S . -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
  -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" $(if $(CI),-DROUNDPIPE_WARNINGS_AS_ERRORS=ON)
NINJA = $(BIN)/ninja -j $(JOBS)
CTEST = $(BIN)/ctest --output-on-failure --no-tests=error $(CTEST_FLAGS)

# Two targets must not run ninja in one folder at the same time; ninja itself uses every core.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test setup build test-cpp test-python test-asan test-tsan test-no-torch lint format bench clean

help:
	@echo 'make demo           train a small language model on your text, no GPU needed'
	@echo 'make test           every test: C++, then Python'
	@echo 'make setup          the virtual environment in .venv, nothing compiled'
	@echo 'make build          the package, importable in .venv; again after a change to the C++'
	@echo 'make test-cpp       C++ tests only'
	@echo 'make test-python    Python tests only'
	@echo 'make test-asan      C++ tests under AddressSanitizer'
	@echo 'make test-tsan      C++ tests under ThreadSanitizer'
	@echo 'make test-no-torch  C++ tests of the levels that need no torch, built without it'
	@echo 'make lint           ruff, mypy, clang-format'
	@echo 'make format         let ruff and clang-format rewrite the sources'
	@echo 'make bench          every benchmark in bench/'
	@echo 'make clean          remove what was built; .venv stays'

demo: build
	$(BIN)/roundpipe demo $(DEMO_FLAGS)

test: build test-cpp
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# --- Set-up ------------------------------------------------------------------------------------------------------

# Each step leaves a stamp in .venv, so that it runs again only when what it depends on has changed.
$(VENV)/.made:
	tools/need.sh python $(PYTHON)
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@touch $@

# torch before the package: `pip install roundpipe` takes any torch that fits, and the newest one is huge.
$(VENV)/.torch: $(VENV)/.made
	$(if $(filter skip,$(TORCH)),$(BIN)/python -c "import torch",$(BIN)/python -m pip install --quiet $(TORCH))
	@touch $@

# The package is its source folder, python/, on the path; the extension is built into it by `make build`.
$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.11,<2'
	$(BIN)/python -m pip install --quiet --no-build-isolation -C editable.mode=inplace -C wheel.cmake=false -e '.[dev]'
	@touch $@

setup: $(VENV)/.package

# --- Build -------------------------------------------------------------------------------------------------------

# One build folder serves the extension and the C++ tests. Ninja itself configures again when a CMake file changes.
build/release/.configured: $(VENV)/.package
	$(CONFIGURE) -B build/release -DCMAKE_BUILD_TYPE=Release -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$(CURDIR)/python/roundpipe"
	@touch $@

build: build/release/.configured
	$(NINJA) -C build/release _core

build/release/.with_tests: build/release/.configured
	tools/need.sh doctest
	$(BIN)/cmake -B build/release -DROUNDPIPE_BUILD_TESTS=ON
	@touch $@

# --- Tests -------------------------------------------------------------------------------------------------------

test-cpp: build/release/.with_tests
	$(NINJA) -C build/release
	$(CTEST) --test-dir build/release

test-python: build
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# $(1): build folder, $(2): CMake options
define test_build
	tools/need.sh doctest
	$(CONFIGURE) -B $(1) -DROUNDPIPE_BUILD_TESTS=ON -DROUNDPIPE_BUILD_PYTHON=OFF $(2)
	$(NINJA) -C $(1)
endef

test-asan: $(VENV)/.package
	$(call test_build,build/asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DROUNDPIPE_SANITIZER=address)
	ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=suppressions="$(CURDIR)/tests/cpp/lsan.supp":print_suppressions=0 \
	  $(CTEST) --test-dir build/asan

# libtorch is not instrumented: what happens inside it is left out, and OpenMP stays off.
# Without address space randomisation, since ThreadSanitizer refuses the layouts of some kernels.
test-tsan: $(VENV)/.package
	$(call test_build,build/tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DROUNDPIPE_SANITIZER=thread)
	TSAN_OPTIONS=ignore_noninstrumented_modules=1:second_deadlock_stack=1:suppressions="$(CURDIR)/tests/cpp/tsan.supp" \
	  OMP_NUM_THREADS=1 $(shell setarch -R true 2>/dev/null && echo setarch -R) $(CTEST) --test-dir build/tsan

test-no-torch: $(VENV)/.package
	$(call test_build,build/no-torch,-DROUNDPIPE_WITH_TORCH=OFF)
	$(CTEST) --test-dir build/no-torch

# --- Everything else ---------------------------------------------------------------------------------------------

lint: $(VENV)/.package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p roundpipe
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.package
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: build build/release/.with_tests
	$(NINJA) -C build/release bench_transfer
	@echo "== bench/transfer.cpp"; build/release/bench/bench_transfer
	@for program in $(wildcard bench/*.py); do echo "== $$program"; $(BIN)/python $$program || exit 1; done

clean:
	rm -rf build python/roundpipe/_core*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
