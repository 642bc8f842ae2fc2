# `make demo` and `make test` set up .venv themselves, once, and reuse it until a requirement changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo paper test lint types tests browser bench clean

demo: $(INSTALLED)
	$(BIN)/python examples/light_dark.py

# `make paper QUICK=1` takes some minutes instead of the better part of an hour.
paper: $(INSTALLED)
	$(BIN)/python -m examples.paper $(if $(QUICK),--quick)

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

tests: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# The report in a real browser, which must be there: Debian's `chromium`, for instance. `tests` does without.
browser: $(INSTALLED)
	REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest tests/browser

# Writes benchmarks/README.md; `python -m benchmarks scale fit` makes these sections anew.
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,peers]"
	$(BIN)/python -m benchmarks

# The constraints keep to versions that are known to work together; a newer torch may come with gigabytes of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
