# Two commands need nothing but python3 (3.11 or later) and make: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCES := src tests examples patterns benchmarks docs scripts

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format docs build clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(VENV)/.demo: pyproject.toml constraints.txt scripts/install
	PYTHON=$(PYTHON) scripts/install $(VENV) local
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt scripts/install
	PYTHON=$(PYTHON) scripts/install $(VENV) local,dev
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## train the counting example on this machine
	$(BIN)/loops run examples/counting/train.toml

test: $(VENV)/.dev  ## the tests that every change must pass
	$(BIN)/python -m pytest -m "not slow" -n 2

test-all: $(VENV)/.dev  ## every test, whole runs on the embedded engine included
	$(BIN)/python -m pytest

check: $(VENV)/.dev  ## format, lints and types
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/basedpyright --level error

format: $(VENV)/.dev  ## let ruff mend what it can
	$(BIN)/ruff format $(wildcard $(SOURCES))
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))

docs: $(VENV)/.dev  ## write the generated pages
	$(BIN)/python docs/generate.py

build: $(VENV)/.dev  ## an sdist, and a wheel made from it
	rm -rf dist
	$(BIN)/python -m build --installer=uv 2>/dev/null || $(BIN)/python -m build

clean:  ## remove what the targets made, runs excepted
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
