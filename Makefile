# Two commands matter: `make demo` and `make test`. Both set everything up by themselves. `make help` lists the others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The site has an environment of its own: it is built from the sources, without Spark and Dagster.
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
# Tests wait for servers, pauses and what they start: six processes share two cores. PYTEST_ARGS="-n 0"
# runs them in one.
DISTRIBUTED := --dist loadfile --no-loadscope-reorder --timings
PYTEST_ARGS ?= -n 6 $(DISTRIBUTED)
# Fast tests wait for nothing, and each process spends seconds on collecting all tests first.
FAST_ARGS ?= -n 2 $(DISTRIBUTED)
# Six processes that start together would each compile thousands of modules: one process does it before them, once.
COMPILED := $(VENV)/.compiled

# Where an image keeps Python from writing bytecode, each process would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-kafka test test-fast test-long test-drawn test-engines test-spark unit lint types layers ui bench docs servers classes java clean help

setup: java $(READY)  ## Make the virtual environment; all other targets do it, too

demo: java $(READY)  ## Run the main job on real data into .adjunct/, with no server and no account
	@$(BIN)/adjunct demo

demo-kafka: java $(READY) servers  ## Run the example with Kafka, Debezium's changes and DynamoDB on servers of its own
	@$(BIN)/python -m tests.examples.demo_kafka

# Two at a time: what is fetched waits for the network, and types are checked by one core.
test: java $(READY)  ## Everything that must hold
	@$(MAKE) --no-print-directory -j2 lint types layers servers classes $(COMPILED)
	@$(MAKE) --no-print-directory unit

test-fast: $(READY)  ## What needs neither Java nor a server, without what takes over a quarter of a second
	@$(BIN)/python -m pytest $(FAST_ARGS) -m "not spark and not server and not slow and not long and not lengthy"

unit: java $(COMPILED) classes  ## All tests but the long ones, with seconds by suite
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: java $(READY) classes servers  ## What `make test` leaves out: variants of what another test shows, and further rounds
	@ADJUNCT_ALL_ROUNDS=1 $(BIN)/python -m pytest -m "long or rounds"

test-drawn: java $(READY)  ## 10,000 drawn applications without Spark, and 60 by all engines, against plain Python
	@ADJUNCT_ALL_ROUNDS=1 $(BIN)/python -m pytest -n 2 tests/orchestration/test_drawn_batches_in_process.py

test-engines: java $(READY) classes  ## The tests of batches, with each run done by all engines and compared
	@ADJUNCT_TEST_ENGINES=all $(BIN)/python -m pytest -n 2 --dist loadfile -m "spark and not long" tests/orchestration/test_*.py

# Beside the environment, whose Spark stays as it is.
test-spark: java $(READY) servers  ## The tests with Spark, by another of its releases: make test-spark SPARK=4.1.4
	@test -d .cache/spark-$(SPARK) || $(BIN)/python -m pip install --quiet --no-deps --target .cache/spark-$(SPARK) pyspark==$(SPARK)
	@PYTHONPATH=$(CURDIR)/.cache/spark-$(SPARK) $(BIN)/python -m pytest $(PYTEST_ARGS) -m "spark and not long"

lint: $(READY)  ## Format and lint
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/complexipy

types: $(READY)  ## Static types
	@$(BIN)/mypy

layers: $(READY)  ## What may import what
	@$(BIN)/lint-imports

ui: java $(READY)  ## The Dagster UI over the lake and the runs of `make demo`
	@$(BIN)/adjunct ui

bench: java $(READY)  ## Speed against bare baselines, as ratios
	@$(BIN)/python -m benchmarks

docs: $(DOCS_READY)  ## The documentation as a site, in build/site; links that lead nowhere fail
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

servers: $(READY)  ## Real servers for the tests, where this machine can have them
	@sh .ci/install-servers.sh

classes: java $(READY)  ## An archive of Spark's classes, with which the tests' JVMs start in half the time
	@$(BIN)/python -m tests.java_classes

java:
	@command -v java >/dev/null 2>&1 || { echo "Adjunct needs Java 17 or newer and found none: install it (Debian, Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17)."; exit 1; }
	@version=$$(java -version 2>&1 | sed -nE 's/.*version "(1\.)?([0-9]+).*/\2/p' | head -n 1); \
	[ "$${version:-0}" -ge 17 ] || { echo "Adjunct needs Java 17 or newer and found $${version:-an unknown version}: install a newer one (Debian, Ubuntu: apt install openjdk-17-jre-headless; macOS: brew install openjdk@17)."; exit 1; }

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Adjunct needs Python 3.11 or newer and found %d.%d: run make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "Setting up $(VENV) (once, some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

# What cannot be collected is reported by the tests.
$(COMPILED): $(READY)
	@$(BIN)/python -m pytest -n 0 --collect-only -qq > /dev/null || true
	@touch $(COMPILED)

$(DOCS_READY): requirements-docs.txt
	@echo "Setting up $(DOCS_VENV) (once) ..."
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --no-deps --disable-pip-version-check -r requirements-docs.txt
	@touch $(DOCS_READY)

help:  ## This list
	@sed -nE 's/^([a-z-]+):.*##  *(.*)/\1|\2/p' Makefile | while IFS='|' read -r name what; do printf '%-10s %s\n' "$$name" "$$what"; done

clean:  ## Remove what all this has made, the environments included
	rm -rf $(VENV) $(DOCS_VENV) .adjunct .cache build *.egg-info
