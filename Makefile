# Everything is set up by the targets themselves: python3 (3.11+) with venv and pip is enough.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# A file of tests stays in one process. Many of them wait: three processes keep two cores busy.
UNIT := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"
ROOT ?= .

.PHONY: help demo serve test unit lint style types test-slow test-console test-docker test-oracles test-kernels bench-cpu bench-vocab soak movielens clean

help:
	@echo "make demo          set up, start a server on this folder, recommend for three users, stop"
	@echo "make serve         serve this folder (ROOT=...) until interrupted"
	@echo "make test          lint, types, import directions, unit tests"
	@echo "make test-slow     the guide's commands, exports of contracts, a package with an operator: a few minutes"
	@echo "make test-oracles  the outside references: transformers (needs more packages, installs them)"
	@echo "make test-kernels  every CUDA kernel compiles for every architecture; no GPU (installs NVRTC)"
	@echo "make test-console  the console in a real browser (needs Chromium); pictures in build/console/"
	@echo "make test-docker   the commands of docker/ in a fresh environment, without Docker"
	@echo "make bench-cpu     Widebeam against transformers and a fair peer on this CPU; writes bench/results/"
	@echo "make soak          long runs: leaks, cancellations, 1,000 cutovers (SOAK_CUTOVERS=60 for fewer)"
	@echo "make movielens     train and evaluate the demo's model"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Widebeam into $(VENV)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Widebeam and the test tools into $(VENV)"
	@$(INSTALL) --editable '.[dev]'
	@touch $(VENV)/.base $@

$(VENV)/.oracles: $(VENV)/.dev
	@echo "installing the outside references into $(VENV)"
	@$(INSTALL) --editable '.[dev,oracles]'
	@touch $@

$(VENV)/.kernels: $(VENV)/.dev
	@echo "installing NVRTC into $(VENV)"
	@$(INSTALL) --editable '.[dev,kernels]'
	@touch $@

demo: $(VENV)/.base
	@$(BIN)/widebeam demo --root $(ROOT)

serve: $(VENV)/.base
	@$(BIN)/widebeam serve --root $(ROOT)

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

lint: style types

unit: $(VENV)/.dev
	$(UNIT)

# Types are checked beside the tests, which leave a core idle now and then; what is found is said at the end.
test: style
	@mkdir -p build
	@$(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	echo '$(UNIT)'; $(UNIT); unit=$$?; \
	wait $$types; types=$$?; echo '$(BIN)/mypy'; cat build/types.txt; \
	test $$unit = 0 && test $$types = 0

test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow --timeout 400

test-oracles: $(VENV)/.oracles
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests/oracles

test-kernels: $(VENV)/.kernels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --timeout 300 tests/kernels tests/ops

test-console: $(VENV)/.dev
	@command -v chromium chromium-browser google-chrome > /dev/null || { echo "Chromium is needed: apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/console --timeout 300

test-docker: $(VENV)/.dev
	$(BIN)/python -m pytest tests/docker --timeout 1200

bench-cpu: $(VENV)/.oracles
	$(BIN)/python -m bench.cpu

bench-vocab: $(VENV)/.base
	$(BIN)/python -m bench.vocab

soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/soak --timeout 7200 -s
	OMP_NUM_THREADS=1 SOAK_TRIALS=1000 $(BIN)/python -m pytest tests/policies/test_choose.py --timeout 7200

movielens: $(VENV)/.base
	$(BIN)/python -m examples.movielens.train

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
