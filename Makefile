# Everything runs in the project's own virtual environment, .venv, which the first target that needs it makes.
# On a machine without torch and without a GPU, PIP_EXTRA_INDEX_URL with the address of PyTorch's CPU builds gives pip
# the small CPU build of torch.

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.set-up
LAUNCHERS := .venv/launchers/.set-up

.PHONY: help setup demo test test-full bench lint clean

help:
	@echo "make demo       set up, then the main job twice: planned, and from the cache; then a small GPT-2"
	@echo "make test       set up, lint, check types and layers, run the tests (minutes)"
	@echo "make test-full  the tests with the long matrix as well, and with new random examples"
	@echo "make bench      side-by-side measurements"
	@echo "make lint       lint, types and layers only"
	@echo "make clean      remove .venv and what tools left behind"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" .ci/setup
	@touch $@

# Other launchers than .venv's, for tests alone.
$(LAUNCHERS): $(STAMP) .ci/launchers
	@.ci/launchers
	@touch $@

demo: $(STAMP)
	@.ci/demo

lint: $(STAMP)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"

# Two workers, a file each at a time, in order: jobs are long, and come before many short tests, so that both workers end
# at about the same time. A rank has one thread, whoever starts it.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint $(LAUNCHERS)
	$(PYTEST) -m "not full"

test-full: lint $(LAUNCHERS)
	TEST_SEED=random $(PYTEST)

bench: $(STAMP)
	@set -e; found=; for script in bench/[!_]*.py; do \
	  [ -e "$$script" ] || continue; found=1; echo "== $$script"; $(PY) "$$script"; \
	done; [ -n "$$found" ] || echo "bench/ holds no measurement yet"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
