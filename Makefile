# `make demo` and `make test` make their own environment; both work on a machine with nothing but Python.
PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned, so that a CPU machine gets the build its package index offers for exactly this version.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/selfspec generate --compare --ignore-eos --max-new-tokens 200 </dev/null

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The C sources, too: installing the package builds them.
$(VENV)/.installed: pyproject.toml setup.py $(wildcard layerskip_models/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info layerskip_models/kernels/*.so
