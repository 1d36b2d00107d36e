# make demo: installs and runs the whole way on a real target. make test: installs and checks all.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Waiting OpenMP threads must sleep: they share the cores with other processes.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo smoke test check format install clean

demo: install
	$(BIN)/python scripts/demo.py demo

smoke: install
	$(BIN)/python scripts/demo.py smoke

test: check
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

# torch comes first: resolved alone, pip takes a CPU build from a local wheel folder if there is one.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist
