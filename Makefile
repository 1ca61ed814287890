# Two commands: `make train` (a real training job on this machine) and `make test` (lint, types, every test).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  ?= 2.13.0
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name '*.cpp' -o -name '*.h')
STAMP  := $(VENV)/.installed

.PHONY: train test lint types native-test sanitize bench clean

train: $(STAMP)
	@$(BIN)/unbounded train

test: lint types native-test sanitize
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

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
	@native/check release ""

sanitize: $(STAMP)
	@native/check address "address,undefined"
	@native/check thread "thread"

clean:
	rm -rf build dist $(STAMP)
