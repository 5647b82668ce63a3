# Two commands: `make demo` (the whole story on embedded data) and `make test`. Each sets up .venv on first use.
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13,$(shell $(p) -c 'import sys, venv, ensurepip; print(sys.executable) if sys.version_info >= (3, 11) else 0' 2>/dev/null | grep -v '^0$$')))
BIN := .venv/bin
# OpenMP's spinning makes two threads slower than one as soon as anything else runs on the machine.
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test bench check lint docs clean
help:
	@echo "make demo   set up, then the whole story on embedded data (about five minutes on two cores)"
	@echo "make test   set up, then all tests"
	@echo "make lint   set up, then ruff and mypy"
	@echo "make bench  set up, then every benchmark in short, in under ten minutes: build/benchmarks/"
	@echo "make docs   set up, then these pages as a site: build/site/index.html"
	@echo "make clean  remove .venv and caches"

demo: .venv/.installed
	$(BIN)/marey demo

test: .venv/.installed-dev
	$(BIN)/python -m pytest

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks all --quick

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Without the theme's advertisement of its successor. To read while writing: .venv/bin/mkdocs serve
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: test lint

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Marey needs Python 3.11 or newer with venv; install it, or name it: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch .venv/.installed $@

.venv/.installed-docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
