# Two commands matter: `make demo` and `make test`. Both set everything up first, in .venv.
# `make help` lists the rest.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
KERNEL := $(shell find src -name '*.pxd') $(patsubst %.pxd,%.py,$(shell find src -name '*.pxd'))

.PHONY: help setup demo test proof lint format bench build clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: .venv/kernel.stamp ## make .venv, install everything, compile the kernel

.venv/env.stamp: pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer on the PATH"; exit 1; }
	@echo "== set-up: virtual environment and packages ($(PYTHON))"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@PENSTOCK_PURE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[spark,dev]'
	@touch $@

.venv/kernel.stamp: .venv/env.stamp $(KERNEL)
	@echo "== set-up: compiling the kernel"
	@$(BIN)/python setup.py --quiet build_ext --inplace --parallel 2 >.venv/build.log 2>&1 \
		|| { cat .venv/build.log; exit 1; }
	@$(BIN)/python -m penstock.build_report
	@touch $@

demo: setup ## a million messages and a killed broker; then registrations with a spike, on Spark
	@$(BIN)/penstock demo

test: setup ## all tests, a few rounds and seeds of each (what CI runs)
	@$(BIN)/python -m tests.run --depth ci

proof: setup ## the full counts of the issues' proofs
	@$(BIN)/python -m tests.run --depth proof

lint: setup ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff format the code
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

bench: setup ## the speed claims, side by side
	@$(BIN)/python -m benchmarks

build: setup ## wheel and sdist into dist/
	$(BIN)/python -m build

clean: ## remove everything that was made
	rm -rf .venv build dist src/*.egg-info
	find src \( -name '*.so' -o -name '*.c' \) -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
