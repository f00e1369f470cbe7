# All packages are installed into the virtual environment .venv, which is made with this Python.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
# Allow .pyc files. Tests start many interpreters, and without .pyc files each interpreter would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test ci style quick-tests all-tests coverage record docs clean

demo: .venv/.sim
	.venv/bin/fedcomp sim --clients 200

# There are up to twice as many test workers as cores (tests/conftest.py), so each worker computes on one thread.
check test ci coverage record: export HF_HUB_OFFLINE := 1
check test ci coverage record: export OMP_NUM_THREADS := 1
check test ci coverage record: export RAY_USAGE_STATS_ENABLED := 0
check test ci coverage: export FEDCOMP_DATA ?= $(realpath ../shared/data)
PYTEST := .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# Check style and types, and run the quick tests. Parametrised tests run with their first parameters only.
check: .venv/.dev
	+$(MAKE) --no-print-directory --jobs style quick-tests

# Check style and types, and run all tests.
test: .venv/.dev
	+$(MAKE) --no-print-directory --jobs style all-tests

# Check style and types, run all tests, and print their branch coverage.
ci: .venv/.dev
	+$(MAKE) --no-print-directory --jobs style coverage

# Style is checked while the tests run, because the tests do not use all cores while they wait for processes.
style:
	.venv/bin/ruff format --check --quiet
	.venv/bin/ruff check --quiet
	.venv/bin/mypy --no-error-summary

quick-tests:
	$(PYTEST) --quick

all-tests:
	$(PYTEST)

# Run all tests and measure branch coverage, but not in processes that tests start. Fail if it is below `fail_under` in pyproject.toml.
coverage: export COVERAGE_FILE := $(CURDIR)/.coverage
coverage: .venv/.dev
	.venv/bin/python -m coverage erase
	.venv/bin/python -m coverage run $(subst .venv/bin/python ,,$(PYTEST))
	.venv/bin/python -m coverage combine --quiet
	.venv/bin/python -m coverage report

# Rewrite tests/golden/runs.json, which contains the frames and models that tests/test_recorded_runs.py expects.
record: .venv/.dev
	PYTHONPATH=tests .venv/bin/python tests/recorded_runs.py

# Build the documentation site in site/. Neither building nor reading it needs network access.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/.docs
	.venv/bin/python -m mkdocs build --strict

# .venv/.sim, .venv/.dev and .venv/.docs are stamp files of the installed extras. The last step compiles packages on all cores.
# It skips folders from which tests and commands import little or nothing; Python compiles such modules when it imports them.
NOT_COMPILED := tests|pip|setuptools|mypyc?|debugpy|fontTools|networkx|torchvision|pygments/lexers|transformers/models
NOT_COMPILED := $(NOT_COMPILED)|ray/(data|llm|rllib|serve|train|tune)|torch/(_inductor|onnx|testing)
.venv/.%: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python scripts/install.py $*
	.venv/bin/python -m compileall -qq -j 0 -x '/($(NOT_COMPILED))/' .venv/lib || true
	touch $@

clean:
	rm -rf .venv site .coverage*
