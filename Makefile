# `make demo` and `make test` set up all they need. `make help` lists the rest.

# The Python that .venv is made from, and what its torch is asked for. TORCH=skip: the torch (2.11 and up) that PYTHON
# has, with all that lies beside it, and no package index needed: tools/own_torch.sh.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV_FLAGS ?=
# One for each core, as far as there is memory: a compiler takes up to 2 GB.
JOBS ?= $(shell awk -v cores="$$(getconf _NPROCESSORS_ONLN)" \
  '/^MemAvailable/ { jobs = int($$2 / 2e6); print(jobs < 1 ? 1 : jobs < cores ? jobs : cores) }' /proc/meminfo)
# More arguments for CMake, when a build folder is made: make build CMAKE_FLAGS=-DROUNDPIPE_UNITY=OFF
CMAKE_FLAGS ?=
# More arguments for pytest and ctest: make test PYTEST_FLAGS="-k scaler"
PYTEST_FLAGS ?=
CTEST_FLAGS ?=
DEMO_FLAGS ?=
# The folder of packages that `make bench-gpu` compares with, and more arguments for it
PEER ?=
BENCH_FLAGS ?=
# Processes of tests. Three use two cores well, since many tests wait for other processes; each takes up to 2 GB.
TEST_JOBS ?= $(shell awk '/^MemTotal/ {print ($$2 > 7e6 ? 3 : 2)}' /proc/meminfo)
BUILD ?= build/release

VENV := .venv
BIN := $(VENV)/bin
PIP := tools/pip_install.sh $(BIN)/python
CPP_FILES = $(shell find roundpipe programs python/src tests bench examples -name '*.cpp' -o -name '*.h' 2>/dev/null)
# The programs of .venv, then those that lie beside PYTHON.
TOOLS = env PATH="$(CURDIR)/$(BIN):$$(dirname "$$(command -v $(PYTHON))"):$$PATH"
CMAKE = $(TOOLS) cmake --log-level=WARNING
CONFIGURE = $(CMAKE) -G Ninja -S . -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
  $(if $(CI),-DROUNDPIPE_WARNINGS_AS_ERRORS=ON) $(CMAKE_FLAGS)
NINJA = $(TOOLS) ninja --quiet -j $(JOBS)
# Side by side: some wait most of the time, and some search for plans on one core.
CTEST = $(TOOLS) ctest --output-on-failure --no-tests=error --parallel $(TEST_JOBS) $(CTEST_FLAGS)
# With bytecode, as tests/conftest.py says: pytest imports a lot before it reads that.
RUN_PYTEST = env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$(CURDIR)/build/bytecode" $(BIN)/python -m pytest
PYTEST = $(RUN_PYTEST) -n $(TEST_JOBS) --dist loadfile
# Where a few files take most of the time, so that no process is left alone with one of them.
PYTEST_BALANCED = $(RUN_PYTEST) -n $(TEST_JOBS) --dist worksteal
# $(1): the name of an extra in pyproject.toml; prints what it asks for
extra = $(shell $(PYTHON) tools/extra.py $(1))
EDITABLE := --no-build-isolation --config-settings editable.mode=inplace --config-settings wheel.cmake=false -e .
OWN_TORCH = $(filter skip,$(TORCH))
# $(1): the name of an extra to install
install = $(if $(OWN_TORCH),tools/own_torch.sh install $(VENV),$(PIP)) $(call extra,$(1))
# $(1): number of the step, $(2): what it does
say = @echo "$(if $(STEPS),step $(1) of $(STEPS): )$(2)"

demo: STEPS := 3
test: STEPS := 5

# Two targets must not run ninja in one folder at the same time; ninja itself uses every core.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all setup build build-tests test-cpp test-python test-card test-card-all test-mutants \
  test-silence test-asan test-tsan test-no-torch lint format bench bench-gpu wheel test-wheel install site gallery clean

