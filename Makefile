# `make demo` and `make test` need nothing but Python >= 3.10 with pip: each sets up .venv by itself.
#
#   make demo    kill a real training, resume it, compare bit for bit
#   make test    the quick tier of the tests: two minutes, on two busy cores
#   make test-all  lint, types, import layers, all tests
#   make bench   what a snapshot stalls and costs (BENCH="--params 100m --threads 2" for the large one)
#   make levels  rates of memory, disk, NFS and S3 beside their raw limits (LEVELS="--size-mb 64")
#   make restore seconds from the start of a process to its first step, beside Lightning and DCP (RESTORE="--size 30m")
#   make scale   cost with several ranks, counted with 2, 4 and 8 (SCALE="--counted 2")
#   make gpu     on a machine with CUDA: tests/gpu, blocked time, rates, restores; in the environment of PYTHON=… (GPU="--sizes-gb 1")
#   make oldest  exact resumes with the oldest PyTorch and Lightning that are supported
#   make docs    build the site into docs/_build, warnings are errors
#   make links   follow the links of that site to elsewhere; needs the network
#   make wheel   build the wheel, install it alone into an empty environment, run its demo there
#   make pythons what needs no torch, with every other Python >= 3.10 that is here
#   make lint    lint, types, import layers
#   make format  let ruff format the code
#
# PYTHON=…, TORCH=…, VENV=… choose the interpreter, the torch requirement and the place of the environment;
# PYTEST="-k gate -x" is handed to pytest. pip's own variables (PIP_FIND_LINKS, PIP_INDEX_URL, …) are respected.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Where bytecode is not kept, importing Lightning takes ten seconds, each time.
export PYTHONDONTWRITEBYTECODE :=

VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST ?=
BENCH ?= --params small
LEVELS ?=
RESTORE ?=
SCALE ?=
GPU ?=
BIN := $(VENV)/bin
RUN_TESTS := $(BIN)/python -m pytest --dist loadgroup --durations 25 --durations-min 1
OLDEST_TORCH ?= 2.8.0
OLDEST_LIGHTNING ?= 2.5.0
OLDEST := $(BIN)/uv pip install --quiet --python $(VENV)-oldest/bin/python $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"} \
  -e . lightning==$(OLDEST_LIGHTNING) pytorch-lightning==$(OLDEST_LIGHTNING) numpy torchdata hypothesis safetensors \
  'pytest<9.2' pytest-timeout
WITHOUT_TORCH := tests/core tests/keeper tests/peers tests/levels tests/parity tests/shard tests/test_config.py tests/test_resolver.py \
  tests/snapshots/test_retention.py $(addprefix --ignore ,tests/levels/test_cascade.py tests/levels/test_fsspec.py \
  tests/levels/test_s3.py tests/levels/test_s3_faults.py \
  tests/shard/test_golden.py tests/shard/test_pieces.py tests/shard/test_strides.py)
UV := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"}

.PHONY: help demo test test-all test-failed lint format bench levels restore scale gpu oldest pythons wheel docs links record clean

help:
	@sed -n '2,21s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.demo
	$(BIN)/lazysnap demo

record: $(VENV)/.dev  # the picture in the README, of a run on this machine
	$(BIN)/python docs/record.py docs/demo.svg $(BIN)/lazysnap demo

test: $(VENV)/.dev
	$(RUN_TESTS) --numprocesses 2 --tier quick $(PYTEST)

test-all: lint
	$(RUN_TESTS) --numprocesses 3 --tier full $(PYTEST)

test-failed: $(VENV)/.dev  # what failed last, one after the other
	$(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks stall $(BENCH)

levels: $(VENV)/.dev
	$(BIN)/python -m benchmarks levels $(LEVELS)

restore: $(VENV)/.dev
	$(BIN)/python -m benchmarks restore $(RESTORE)

scale: $(VENV)/.dev
	$(BIN)/python -m benchmarks scale $(SCALE)

gpu:  # no environment is made: torch with CUDA comes with the Python that is named
	"$${PYTHON:-python3}" -m benchmarks gpu $(GPU)

# torch of that version may be had with CUDA only, or not at all: then the one of the main environment is taken.
oldest: $(VENV)/.dev
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-oldest
	{ $(OLDEST) "torch==$(OLDEST_TORCH)" || { echo "torch $(OLDEST_TORCH) cannot be had here"; $(OLDEST) "$(TORCH)"; }; }
	$(VENV)-oldest/bin/python -c 'import torch, lightning; print("torch", torch.__version__, "lightning", lightning.__version__)'
	$(VENV)-oldest/bin/python -m pytest --quiet -W 'ignore:Converting a tensor with requires_grad:UserWarning' \
	  tests/lightning/test_versions.py tests/capture

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build

links: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --builder linkcheck docs docs/_build/links

wheel: $(VENV)/.made
	rm -rf dist
	$(BIN)/uv build --quiet --wheel --out-dir dist
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-wheel
	$(BIN)/uv pip install --quiet --python $(VENV)-wheel/bin/python $${PIP_FIND_LINKS:+--find-links "$$PIP_FIND_LINKS"} \
	  "$(TORCH)" dist/*.whl
	bin="$$PWD/$(VENV)-wheel/bin"; empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT; cd "$$empty"; \
	"$$bin/lazysnap" demo; test -z "$$(ls -A)"

pythons: $(VENV)/.dev
	found=""; for version in 3.10 3.12 3.13 3.14; do \
	  for python in "python$$version" "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version".*/bin/python; do \
	    "$$python" -c '' 2>/dev/null || continue; \
	    found="$$found $$version"; \
	    $(BIN)/uv venv --quiet --clear --python "$$(command -v "$$python")" $(VENV)-other; \
	    $(BIN)/uv pip install --quiet --python $(VENV)-other/bin/python fsspec xxhash rich msgspec numpy pyeclib hypothesis psutil \
	      'pytest<9.2' pytest-timeout pytest-xdist; \
	    PYTHONPATH=. $(VENV)-other/bin/python -m pytest --quiet --tier quick --numprocesses 2 --dist loadgroup $(WITHOUT_TORCH); \
	    break; \
	  done; \
	done; echo "tested without torch:$${found:- nothing, no other Python is here}"

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-other $(VENV)-wheel runs build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

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
	$(UV) "$(TORCH)" -e .
	@touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml
	$(UV) "$(TORCH)" -e '.[docs]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	$(UV) "$(TORCH)" -e '.[dev]'
	@touch $@ $(VENV)/.demo
