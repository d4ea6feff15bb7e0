# make install, make train: that is all a newcomer needs. See CONTRIBUTING.md for the rest.
SHELL := /bin/bash
.NOTPARALLEL:
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE

# Another package index for torch alone, such as https://download.pytorch.org/whl/cpu; empty takes pip's own.
TORCH_INDEX ?=
# The interpreter that makes .venv; empty looks for one.
PYTHON ?=
# More for `make train`, `make bench` and `make bench-checkpoint`, such as ARGS="train.num_steps=60".
ARGS ?=

BIN := .venv/bin
TIMED := scripts/timed
PYTEST := $(BIN)/python -m pytest -m "not campaign and not gpu"

.PHONY: help gpu install train test check format lint types contracts unit reference ranks drills fix lock docs bench bench-checkpoint bench-exact bench-overlap campaign

help:
	@echo "make install   .venv with everything, torch included; says first what it downloads"
	@echo "make train     train a small model on Python's own library; again: resume, or say that it is finished"
	@echo "make test      unit, reference, ranks and drill tests"
	@echo "make check     format, lint, types, contracts, tests: what CI runs"
	@echo "make fix       format and mend what can be mended"
	@echo "make bench     the benchmark against a plain loop"
	@echo "make bench-checkpoint  what saves and loads cost, against bare copies and stock DCP"
	@echo "make bench-exact     what exact sums cost, in CPU time and bytes"
	@echo "make bench-overlap   how much of the reductions hides behind the backward"
	@echo "make campaign  the long fault campaigns"
	@echo "make gpu       the checks that need a GPU"

install:
	@TORCH_INDEX="$(TORCH_INDEX)" PYTHON="$(PYTHON)" scripts/install.sh

train: install
	@$(BIN)/surefoot train examples/quickstart.toml $(ARGS)

test: unit reference ranks drills
	@echo "not run here: GPU checks (make gpu, docs/gpu-checks.md) and campaigns (make campaign)"

check: format lint types contracts test

format: install
	@$(TIMED) static $(BIN)/ruff format --check .

lint: install
	@$(TIMED) static $(BIN)/ruff check .

types: install
	@$(TIMED) static $(BIN)/mypy

# Tests of one process each: two at a time. Ranks and drills keep both cores busy by themselves.
contracts unit: install
	@$(TIMED) $@ $(PYTEST) -n 2 tests/$@

# Against published data, which the project does not ship: skipped aloud where it is not.
reference: install
	@$(TIMED) $@ $(PYTEST) -n 2 tests/$@

ranks drills: install
	@$(TIMED) $@ $(PYTEST) tests/$@

gpu: install
	@scripts/gpu-checks

fix: install
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: install
	@$(BIN)/python -m surefoot.config.reference > docs/config.md
	@$(BIN)/python -m surefoot.plan.textbook > docs/textbook.md

lock: install
	@mkdir -p build
	@{ grep '^#' requirements.lock; $(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+[a-z0-9.]*$$//'; } > build/lock && mv build/lock requirements.lock

bench: install
	@$(BIN)/python benchmarks/overhead.py $(ARGS)

bench-checkpoint: install
	@$(BIN)/python benchmarks/checkpoint.py $(ARGS)

bench-exact: install
	@$(BIN)/python benchmarks/exact.py $(ARGS)

bench-overlap: install
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

campaign: install
	@$(BIN)/python -m pytest -m campaign tests