help:
	@echo 'make demo           proves what it claims, then trains a small language model; no GPU needed'
	@echo 'make test           every test: C++, then Python'
	@echo 'make test-all       the long forms of the tests, other processors, and a wheel in an empty environment'
	@echo 'make setup          the virtual environment in .venv, nothing compiled'
	@echo 'make build          the package, importable in .venv; again after a change to the C++'
	@echo 'make build-tests    compile the C++ tests'
	@echo 'make test-cpp       C++ tests only'
	@echo 'make test-python    Python tests only'
	@echo 'make test-card      a short form of the tests for accelerators, on the test card of docs/extending.md'
	@echo 'make test-card-all  all of them, with delays; make test-all runs it too'
	@echo 'make test-mutants   mistakes planted into the engine, each found by a test on that card. About half an hour'
	@echo 'make test-silence   two thousand random programs of what users do, beside plain PyTorch. About a minute'
	@echo 'make test-asan      C++ tests under AddressSanitizer'
	@echo 'make test-tsan      C++ tests under ThreadSanitizer'
	@echo 'make test-no-torch  C++ tests of the levels that need no torch, built without it'
	@echo 'make wheel          a wheel for this Python and this torch, and a source distribution, in dist/'
	@echo 'make test-wheel     installs that wheel into an empty environment and runs the demo there'
	@echo 'make install PREFIX=DIR  the C++ library, its headers and its CMake package, and roundpipe-train'
	@echo 'make site           the documentation with search, in build/site'
	@echo 'make gallery        draws the pictures of docs/evidence/gallery.md anew'
	@echo 'make lint           ruff, mypy, clang-format, the schemas of .github'
	@echo 'make format         let ruff and clang-format rewrite the sources'
	@echo 'make bench          every benchmark in bench/'
	@echo 'make bench-gpu      nine minutes on an accelerator: checks, tokens a second, long rows, large models, the link,'
	@echo '                    against other systems, PEER=DIR: their packages. Without an accelerator, a small form'
	@echo
	@echo 'With TORCH=skip, each uses the torch of your Python (2.11 and up) and needs no network:'
	@echo '                    make bench-gpu TORCH=skip [PYTHON=python3.12]'
	@echo 'make clean          remove what was built; .venv stays'

demo: build
	$(call say,3,the demo: proofs then training. About 2 minutes on two cores)
	@$(BIN)/roundpipe demo $(DEMO_FLAGS)

test: build test-cpp test-python test-card

# --- Set-up ------------------------------------------------------------------------------------------------------

# Each step leaves a stamp in .venv, so that it runs again only when what it depends on has changed. Modules are not
# compiled beforehand: few of torch's are ever imported.
$(VENV)/.made:
	@tools/need.sh $(PYTHON) $(if $(OWN_TORCH),own-torch)
	$(call say,1,Python packages into .venv. About a minute beside the downloads)
	@$(if $(OWN_TORCH),tools/own_torch.sh make $(VENV) $(PYTHON),$(PYTHON) -m venv $(VENV_FLAGS) $(VENV))
	@touch $@

# torch before the package: `pip install roundpipe-engine` takes any torch that fits, and the newest one is huge.
$(VENV)/.torch: $(VENV)/.made
	@$(if $(OWN_TORCH),$(BIN)/python -c "import torch",$(PIP) $(TORCH))
	@touch $@

# The package is its source folder, python/, on the path; the extension is built into it by `make build`.
$(VENV)/.package: $(VENV)/.torch pyproject.toml
	@$(call install,build)
	@$(if $(OWN_TORCH),tools/own_torch.sh package $(VENV),$(PIP)) $(EDITABLE)
	@touch $@

$(VENV)/.test: $(VENV)/.package
	@$(call install,test)
	@touch $@

# Only NVIDIA's compiler of kernels, 58 MB; it needs no card.
$(VENV)/.card: $(VENV)/.test
	@$(call install,card)
	@touch $@

$(VENV)/.bench: $(VENV)/.package
	@$(call install,bench)
	@touch $@

$(VENV)/.lint: $(VENV)/.package
	@$(call install,lint)
	@touch $@

