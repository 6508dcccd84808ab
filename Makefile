# Everything runs in the project's own virtual environment, .venv, which the first target that needs it makes.
# On a machine without torch and without a GPU, PIP_EXTRA_INDEX_URL with the address of PyTorch's CPU builds gives pip
# the small CPU build of torch.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
LAUNCHERS := $(VENV)/launchers/.set-up
FRAMEWORKS := $(VENV)/.frameworks
# The site of the documentation has an environment of its own (170 MB), which needs neither torch nor rannd.
SITE := .venv-docs
PEERS := .peers/.set-up
# The version of torch that VENV is made with; empty: what PYTHON has, or that of constraints.txt.
PIN :=

# What test-torch runs: the newest torch that was tried, in a folder of environments (5 GB each), and the tests in which
# torch matters.
TORCH ?= 2.15.0
TORCH_ENVS ?= .torch
TESTS ?= tests/test_torch_versions.py tests/e2e tests/parity tests/runtime tests/profile tests/graph tests/plan

# What test-soak runs: so many jobs, so many of them at a time; the seed says which are hit, by what and when.
SOAK_JOBS ?= 200
SOAK_AT_ONCE ?= 4
SOAK_SEED ?= 0

# What gpu runs: parts of bench/gpu.py (empty: all), the device, the folder for its results. With the packages that
# gpu-wheels has fetched it needs no package index, and uses the torch of PYTHON, else the virtual environment.
PARTS ?=
# What bench runs: names that `python bench/all.py --list` shows (empty: all).
RUNS ?=
DEVICE ?= auto
OUT ?= .gpu/results
GPU_PYTHON ?= python3.12
GPU_WHEELS := $(wildcard .gpu/wheels/*)
GPU_STAMP := $(if $(GPU_WHEELS),.gpu/venv/.set-up,$(STAMP))
GPU_PY := $(if $(GPU_WHEELS),.gpu/venv/bin/python,$(PY))

.PHONY: help setup demo test test-long test-full test-torch test-soak test-chosen bench peers gpu gpu-wheels lint lock docs browser clean

help:
	@echo "make demo       set up, then the main job twice: planned, and from the cache; then a small GPT-2"
	@echo "make test       set up, lint, check types and layers, run the tests (minutes)"
	@echo "make test-long  tests that take long; CI runs make test and these"
	@echo "make test-full  the tests with the long matrix as well, and with new random examples"
	@echo "make test-torch TORCH=2.11.0 PYTHON=python3.12"
	@echo "                the tests on another torch (5 GB) or Python, in an environment of its own below .torch"
	@echo "make test-soak  200 jobs, four at a time, with random kills (half an hour and more); SOAK_JOBS, SOAK_AT_ONCE, SOAK_SEED"
	@echo "make bench      all measurements (hours), into bench/results and docs/benchmarks.md; RUNS=\"planner estimates\": these"
	@echo "make peers      DeepSpeed, for bench/peers.py, into .peers"
	@echo "make gpu        all that is worth knowing on a machine with one GPU, in 25 minutes; DEVICE=cpu: a small form"
	@echo "                PARTS=\"correct speed estimates shared\", OUT=folder for gpu.json and gpu.md"
	@echo "make gpu-wheels for a machine without a package index: what 'make gpu' needs there, into .gpu/wheels"
	@echo "make lint       lint, types and layers only"
	@echo "make docs       the documentation as a site, into build/site; a warning is an error"
	@echo "make lock       versions and hashes of requirements*.lock for what pyproject.toml asks for; UPGRADE=1: the newest"
	@echo "make clean      remove .venv, .venv-docs, .peers, .torch, .gpu and what tools left behind"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements.lock
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(PIN)" .ci/setup
	@touch $@

# Other launchers than the environment's own, for tests alone.
$(LAUNCHERS): $(STAMP) .ci/launchers
	@VENV="$(VENV)" .ci/launchers
	@touch $@

# Frameworks that train models themselves, for tests alone.
$(FRAMEWORKS): $(STAMP) .ci/frameworks requirements-frameworks.lock
	@VENV="$(VENV)" .ci/frameworks
	@touch $@

# A package that changes what others do where it can be imported: in a folder that only a measurement of it looks into.
peers: $(PEERS)

$(PEERS): $(STAMP) .ci/peers requirements-peers.lock
	@VENV="$(VENV)" .ci/peers
	@touch $@

# After a change of dependencies. UPGRADE=1: with the newest versions; FILES=requirements-docs.lock: that file alone.
lock:
	@PYTHON="$(PYTHON)" UPGRADE="$(UPGRADE)" FILES="$(FILES)" .ci/lock

# The site, from README, docs/ and the docstrings.
$(SITE)/.set-up: requirements-docs.lock .ci/docs
	@PYTHON="$(PYTHON)" SITE="$(SITE)" .ci/docs set-up
	@touch $@

docs: $(SITE)/.set-up
	@SITE="$(SITE)" .ci/docs build

demo: $(STAMP)
	@VENV="$(VENV)" .ci/demo

lint: $(STAMP) $(FRAMEWORKS)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	@if $(PY) -c 'import torch, sys; sys.exit(f"torch=={torch.__version__.partition(chr(43))[0]}\n" not in open("constraints.txt"))'; \
	then $(PY) -m mypy; else echo "types are checked with the torch of constraints.txt alone: others have other annotations"; fi
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"

# Workers take a file each at a time, in order: jobs are long, and come before many short tests, so that all workers end at
# about the same time. One worker more than cores: jobs wait now and then. A rank has one thread, whoever starts it.
# Bytecode is kept, also where the caller's environment says otherwise: each rank imports most of rannd.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Chromium, for the tests of pages; without it they are skipped, or in CI fail.
browser:
	@.ci/browser

test: lint docs $(LAUNCHERS) browser
	$(PYTEST) -m "not long and not full"

test-long: $(STAMP) $(LAUNCHERS) $(FRAMEWORKS)
	$(PYTEST) -m "long and not full"

test-full: lint docs $(LAUNCHERS) browser
	TEST_SEED=random $(PYTEST)

# A folder for each pair of torch and Python. PYTHON's version is unknown where there is no PYTHON; set-up says so.
test-torch:
	@$(MAKE) --no-print-directory test-chosen PIN="$(TORCH)" VENV="$(TORCH_ENVS)/$(TORCH)-py$$( \
	  "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo unknown)"

test-chosen: $(STAMP) $(FRAMEWORKS)
	@$(PY) -c 'import platform, torch; print(f"torch {torch.__version__}, Python {platform.python_version()}")'
	$(PYTEST) -m "not full" $(TESTS)

# A line for each job; tests/soak/test_soak.py runs eight.
test-soak: $(STAMP)
	PYTHONDONTWRITEBYTECODE= $(PY) tests/soak/soak_run.py $(SOAK_JOBS) $(SOAK_AT_ONCE) $(SOAK_SEED)

# All measurements, or those of RUNS ("planner estimates"): bench/results/<date>.json and docs/benchmarks.md.
bench: $(STAMP) $(FRAMEWORKS) $(PEERS)
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) bench/all.py $(RUNS)

gpu: $(GPU_STAMP)
	$(GPU_PY) bench/gpu.py $(PARTS) --device "$(DEVICE)" --out "$(OUT)"

.gpu/venv/.set-up: $(GPU_WHEELS) pyproject.toml
	@PYTHON="$(PYTHON)" .ci/gpu-setup

gpu-wheels:
	@PYTHON="$(PYTHON)" GPU_PYTHON="$(GPU_PYTHON)" .ci/gpu-wheels

clean:
	rm -rf .venv .venv-docs .peers .torch .gpu build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
