# `make demo` and `make test` need nothing but Python >= 3.10 with pip: each sets up .venv by itself.
#
#   make demo    kill a real training four times, resume it, compare bit for bit
#   make test    lint, types, import layers, tests
#   make bench   what a snapshot stalls and costs (BENCH="--params 100m --threads 2" for the large one)
#   make levels  rates of memory, disk, NFS and S3 beside their raw limits, losses at a sudden death (LEVELS="--size-mb 64")
#   make restore seconds from the start of a process to its first step, beside Lightning and DCP (RESTORE="--size 30m")
#   make nodes   rates of one file per node beside one per rank (NODES="--ranks 2 --size-mb 64 --levels local")
#   make scale   cost with many ranks: counted with 2 to 8, simulated up to 16,384 (SCALE="--simulated 8,512")
#   make lint    lint, types, import layers
#   make format  let ruff format the code
#
# PYTHON=…, TORCH=…, VENV=… choose the interpreter, the torch requirement and the place of the environment;
# PYTEST="-k gate -x" is handed to pytest. pip's own variables (PIP_FIND_LINKS, PIP_INDEX_URL, …) are respected.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST ?=
DEMO ?=
BENCH ?= --params small
LEVELS ?=
RESTORE ?=
NODES ?=
SCALE ?=
BIN := $(VENV)/bin
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"}

.PHONY: help demo test lint format bench levels restore nodes scale clean

help:
	@sed -n '2,14s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(BIN)/python examples/kill_and_resume.py $(DEMO)

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/stall.py $(BENCH)

levels: $(VENV)/.dev
	$(BIN)/python benchmarks/levels.py $(LEVELS)

restore: $(VENV)/.dev
	$(BIN)/python benchmarks/restore.py $(RESTORE)

nodes: $(VENV)/.dev
	$(BIN)/python benchmarks/nodes.py $(NODES)

scale: $(VENV)/.dev
	$(BIN)/python benchmarks/scale.py $(SCALE)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# The first Python that is new enough; a machine may have shims that do not start.
# Without ensurepip (Debian without python3-venv) virtualenv makes the environment.
$(VENV)/.made:
	@python=""; \
	for candidate in $${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "no Python >= 3.10 found; name one: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv "$(VENV)" 2>/dev/null || { \
	  "$$python" -m pip install --quiet --target "$(VENV)-bootstrap" virtualenv; \
	  PYTHONPATH="$(VENV)-bootstrap" "$$python" -m virtualenv --quiet "$(VENV)"; \
	  rm -rf "$(VENV)-bootstrap"; }
	$(BIN)/python -m pip install --quiet uv
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	$(UV) "$(TORCH)" -e '.[examples]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(UV) "$(TORCH)" -e '.[dev]'
	@touch $@ $(VENV)/.demo