$(VENV)/.site: $(VENV)/.made
	@$(call install,site)
	@touch $@

setup: $(VENV)/.package

# --- Build -------------------------------------------------------------------------------------------------------

# One build folder serves the extension and the C++ tests. Ninja itself configures again when a CMake file changes.
$(BUILD)/.configured: $(VENV)/.package
	@$(CONFIGURE) -B $(BUILD) -DCMAKE_BUILD_TYPE=Release -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$(CURDIR)/python/roundpipe" \
	  >/dev/null
	@touch $@

build: $(BUILD)/.configured
	@! find roundpipe python/src -newer "$$(ls -t python/roundpipe/_core*.so 2>/dev/null | head -n 1)" 2>&1 | grep -q . || \
	  echo "$(if $(STEPS),step 2 of $(STEPS): )compiling the engine. About 10 minutes on two cores"
	@$(NINJA) -C $(BUILD) _core

$(BUILD)/.with_tests: $(BUILD)/.configured
	@$(CMAKE) -B $(BUILD) -DROUNDPIPE_BUILD_TESTS=ON >/dev/null
	@touch $@

# --- Tests -------------------------------------------------------------------------------------------------------

build-tests: $(BUILD)/.with_tests
	$(call say,3,compiling the C++ tests. About 4 minutes on two cores)
	@$(NINJA) -C $(BUILD)

test-cpp: build-tests
	@$(CTEST) --test-dir $(BUILD)

test-python: build $(VENV)/.test
	$(call say,4,the Python tests. About 9 minutes on two cores)
	@$(PYTEST_BALANCED) $(PYTEST_FLAGS)

# --- The test card -----------------------------------------------------------------------------------------------

# torch finds the card by its folder on the path.
CARD = PYTHONPATH="$(CURDIR)/$(BUILD)/tests/fake_card" ROUNDPIPE_REQUIRE_GPU=1 OMP_NUM_THREADS=1
# Tests of virtual devices that mean something on a card as well: the plugin puts cards in the place of those.
CARD_PYTHON = PYTHONPATH="$(CURDIR)/$(BUILD)/tests/fake_card:$(CURDIR)/tests/fake_card" OMP_NUM_THREADS=1
ON_CARD := $(patsubst %,tests/python/%.py,behaviour/test_equality_layouts behaviour/test_row_mixing \
  behaviour/test_gradient_sums data/test_microbatch following/test_experts huggingface/test_evaluation \
  model/test_wrap_training model/step/test_plain_steps model/step/test_scaler)

test-card: build $(BUILD)/.with_tests $(VENV)/.test
	$(call say,5,the tests for accelerators on the test card. About a minute on two cores)
	@$(NINJA) -C $(BUILD) _fake_card
	@env $(CARD) $(PYTEST_BALANCED) tests/fake_card tests/gpu/test_equality.py tests/gpu/test_faults_and_memory.py \
	  tests/gpu/test_fused_operators.py tests/gpu/test_random_state.py \
	  -k "not virtual and not card-1 and not card-2 and not (cards-2 and (random_state or does_not_grow))" $(PYTEST_FLAGS)

# $(1): seed of the delays, $(2): which cases
define on_card_with_delays
	@echo "== the test card, delays of seed $(1)"
	@env $(CARD) CARD_DELAYS=$(1) $(PYTEST_BALANCED) tests/gpu -k "$(2)" $(PYTEST_FLAGS)
endef

test-card-all: build $(BUILD)/.with_tests $(VENV)/.test
	@$(NINJA) -C $(BUILD) _fake_card
	@echo "== the test card"
	@env $(CARD) $(PYTEST_BALANCED) tests/gpu -k "not virtual and not card-2" $(PYTEST_FLAGS)
	$(call on_card_with_delays,1,card-1 or cards-2)
	$(call on_card_with_delays,2,card-4)
	@echo "== tests of virtual devices, on the test card"
	@env $(CARD_PYTHON) CARD_DELAYS=1 $(PYTEST_BALANCED) -p on_the_card $(ON_CARD) $(PYTEST_FLAGS)

