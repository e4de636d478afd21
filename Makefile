PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all check format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# torch comes first, at the pinned version, so that no dependency pulls another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -e '.[train,cuda,deepspeed,dev]' -c constraints.txt
	touch $@

demo: $(INSTALLED)  ## the whole way on Sudoku: runs/demo/report.html (again: ARGS=--overwrite)
	$(BIN)/unmask demo $(ARGS)

test: $(INSTALLED)  ## the fast tests
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## the slow tests only
	$(BIN)/python -m pytest -m slow

test-all: test test-slow  ## every test

check: $(INSTALLED)  ## lint, format, types, import order
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_order.py

format: $(INSTALLED)  ## format the code and mend what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
