# Everything a contributor runs. `make demo` and `make test` set up what they need by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test test-slow test-extras lint format bench docs wheel clean

help:
	@echo "make demo       a local swarm of three nodes that trains CartPole-v1 until it is solved"
	@echo "make test       the tests"
	@echo "make test-slow  learning runs and fault campaigns too"
	@echo "make test-extras  each optional extra in an environment of its own, used once"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make format     ruff format"
	@echo "make bench      benchmarks"
	@echo "make docs       the documentation as a site in ./site"
	@echo "make wheel      dist/*.whl"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (torch is a large download; this happens once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable . --group dev
	@touch $@

demo: $(STAMP)
	@$(BIN)/p2pdrl swarm up 3 --config cartpole
	@$(BIN)/python scripts/time_to_solve.py cartpole --goal 475 --tell 3 --out docs/results/scaling

# One worker runs the tests with real processes, which mostly wait; the two others, which yield to it, all the rest.
test: $(STAMP)
	@$(BIN)/python -m pytest -q -n 3 --dist loadgroup

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "slow or not slow" --timeout 1800

test-extras: $(STAMP)
	@$(BIN)/python scripts/check_extras.py

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP)
	@for script in scripts/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(STAMP)
	@$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) dist build site .mypy_cache .ruff_cache .pytest_cache .hypothesis
