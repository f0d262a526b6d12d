# Each target sets up .venv in the checkout by itself, again only when pyproject.toml has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check bench wheel clean

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is older than 3.11; set PYTHON=python3.11 or newer" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check -q install --upgrade 'pip>=25.1'
	$(BIN)/python -m pip --disable-pip-version-check -q install --group dev -e .
	@touch $@

demo: $(STAMP)
	@$(BIN)/vllm-locust demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/rules

bench: $(STAMP)
	$(BIN)/python -m tests.bench

wheel: $(STAMP)
	$(BIN)/python -m pip --disable-pip-version-check -q wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) .bench-venvs dist build .mypy_cache .ruff_cache .pytest_cache
