# Start with `make demo` or `make test`. Each target creates .venv and installs its dependencies; stamp files
# inside .venv make the second run instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
.DEFAULT_GOAL := help
.PHONY: help install demo demo-lm test test-slow test-sglang test-vllm test-clients test-adapters lint format bench docs pictures screenshots clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollgym needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(PIP) -e .
	@touch $@

# torch is pinned to 2.13.0: a looser version may install several GB of CUDA libraries.
$(VENV)/.train: $(VENV)/.installed
	$(PIP) torch==2.13.0 -e '.[train]'
	@touch $@

$(VENV)/.lm: $(VENV)/.train
	$(PIP) torch==2.13.0 -e '.[train,smollm]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	$(PIP) torch==2.13.0 -e '.[dev,docs,adapters,webshop,browser,sandbox,docker,distributed,math,mcp,openenv,parquet,serve,smollm]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	@touch $@

install: $(VENV)/.installed ## Create .venv and install rollgym into it
	@echo "rollgym is installed: try $(BIN)/rollgym envs"

demo: $(VENV)/.train ## Train a small policy on FrozenLake, evaluate it and write a report page
	@$(BIN)/python examples/demo.py

demo-lm: $(VENV)/.lm ## Train SmolLM2 on FrozenLake, evaluate it and write a report page (about 15 minutes)
	@$(BIN)/python examples/demo.py --config smollm-frozen-lake

lint: $(VENV)/.dev ## Run ruff, mypy --strict and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Run lint, then the test suite without slow tests
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.dev ## Run the slow tests
	$(BIN)/python -m pytest -m slow

test-sglang: $(VENV)/.dev ## Test against a real SGLang server on the CPU, in a separate venv (3 GB, 30 min)
	$(BIN)/python tests/engines/sglang/make_venv.py .venv-sglang
	ROLLGYM_TEST_SGLANG=.venv-sglang $(BIN)/python -m pytest -p no:xdist -m "slow or not slow" \
		tests/engines/sglang tests/engines/test_scoring.py tests/engines/test_contract.py tests/engines/test_exported_model.py \
		tests/engines/test_server_training.py

test-vllm: $(VENV)/.dev ## Test against a real vLLM server on the CPU, in a separate venv (4 GB, 20 min)
	$(BIN)/python tests/engines/vllm/make_venv.py .venv-vllm
	ROLLGYM_TEST_VLLM=.venv-vllm $(BIN)/python -m pytest -p no:xdist -m "slow or not slow" \
		tests/engines/vllm tests/engines/test_scoring.py tests/engines/test_contract.py tests/engines/test_exported_model.py \
		tests/engines/test_server_training.py

test-clients: $(VENV)/.dev ## Test the endpoint with real clients, agent frameworks and a CLI agent from npm (850 MB)
	$(BIN)/python tests/serve/clients/make_venv.py .venv-clients
	-$(BIN)/python tests/serve/clients/make_npm.py .npm-clients
	ROLLGYM_TEST_CLIENTS=.venv-clients ROLLGYM_TEST_NPM_CLIENTS=$(if $(shell command -v npm),.npm-clients) \
		$(BIN)/python -m pytest -p no:xdist -rs tests/serve/test_real_clients.py tests/serve/test_npm_client.py tests/serve/test_program_rewards.py \
		tests/serve/test_program_smolagents.py

test-adapters: $(VENV)/.dev ## Test adapters, integrations and trackers with the other libraries, most in separate venvs (3 GB)
	$(BIN)/python tests/adapters/real/make_venvs.py .venv-adapters
	ROLLGYM_TEST_ADAPTERS=.venv-adapters $(BIN)/python -m pytest -p no:xdist -rs -m "slow or not slow" \
		tests/adapters/real tests/adapters/test_reasoning_gym.py tests/adapters/test_textarena.py

format: $(VENV)/.dev ## Format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## Measure env steps per second of the pool and of Gymnasium's vector envs
	$(BIN)/python benchmarks/env_steps.py
	$(BIN)/python benchmarks/pool_steps.py

docs: $(VENV)/.docs ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

screenshots: $(VENV)/.dev ## Regenerate the screenshots of the docs (trains a run first)
	$(BIN)/python docs/images/screenshots.py

pictures: $(VENV)/.train ## Regenerate the figures of the docs
	$(BIN)/python docs/images/make.py

clean: ## Remove .venv, caches and build output (not runs/)
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
