# `make demo` and `make test` make their own environment; both work on a machine with nothing but Python.
PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned, so that a CPU machine gets the build its package index offers for exactly this version.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
# The packages in $(VENV) are installed without bytecode. It must be kept when they are imported, or every command would compile
# PyTorch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo chat test test-operators lint docs sanitize sanitize-short wheel wheels release clean

demo: $(VENV)/.installed
	$(BIN)/selfspec generate --compare --ignore-eos --max-new-tokens 200 </dev/null

chat: $(VENV)/.installed
	$(BIN)/selfspec get smollm2 >/dev/null
	$(BIN)/selfspec chat smollm2 --show-drafts

# The first three are side by side: each has work for one core, and they end at different times.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory -j 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync) lint test-operators sanitize-short
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What our kernels compute is computed once more by PyTorch's operators, as on a machine where they cannot be built.
WITHOUT_KERNELS = tests/kernels/test_choices.py tests/kernels/test_half_precision.py tests/kernels/test_kernel_library.py \
  tests/kernels/test_pool.py $(addprefix tests/engine/test_,deferred_learning.py generator.py memory.py no_rerun.py shadow.py \
  stream.py verification.py)

test-operators: $(VENV)/.installed
	SELFSPEC_NATIVE=0 $(BIN)/python -m pytest -k "not float64 and not captured" $(WITHOUT_KERNELS)

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The documentation as a site in build/site.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# The kernels' tests on a library built to find wrong reads, writes and arithmetic: all of them on every variant, or those of
# memory on one. Says so in a line and goes on where gcc has no sanitizers.
sanitize: $(VENV)/.installed
	$(BIN)/python tests/kernels/sanitized.py

sanitize-short: $(VENV)/.installed
	$(BIN)/python tests/kernels/sanitized.py --short

# The C sources, too: installing the package builds them.
# --no-compile: most files of these packages are never imported. --constraint: a new release of a library is tried when its
# version there is raised, not when somebody happens to run the tests. Tests of SmolLM2 are skipped where it cannot be had.
$(VENV)/.installed: pyproject.toml setup.py tests/constraints.txt $(wildcard layerskip_models/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --constraint tests/constraints.txt --editable ".[dev]"
	-$(BIN)/selfspec get smollm2
	touch $@

# A wheel, installed where there is no compiler and nothing else of this folder. PyTorch and the rest come from $(VENV).
wheel: $(VENV)/.installed
	rm -rf build/wheel && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --no-deps --no-index build/wheel/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  >"$$(build/wheel/env/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	cd build/wheel && env -i PATH=/nowhere HOME=/nowhere SELFSPEC_NATIVE=require \
	  env/bin/python -m selfspec.cli.main generate --max-new-tokens 20 </dev/null

# Wheels for Linux on x86-64 and aarch64 and for macOS on arm64, in build/wheels, checked and run as far as this machine can:
# see docs/releasing.md. Needs qemu-user and libc6-arm64-cross (Debian's names).
wheels: $(VENV)/.release
	$(BIN)/python -m tests.wheels wheels build/wheels

# Everything up to publishing, in dist: all tests, the same wheels, and the commands to publish them.
release: $(VENV)/.release test
	$(BIN)/python -m tests.wheels prepare dist

$(VENV)/.release: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --editable ".[release]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info layerskip_models/kernels/*.so