test-mutants: build $(BUILD)/.with_tests $(VENV)/.test
	@$(NINJA) -C $(BUILD) _fake_card
	@$(BIN)/python tests/fake_card/mutants.py --build build/mutants --card $(BUILD)/tests/fake_card

# Tests whose bits come from kernels, which processors and settings choose: every kind of layer and model, dtype and
# optimizer against a plain loop. What only the engine decides (which plan, order or thread, what is refused) is the same
# with any kernels and is left out: a third of the tests take a third of the time.
NUMERIC := $(patsubst %,tests/python/%, \
  $(addprefix behaviour/test_equality_table.py::,test_trains_like_the_loop test_any_plan) \
  behaviour/test_equality_chains.py::test_branches_join \
  behaviour/test_equality_layouts.py::test_bits_are_those_of_the_loop_wherever_stages_are_cut \
  behaviour/test_equality_plans.py::test_compiled_layer behaviour/test_equality_steps.py::test_weights_of_16_bits \
  behaviour/test_lora.py::test_bits_of_peft_alone following/test_experts.py \
  following/test_language_model.py::test_bits_of_the_plain_model following/test_token_loss.py::test_in_chunks \
  $(patsubst %,following/native/test_%.py::test_bits_of_values_and_gradients,decoder_bits native_adapters native_experts) \
  $(addprefix ops/test_functional.py::,test_16_bits_are_no_worse_than_the_plain_head test_native_blocks \
    test_a_chunked_module_is_the_module) \
  ops/test_packed_attention.py::test_packed_rows_equal_transformers \
  $(addprefix optim/test_dropin.py::,test_like_torch test_the_bits_of_torch_but_for_roots) \
  $(addprefix optim/test_fused_steps.py::,test_equals_the_loop_on_any_number_of_devices \
    test_every_algorithm_follows_torch) \
  model/step/test_scaler.py::test_plain_use_has_torchs_bits)
# $(1): settings of the environment, as another processor or another user has them
define in_setting
	@echo "== $(1)"
	@env $(1) $(PYTEST) $(NUMERIC)
endef

# Finds tests that compare the bits of a batch with those of its microbatches, which Intel's AMX has differently.
SHAPE_BITS = env LD_PRELOAD="$(CURDIR)/$(BUILD)/tests/shape_bits/libshape_bits.so"

test-all: build-tests $(VENV)/.card
	@echo "== sweeps that make test leaves out"
	@$(PYTEST_BALANCED) -m "long or hypothesis" --hypothesis-profile=long
	$(call in_setting,ATEN_CPU_CAPABILITY=default)
	$(call in_setting,ATEN_CPU_CAPABILITY=avx2 ROUNDPIPE_OPTIM_ISA=avx2 OMP_NUM_THREADS=2)
	$(call in_setting,ONEDNN_MAX_CPU_ISA=AVX2 ROUNDPIPE_OPTIM_ISA=baseline OMP_NUM_THREADS=4)
	@echo "== the C++ tests, with other kernels"
	@ATEN_CPU_CAPABILITY=default ROUNDPIPE_OPTIM_ISA=baseline $(CTEST) --test-dir $(BUILD) -E '^(core|schedule|simulate|compare|files|tokens)$$'
	@echo "== the C++ tests' random cases that make test leaves out"
	@ROUNDPIPE_LONG_TESTS=1 $(CTEST) --test-dir $(BUILD) -R '^(schedule|simulate|runtime|saving|api)$$'
	@echo "== a processor whose products have bits that depend on their sizes"
	@$(NINJA) -C $(BUILD) shape_bits
	@$(SHAPE_BITS) $(CTEST) --test-dir $(BUILD) -R '^(ops|models|runtime|saving|api|runs)$$'
	@$(SHAPE_BITS) $(PYTEST_BALANCED) tests/python
	@echo "== mutated files, for longer"
	@ROUNDPIPE_FUZZ_SECONDS=15 $(BUILD)/tests/cpp/files_test -tc="fuzz: *"
	@$(MAKE) test-card-all
	$(if $(OWN_TORCH),,@echo "== the documentation as a site" && $(MAKE) site)
	@echo "== a wheel in an empty environment"
	@$(MAKE) test-wheel

