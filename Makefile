# A virtual environment of its own, and the few commands a day needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
WORKERS ?= 2
SLOW    ?=
# One thread a process: the test workers are the parallelism.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

.PHONY: setup demo test fast test-slow lint format pages docs clean

setup: $(STAMP)

# torch first and pinned: an index that carries the CPU build serves it for this exact version.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Outrider needs Python 3.11 or later: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench,demo,grammar,openvino,retrieval,serve,train,ray]'
	touch $@

demo: setup
	$(BIN)/outrider demo

# Types are checked, in one process, beside the first tests.
test: setup
	$(MAKE) --jobs=2 lint fast

fast: setup
	$(PYTEST)

# All slow tests, or some: make test-slow SLOW="tests/test_bounds.py". What passes is noted, to be committed.
test-slow: setup
	$(PYTEST) -m slow --dist loadscope --durations=10 $(SLOW)
	$(BIN)/python .ci/slow_tests.py --passed $(SLOW)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What is written from the program and from results: methods, commands, tables.
pages: setup
	for script in methods commands results; do $(BIN)/python docs/scripts/$$script.py; done

# The site, strictly, into build/site.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
