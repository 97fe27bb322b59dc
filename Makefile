# Two commands do the main jobs: `make run` and `make test`. Both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test slow faults lessons notebooks jupyter grade bench lint clean

run: .venv/installed
	$(BIN)/qdt run --preset laptop --out runs/laptop

test: .venv/installed lint
	$(BIN)/pytest -q

slow: .venv/installed
	$(BIN)/pytest -q -m slow

faults: .venv/installed
	$(BIN)/pytest -q -m faults

# The course: all lessons and all solutions, with their asserts.
lessons: .venv/installed
	$(BIN)/pytest -q -m lessons

# Executes the lessons again, as notebooks with pictures.
notebooks: .venv/lessons
	$(BIN)/python lessons/execute.py

# Opens lesson 1. Jupyter refuses to run as root, as in a container, without OPTIONS=--allow-root.
jupyter: .venv/lessons
	$(BIN)/jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/lessons/1_luck.ipynb $(OPTIONS)

# What is right, wrong or missing; EXERCISE="spread dispersion" for some of them.
grade: .venv/installed
	$(BIN)/python exercises/grade.py $(EXERCISE)

bench: .venv/installed
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/qdt.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

.venv/installed: pyproject.toml requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "This needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

.venv/lessons: .venv/installed
	$(BIN)/pip install --quiet --editable ".[lessons]"
	touch $@

clean:
	rm -rf .venv
