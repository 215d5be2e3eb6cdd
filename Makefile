# Two commands set everything up, with or without a GPU: make demo, make test.
#
#   VENV=.venv    where the environment is made; VENV= uses PYTHON as it is and installs nothing
#   PYTHON        the interpreter to make it from (or to use)
#   TORCH         what to install, for example TORCH=torch==2.12.0
#   EVENTS        an interaction log for the demo: user_id, item_id, timestamp
#   ARCHS         what the wheel is for, for example ARCHS="8.0;9.0a;10.0"

VENV ?= .venv
PYTHON ?= python3
EVENTS ?=
PYTEST_ARGS ?=
FUZZ_ARGS ?=
ARCHS ?=
SHELL := /bin/bash

# With a GPU the release that the figures in benchmarks/results were measured with.
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),torch==2.11.0,torch==2.13.0)
TEST_TOOLS := 'numpy<2.4' pytest pytest-xdist hypothesis matplotlib \
  'setuptools>=77.0.3,<82' wheel ninja
LINT_TOOLS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5
# Python 3.11 or newer.
DOCS_TOOLS := sphinx==9.0.4 myst-nb==1.4.0 myst-parser==5.2.0 furo==2025.12.19

ifeq ($(strip $(VENV)),)
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  READY :=
  LINT_READY :=
  DOCS_READY :=
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  READY := $(VENV)/.ready
  LINT_READY := $(VENV)/.lint-ready
  DOCS_READY := $(VENV)/.docs-ready
endif

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz sanitize mutate readme docs lint format compdb wheel sdist info clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

setup: $(READY) ## Make the environment that the other targets use

$(VENV)/.ready:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install $(TORCH) $(TEST_TOOLS)
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(VENV)/bin/pip install triton==3.6.0
	touch $@

$(VENV)/.lint-ready: $(READY)
	$(VENV)/bin/pip install --quiet $(LINT_TOOLS)
	touch $@

$(VENV)/.docs-ready: $(READY)
	$(VENV)/bin/pip install --quiet $(DOCS_TOOLS)
	touch $@

demo: $(READY) ## Train a ranking model padded and jagged, and compare (EVENTS=file.csv)
	$(PY) examples/demo.py $(if $(EVENTS),--events '$(EVENTS)')

# As many workers as cores and memory allow: tests/conftest.py counts them.
test: $(READY) ## Run the tests; those of the GPU where there is one
	$(PY) -m pytest $(shell $(PY) -c 'import xdist' 2>/dev/null && \
	  echo "-n auto --dist worksteal") $(PYTEST_ARGS)

fuzz: $(READY) ## Judge random calls of every operator for a minute (FUZZ_ARGS='--seconds 300')
	$(PY) -m jagged_cuda.fuzz $(FUZZ_ARGS)

sanitize: $(READY) ## Run every kernel path under compute-sanitizer's four tools
	$(PY) -m tests.tools.sanitize

mutate: $(READY) ## Plant faults in the kernels, one at a time, and see that each is caught
	$(PY) tests/mutations.py
	if nvidia-smi -L >/dev/null 2>&1; then $(PY) tests/mutations.py --device cuda; fi

RESULTS = benchmarks/results/h200

readme: $(READY) ## Make README's tables and figures anew from benchmarks/results
	$(PY) -m benchmarks table $(RESULTS).json --update README.md
	$(PY) -m benchmarks plot $(RESULTS).json --plot $(RESULTS).png --panels time,memory
	$(PY) -m benchmarks plot $(RESULTS).json --plot $(RESULTS)_roofline.png --panels roofline
	$(PY) -m benchmarks plot $(RESULTS).json --plot $(RESULTS)_sweep.png --panels fill,operators

docs: $(DOCS_READY) ## Build the documentation in build/site; any warning is an error
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env \
	  -d build/doctrees docs build/site

SOURCES = $$(git ls-files 'csrc/*.h' 'csrc/*.inl' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' \
  'tests/lanes/*.h' 'tests/lanes/*.cpp')

lint: $(LINT_READY) ## Check format, style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(SOURCES)

format: $(LINT_READY) ## Rewrite the files in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(SOURCES)

compdb: $(READY) ## Write compile_commands.json for editors and clang-tidy
	$(PY) .ci/compdb.py

wheel: $(READY) ## Build the wheel in dist/ (ARCHS="8.0;9.0a;10.0"; by default with PTX)
	rm -rf build/lib build/lib.* build/bdist.*  # not build/temp.*, where ninja keeps its objects
	$(if $(ARCHS),TORCH_CUDA_ARCH_LIST='$(ARCHS)' )$(PY) -c \
	  'import setuptools.build_meta as backend; print(backend.build_wheel("dist"))'

sdist: $(READY) ## Build the source distribution in dist/
	$(PY) -c 'import setuptools.build_meta as backend; print(backend.build_sdist("dist"))'

info: $(READY) ## Print versions, libraries, GPUs and the kernel path of each operator
	$(PY) -m jagged_cuda.info

clean: ## Remove what was built here; the compile cache is ~/.cache/jagged_cuda
	rm -rf build dist *.egg-info compile_commands.json
