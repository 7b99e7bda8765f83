# Two commands do everything: `make demo` and `make test`. Each target makes .venv and installs what it
# needs; stamps inside .venv make the second run instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-sglang lint format bench docs pictures screenshots clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollgym needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(PIP) -e .
	@touch $@

# torch==2.13.0 by name: anything looser may bring several GB of CUDA with it.
$(VENV)/.train: $(VENV)/.installed
	$(PIP) torch==2.13.0 -e '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) torch==2.13.0 -e '.[dev,docs,webshop,browser,sandbox,docker,distributed,serve,smollm]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

install: $(VENV)/.installed ## Make .venv with rollgym in it
	@echo "rollgym is installed: try $(BIN)/rollgym envs"

demo: $(VENV)/.train ## Train a small policy on FrozenLake, show that it learned, leave a report page
	@$(BIN)/python examples/demo.py

lint: $(VENV)/.dev ## ruff, mypy --strict and the import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Lint, then the test suite (slow tests in their small form)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.dev ## The slow tests, in full
	$(BIN)/python -m pytest -m slow

test-sglang: $(VENV)/.dev ## Against a real SGLang server on this CPU, in a venv of its own (3 GB, half an hour)
	$(BIN)/python tests/engines/sglang/make_venv.py .venv-sglang
	ROLLGYM_TEST_SGLANG=.venv-sglang $(BIN)/python -m pytest -p no:xdist -m "slow or not slow" tests/engines/sglang

format: $(VENV)/.dev ## Rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## Env steps per second of our pool against gymnasium's vector envs
	$(BIN)/python benchmarks/env_steps.py
	$(BIN)/python benchmarks/pool_steps.py

docs: $(VENV)/.docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

screenshots: $(VENV)/.dev ## Make the screenshots of the docs anew (trains a run first)
	$(BIN)/python docs/images/screenshots.py

pictures: $(VENV)/.train ## Make the pictures of the docs anew
	$(BIN)/python docs/images/make.py

clean: ## Remove .venv, caches and built files (not runs/)
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
