# SPDX-License-Identifier: Apache-2.0
# Two commands on a fresh machine with Python and make: `make train` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# More for pip, for example an index of CPU-only wheels.
PIP_FLAGS ?=
# More for `shardwise train`, for example `make train TRAIN_FLAGS="--steps 50 --optimizer adamw"`.
TRAIN_FLAGS ?=
# More for pytest, for example `make pytest PYTEST_FLAGS="-x tests/unit"`.
PYTEST_FLAGS ?=
# More for the soak, for example `make soak SOAK_FLAGS="--kills 30 --steps 100"`.
SOAK_FLAGS ?=
# More for the fuzzer, for example `make fuzz FUZZ_FLAGS="--seconds 480 --jobs 7 --seeds 5000:99999"`.
FUZZ_FLAGS ?=
# Test files run at the same time; each worker has ranks of its own. One more than the two cores that
# this is meant for: ranks wait for each other, and runs for the disk and for signals.
WORKERS ?= 3

BIN := $(VENV)/bin
# One thread per rank: two ranks with a pool of threads each fight over the same cores.
export OMP_NUM_THREADS ?= 1
# Modules are compiled once, not by every worker, rank and command that a test starts.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-gpu nightly lint format types contracts pytest docs wheel bench soak fuzz clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train a small GPT on 2 CPU ranks and draw what happened"
	@echo "make test       lint, types, import contracts, tests"
	@echo "make test-gpu   the tests of ranks as NCCL ranks that share one GPU"
	@echo "make nightly    all tests, a minute of random programs, and 1,000 kills during saves"
	@echo "make lint       ruff alone; 'make format' repairs what it can"
	@echo "make docs       the site in build/site, strictly: a broken link is an error"
	@echo "make wheel      wheel and sdist in dist/, and a run of the wheel outside of the repository"
	@echo "make bench      step time and memory beside torch DDP and FSDP2, 2 CPU ranks"
	@echo "make soak       1,000 kills during saves, and a run of 2,000 steps killed again and again"
	@echo "make fuzz       random training programs for a minute, against hand-averaged plain torch"
	@echo "make clean      remove the virtual environment and caches"

# An environment that somebody else made is completed, not replaced. Modules are compiled when they
# are imported: pip would compile all of them on one core, most of them for nobody.
define INSTALL
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) -c constraints.txt -e
endef

# The stamp, not the folder, says that the environment is complete and newer than its description.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(INSTALL) '.[train]'
	touch $@

# The tools, and triton for its interpreter (a large wheel): what training does not need.
$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(INSTALL) '.[dev]'
	touch $(VENV)/.installed $@

train: $(VENV)/.installed
	$(BIN)/shardwise train $(TRAIN_FLAGS)

# What takes seconds comes first; types, on one core, beside the tests.
test: lint contracts
	$(MAKE) --no-print-directory --jobs=2 types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/python -m mypy

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

# What takes long beside what it shows: frameworks, the support matrix, compilers, random kills.
nightly: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory pytest PYTEST_FLAGS="--nightly $(PYTEST_FLAGS)"
	$(MAKE) --no-print-directory fuzz soak

# What runs ranks, on NCCL ranks of one GPU. A part: make test-gpu GPU_TESTS=tests/races
GPU_TESTS ?= tests/races tests/parity tests/comm tests/resume \
	tests/interop/test_fsdp2_contract.py tests/faults/test_nccl_hangs.py
GPU_RESULTS ?= benchmarks/results/nccl-one-gpu.json
# Ranks wait for the GPU and for each other: half as many workers as a large machine has cores.
GPU_WORKERS ?= 8
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(GPU_WORKERS) --dist loadfile --no-loadscope-reorder \
		--device cuda --results $(GPU_RESULTS) $(PYTEST_FLAGS) $(GPU_TESTS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) '.[docs]'
	touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Built, installed into an environment of its own, and run outside of the repository.
wheel: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) build
	rm -rf dist && $(BIN)/python -m build --outdir dist
	$(BIN)/python -m tests.wheel dist

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.fsdp

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.soak $(SOAK_FLAGS)

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz --out build/found $(FUZZ_FLAGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
