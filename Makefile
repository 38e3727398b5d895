# `make demo` and `make test` work on a bare machine with Python >= 3.11; each sets up .venv when needed.
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
RUN := OMP_NUM_THREADS=1
PYTEST := $(RUN) $(BIN)/python -m pytest
# Extra arguments, such as: make test ARGS="-k solver --durations=20"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check slow soak clean

help:  ## what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 10

setup: $(STAMP)  ## create or refresh .venv (minutes the first time, nothing when up to date)

$(STAMP): pyproject.toml $(wildcard phyai-*/pyproject.toml) constraints.txt requirements-dev.txt
	@$(PY) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "PhyAI needs Python 3.11 or newer; got %d.%d from \"$(PY)\". Name another one: make PY=python3.12 ..." % v[:2])'
	@test -x $(BIN)/pip || { rm -rf $(VENV); $(PY) -m venv $(VENV); } || { rm -rf $(VENV); \
	  echo "The Python module venv must work; $(PY) -m venv failed. Install it (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV); the first time downloads PyTorch and takes some minutes." >&2
	$(BIN)/pip install -c constraints.txt hatchling editables
	$(BIN)/pip install --no-build-isolation -c constraints.txt -r requirements-dev.txt \
	  -e './phyai-core[plots,ray]' -e './phyai-models-pi[sentencepiece]' -e ./phyai-models-groot -e ./phyai-models-minicpm \
	  -e './phyai-models-cosmos[video]' -e ./phyai-gateway
	@touch $@

demo: $(STAMP)  ## run pi0.5 on its small built-in preset and plot the actions
	@mkdir -p out
	$(BIN)/phyai run --plugin pi05 --plot out/demo.png $(ARGS)

test: $(STAMP)  ## default tests, 2 processes; layering is in make check
	$(PYTEST) -n 2 --ignore=tests/test_layering.py $(ARGS)

check: $(STAMP)  ## format, lint, types, layering, GPU kernels compiled ahead of time
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_layering.py
	$(RUN) $(BIN)/python -m phyai.kernels.aot --rows phyai.models.minicpm_robot.ops.examples

slow: $(STAMP)  ## slow tests: packaging, faults, several ranks
	$(PYTEST) -n 2 -m slow $(ARGS)

soak: $(STAMP)  ## full-size run with random weights, gateway under load; memory and minutes, never part of CI
	$(BIN)/phyai run --plugin pi05 --preset full-random $(ARGS)
	$(RUN) $(BIN)/python -m benchmarks.load --seconds 60
	$(RUN) $(BIN)/python -m benchmarks.load --seconds 30 --overload

clean:  ## remove caches and outputs (.venv stays; remove it by hand)
	rm -rf out build dist phyai-*/dist phyai-*/build .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
