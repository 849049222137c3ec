# From a bare clone with Python 3.11+ and make: `make demo`, `make test`. The environment is made on first use.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$p && break; done)
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.DEFAULT_GOAL = help
.PHONY: help demo test test-full check format accuracy clean

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; try: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## forecast two jobs, no GPU needed
	@printf '\n$$ %s\n' "brimful forecast mistral-7b-v0.3 --method lora --batch 4 --max-length 1024 --gpu a10g"
	@$(BIN)/brimful forecast mistral-7b-v0.3 --method lora --batch 4 --max-length 1024 --gpu a10g || test $$? -eq 3
	@printf '\n$$ %s\n' "brimful forecast flan-t5-xl --batch 8 --max-length 256 --max-target-length 512 --recompute all --gpu rtx-5090"
	@$(BIN)/brimful forecast flan-t5-xl --batch 8 --max-length 256 --max-target-length 512 --recompute all --gpu rtx-5090

check: $(INSTALLED)  ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## check, then the tests (a sample of the matrix)
	$(BIN)/pytest -q -m 'not full'

test-full: check  ## check, then every test
	$(BIN)/pytest -q

format: $(INSTALLED)  ## put imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

accuracy: $(INSTALLED)  ## write docs/accuracy.md from the committed results
	$(BIN)/python benchmarks/forecast/table.py

clean:  ## remove the environment and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
