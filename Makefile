# `make demo` and `make test` set up .venv themselves, once, and reuse it until a requirement changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo paper quick test lint types tests abuse coverage browser bench docs clean

demo: $(INSTALLED)
	$(BIN)/python examples/light_dark.py

# `make paper QUICK=1` takes some minutes instead of the better part of an hour.
paper: $(INSTALLED)
	$(BIN)/python -m examples.paper $(if $(QUICK),--quick)

# In these everything is slow, and not to import them saves time, too.
SLOW := tests/abuse tests/browser tests/examples tests/test_tutorial.py tests/experiments/test_cluster.py

# While you think: under a minute on two cores.
quick: lint types
	$(BIN)/python -m pytest tests -n 2 --dist worksteal -m "not slow and not long" \
		--override-ini "addopts=-q --strict-markers" $(SLOW:%=--ignore=%)

# Before a change lands: everything it must pass.
test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

tests: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# The long ones: tests of robustness with ten times as many cases, and processes killed at any moment.
abuse: $(INSTALLED)
	CPOMDP_ABUSE=$(CPOMDP_ABUSE) $(BIN)/python -m pytest tests/abuse -n auto --dist worksteal
	CPOMDP_ABUSE=$(CPOMDP_ABUSE) $(BIN)/python -m pytest tests -m long --ignore=tests/abuse

CPOMDP_ABUSE ?= 10

# Statements of the three packages that tests run, in this process or a worker's; children are not followed.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore=tests/abuse --cov --cov-report=term

# The report in a real browser, which must be there: Debian's `chromium`, for instance. `tests` does without.
browser: $(INSTALLED)
	REQUIRE_CHROMIUM=1 $(BIN)/python -m pytest tests/browser

# Writes benchmarks/README.md; `python -m benchmarks scale fit` makes these sections anew.
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,peers]"
	$(BIN)/python -m benchmarks

# A static site in build/site, from docs/ and docstrings; a link that leads nowhere is an error.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The constraints keep to versions that are known to work together; a newer torch may come with gigabytes of CUDA.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .coverage runs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
