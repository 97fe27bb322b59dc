# Two commands do the main jobs: `make run` and `make test`. Both install what they need into .venv.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: run test slow faults bench lint clean

run: .venv/installed
	$(BIN)/qdt run --preset laptop --out runs/laptop

test: .venv/installed lint
	$(BIN)/pytest -q

slow: .venv/installed
	$(BIN)/pytest -q -m slow

faults: .venv/installed
	$(BIN)/pytest -q -m faults

bench: .venv/installed
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/qdt.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

.venv/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf .venv