# Two thousand random programs of what users do with weights, losses and checkpoints, beside plain PyTorch.
test-silence: build $(VENV)/.test
	@$(PYTEST) tests/python/behaviour/test_silence.py --hypothesis-profile=thousands $(PYTEST_FLAGS)

# $(1): build folder, $(2): CMake options
define test_build
	$(CONFIGURE) -B $(1) -DROUNDPIPE_BUILD_TESTS=ON -DROUNDPIPE_BUILD_PYTHON=OFF $(2)
	$(NINJA) -C $(1)
endef

test-asan: $(VENV)/.package
	$(call test_build,build/asan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DROUNDPIPE_SANITIZER=address)
	ASAN_OPTIONS=detect_leaks=1 $(CTEST) --test-dir build/asan

# libtorch is not instrumented: what happens inside it is left out, and OpenMP stays off.
# Without address space randomisation, since ThreadSanitizer refuses the layouts of some kernels.
test-tsan: $(VENV)/.package
	$(call test_build,build/tsan,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DROUNDPIPE_SANITIZER=thread)
	TSAN_OPTIONS=ignore_noninstrumented_modules=1:second_deadlock_stack=1:suppressions="$(CURDIR)/tests/cpp/tsan.supp" \
	  OMP_NUM_THREADS=1 $(shell setarch -R true 2>/dev/null && echo setarch -R) $(CTEST) --test-dir build/tsan

test-no-torch: $(VENV)/.package
	$(call test_build,build/no-torch,-DROUNDPIPE_WITH_TORCH=OFF)
	$(CTEST) --test-dir build/no-torch

# --- Packages ----------------------------------------------------------------------------------------------------

# The wheel is built from the source distribution, so both are known to be complete.
wheel: $(VENV)/.package
	@$(PIP) $(call extra,wheel)
	@$(BIN)/python tools/make_wheel.py --out dist

test-wheel: wheel
	@tools/test_wheel.sh $(PYTHON) dist build/wheel-environment

install: $(BUILD)/.configured
	$(if $(PREFIX),,$(error name the folder to install into: make install PREFIX=/opt/roundpipe))
	@$(NINJA) -C $(BUILD) roundpipe roundpipe_train
	@$(TOOLS) cmake --install $(BUILD) --prefix "$(PREFIX)" --component cpp

# --- Documentation -----------------------------------------------------------------------------------------------

# Links and anchors that lead nowhere end it. Nothing is imported, so no torch is needed.
site: $(VENV)/.site
	@$(BIN)/python tools/site.py

# The pictures of docs/evidence/gallery.md.
gallery: build
	@$(BIN)/python tools/gallery.py

# --- Everything else ---------------------------------------------------------------------------------------------

lint: $(VENV)/.lint $(BUILD)/.configured
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p roundpipe
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml \
	  .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(TOOLS) $(BIN)/python tools/thread_safety.py $(BUILD)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: build-tests $(VENV)/.bench
	@echo "== bench/transfer.cpp"; $(BUILD)/bench/bench_transfer
	@for program in $(wildcard bench/*.py); do echo "== $$program"; $(BIN)/python $$program || exit 1; done

# What others compile is compiled beside the engine.
bench-gpu: $(VENV)/.bench
	@$(BIN)/python bench/support/prepare_peers.py $(if $(PEER),--peer $(PEER)) & \
	  $(MAKE) --no-print-directory build; built=$$?; wait; exit $$built
	@$(BIN)/python bench/gpu/kit.py $(if $(PEER),--peer $(PEER)) $(BENCH_FLAGS)

clean:
	rm -rf build dist python/roundpipe/_core*.so python/roundpipe/libroundpipe.so* python/roundpipe/_built_with.py
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
