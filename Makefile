# `make demo` shows Penstock, `make test` tests it, `make check` is the everyday command.
# Every target first sets up what it needs, in .venv.
# `make help` lists the rest.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
COMPILED := $(shell find src -name '*.pxd') $(patsubst %.pxd,%.py,$(shell find src -name '*.pxd'))

.PHONY: help setup demo check fast test proof histories lint format bench build clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: .venv/compiled.stamp ## create .venv, install the dependencies, compile the core

.venv/env.stamp: pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11 or newer on the PATH"; exit 1; }
	@echo "== set-up: virtual environment and packages ($(PYTHON))"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@PENSTOCK_PURE=1 $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[console,otel,spark,dev]'
	@touch $@

.venv/compiled.stamp: .venv/env.stamp $(COMPILED)
	@echo "== set-up: compiling the core"
	@$(BIN)/python setup.py --quiet build_ext --inplace --parallel 2 >.venv/build.log 2>&1 \
		|| { cat .venv/build.log; exit 1; }
	@$(BIN)/python -m penstock.build_report
	@touch $@

demo: setup ## kill a broker, then a master of three replicas, under load; run two pipelines on Spark
	@$(BIN)/penstock demo

check: setup ## lint and the fast unit tests: the everyday command
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint fast

fast: setup
	@$(BIN)/python -m tests.run --depth check

test: setup ## all tests, with a few rounds and seeds each (CI runs this)
	@$(BIN)/python -m tests.run --depth ci

proof: setup ## all tests, with the full number of rounds and seeds
	@$(BIN)/python -m tests.run --depth proof

histories: setup ## run 500 histories of failovers with faults (PENSTOCK_DEPTH=ci: 10)
	@PENSTOCK_DEPTH=$${PENSTOCK_DEPTH:-proof} $(BIN)/python -m pytest -q -rP tests/compat/histories

lint: setup ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format the code with ruff
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

bench: setup ## measure Penstock and other brokers for half an hour, and write docs/benchmarks.md
	@$(BIN)/python -m benchmarks peers

build: setup ## build wheel and sdist into dist/
	$(BIN)/python -m build

clean: ## remove everything that was built
	rm -rf .venv build dist src/*.egg-info
	find src \( -name '*.so' -o -name '*.c' \) -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
