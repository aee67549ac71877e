# The default target lists the others; each sets up what it needs by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# Of 14,000 files the few hundred that are imported are compiled, when they are: once, not by each of
# the processes that tests start, also where no bytecode is wanted beside the sources.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/bytecode
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# What is installed; with docs for `make site`, which otherwise asks pip once more.
EXTRAS ?= dev

PEERS := .venv-peers

# Rounds that a benchmark counts; about a quarter of a minute each beside the peers.
ROUNDS ?= 10

# Cases a fuzz target tries, the targets side by side; half an hour or so on idle cores.
CASES ?= 10000

# Kills at random instants.
KILLS ?= 200

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint tables docs site dist pictures screenshots bench bench-peers format clean fuzz kills

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create the environment in .venv and install the project into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fedproto needs Python 3.11 or newer; name one with: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@ $(if $(findstring docs,$(EXTRAS)),$(DOCS_STAMP))

demo: $(STAMP) ## FedProto beside four kinds of averaging on real digits: a table, figures, a report
	$(BIN)/fedproto sweep demo --out runs/demo --reuse --quiet
	$(BIN)/fedproto compare runs/demo --target 0.75 --plots runs/demo/figures
	$(BIN)/fedproto analyse runs/demo/*-seed0 --what embedding
	$(BIN)/fedproto report runs/demo --target 0.75
	@echo
	@echo "Open runs/demo/report.html in a browser."
	@echo "Look into runs/demo: one folder a run (run.json, rounds.jsonl, checkpoints), figures in figures."
	@echo "Try next:"
	@echo "  $(BIN)/fedproto run quickstart --set strategy.name=fedavg"
	@echo "  $(BIN)/fedproto sweep digits --set schedule.delta=0.8"
	@echo "  $(BIN)/fedproto list"

test: lint ## linter, strict type checker and the tests that take minutes
	$(BIN)/python -m pytest -n 2 -q -m "not slow"

test-slow: $(STAMP) ## the other tests: deployments, reproduction, kills at every write, archives, parity
	$(BIN)/python -m pytest -n 4 -q -m slow  # deployments mostly wait

tables: $(STAMP) ## every published table of scores, from the archives in results/runs
	$(BIN)/python -m paper.pages

GPU_TESTS := test_stacking_kernels test_stacked_engine

test-gpu: $(STAMP) ## kernels and engines on a CUDA device; fails without one
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device here")'
	$(BIN)/python -m pytest -q $(GPU_TESTS:%=tests/engines/%.py)

fuzz: $(STAMP) ## damaged recipes, run directories, data files, archives and messages, CASES each
	FEDPROTO_FUZZ=$(CASES) $(BIN)/python -m pytest -q -n auto --timeout 14400 tests/*/test_fuzz*.py

kills: $(STAMP) ## runs killed at KILLS random instants with everything switched on, then compared
	FEDPROTO_KILLS=$(KILLS) $(BIN)/python -m pytest -q -s -n 0 tests/store/test_kill_and_resume.py -k random

lint: $(STAMP) ## linter, formatter check and type checker alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: site ## the docs site in build/docs; a broken link or a wrong docstring is an error
	$(BIN)/python -m pytest -n 2 -q tests/docs/test_docs_site.py
	@echo "Open build/docs/index.html"

site: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) -e '.[dev,docs]'
	@touch $@

dist: ## sdist and wheel in dist, their metadata and contents checked
	rm -rf dist build/dist-venv
	$(PYTHON) -m venv build/dist-venv
	build/dist-venv/bin/python -m pip install --quiet --disable-pip-version-check build twine
	build/dist-venv/bin/python -m build
	build/dist-venv/bin/python -m twine check --strict dist/*
	build/dist-venv/bin/python tests/smoke_install.py --contents dist/*.whl

pictures: $(STAMP) ## draw the pictures of docs/explanation/round.md anew
	$(BIN)/python docs/tools/pictures.py docs/images

screenshots: $(STAMP) ## the report page at 1440 and 390 px, light, dark, printed; and the docs' pictures of it
	$(BIN)/python docs/tools/screenshots.py docs/images
	$(BIN)/python docs/tools/screenshots.py --all build/screenshots

bench: $(STAMP) ## speed and memory beside plain PyTorch loops, and how cost grows
	$(BIN)/python benchmarks/cpu.py --rounds $(ROUNDS) --growth --out runs/bench/cpu.json

bench-peers: $(STAMP) $(PEERS)/.flower $(PEERS)/.pfl ## the same work through Flower and pfl-research
	$(BIN)/python benchmarks/cpu.py --models cnn --engines processes --rounds $(ROUNDS) \
	  --out runs/bench/peers.json --flower $(PEERS)/flower/bin/python --pfl $(PEERS)/pfl/bin/python

$(PEERS)/.flower:
	$(PYTHON) -m venv $(PEERS)/flower
	$(PEERS)/flower/bin/python -m pip install --quiet 'flwr[simulation]==1.41.0' torch==2.13.0
	@touch $@

$(PEERS)/.pfl:
	$(PYTHON) -m venv $(PEERS)/pfl
	$(PEERS)/pfl/bin/python -m pip install --quiet pfl==0.6.0 torch==2.13.0
	@touch $@

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, runs and caches
	rm -rf $(VENV) $(PEERS) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
