# Every target makes .venv/ first, with plain pip and nothing but the versions of constraints.txt.
# Needs make and Python 3.11 or newer; another Python: make demo PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each call of pip takes the constraints, or it may choose another torch.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# A venv with the control plane's three dependencies and no torch, and what its tests need.
BARE := build/control-plane
BARE_PIP := $(BARE)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

PYTEST := $(BIN)/python -m pytest
# Two workers, each on one thread. tests/gpu is collected nowhere here: on a machine with a GPU, run pytest tests/gpu.
WORKERS := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test check ci soak docs clean lint types layers snippets tests mutants notebooks control-plane

help:
	@echo "make demo    stream an answer of a small real model, then a batch with statistics"
	@echo "make test    the tests, without the slow ones (8 minutes on 2 cores, when nothing else runs)"
	@echo "make check   ruff, pyright, import-linter, the snippets of the documentation"
	@echo "make ci      all that must hold: check, every test, mutants, notebooks (at most 45 minutes)"
	@echo "make soak    20,000 random programs against the control plane, and more of everything (an hour or more)"
	@echo "make docs    the reference of the public names, in build/docs"
	@echo "make notebooks, make control-plane, make mutants    parts of ci: the notebooks run; the tests of the control plane"
	@echo "             where torch is not installed; the tests find planted faults"
	@echo "make clean   remove what these targets made here (the demo model stays in its cache)"

demo: $(VENV)/.demo
	$(BIN)/agentinfer demo

test: $(VENV)/.dev
	@echo "the tests, without the slow ones: 8 minutes on 2 cores when nothing else runs"
	HYPOTHESIS_PROFILE=fast $(PYTEST) $(WORKERS) -m "not slow"

check: lint types layers snippets

# The tests come last, so that the log ends with pytest's closing line.
ci:
	$(MAKE) --no-print-directory check
	$(MAKE) --no-print-directory control-plane
	$(MAKE) --no-print-directory mutants
	$(MAKE) --no-print-directory notebooks
	$(MAKE) --no-print-directory tests

soak: $(VENV)/.dev
	$(BIN)/python tests/soak.py --programs 20000
	HYPOTHESIS_PROFILE=soak $(PYTEST) $(WORKERS) tests/state tests/testing

docs: $(VENV)/.docs
	$(BIN)/python -m pdoc agentinfer --output-directory build/docs

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev
	$(BIN)/pyright --project pyproject.toml

layers: $(VENV)/.dev
	$(BIN)/lint-imports

snippets: $(VENV)/.dev
	$(BIN)/python tools/doc_snippets.py README.md ARCHITECTURE.md docs

# Every test of make test and the slow ones, with more examples.
tests: $(VENV)/.dev
	HYPOTHESIS_PROFILE=ci $(PYTEST) $(WORKERS)

mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants/run.py

notebooks: $(VENV)/.dev
	$(BIN)/python tools/run_notebooks.py notebooks

# The control plane's tests pass where torch is not installed at all.
control-plane: $(BARE)/.ready
	! $(BARE)/bin/python -c "import torch" 2>/dev/null
	HYPOTHESIS_PROFILE=fast $(BARE)/bin/python -m pytest tests/state

# The cache is outside of this folder, and other clones may use it.
clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "the demo model, if it was fetched, is kept: rm -r $${XDG_CACHE_HOME:-$$HOME/.cache}/agentinfer"

define make_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, not {sys.version}: make PYTHON=...")'
	@test -x $(1)/bin/python || { echo "making $(1)"; $(PYTHON) -m venv $(1); }
endef

$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "once: packages into $(VENV)/ (1.2 GB where torch is built for CPUs, else more; some minutes), then the demo model into the cache (93 MB to fetch, 540 MB kept)"
	$(call make_venv,$(VENV))
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(PIP) --editable '.[demo,serve,dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.docs: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(PIP) --editable '.[demo,docs]'
	@touch $@

$(BARE)/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(BARE))
	$(BARE_PIP) attrs numpy rpds-py hypothesis pytest
	$(BARE_PIP) --no-deps --editable .
	@touch $@
