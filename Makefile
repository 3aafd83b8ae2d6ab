# Two commands do all set-up in .venv: `make demo` and `make test`.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3))
VENV   := .venv
BIN    := $(VENV)/bin
FAMILY ?= qwen38
DEMO   ?= demo
# Installed first: pip then keeps a CPU build of this release where the index offers one.
TORCH  ?= torch==2.13.0
JOBS   ?= 2

DEMO_EXTRAS := rtx,serve,media
TEST_EXTRAS := rtx,serve,kernels,media,quantize,test,lint

.PHONY: demo test lint format docs clean

# One thread per process: the models are small, and more threads only get in each other's way.
demo: $(VENV)/.stamp-demo
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.demo --family $(FAMILY) $(DEMO)/$(FAMILY)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -q

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.stamp-demo
	$(BIN)/python -m build_scripts.reference > docs/cli.md

clean:
	rm -rf demo build .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no python3.11 on PATH; on Debian: apt-get install python3.11 python3.11-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: cannot create $(VENV); on Debian: apt-get install python3.11-venv" >&2; exit 1; }

$(VENV)/.stamp-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[$(DEMO_EXTRAS)]"
	touch $@

$(VENV)/.stamp-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[$(TEST_EXTRAS)]"
	touch $@
