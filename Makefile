# The repository's commands. Each works in a fresh clone; `setup` makes the `.venv` they run in.
#
#   make demo       the whole story on this machine
#   make test       everything but the tests of many minutes
#   make check      lint, types, import contracts, quick tests
#   make test-long  the tests of many minutes
#   make test-levels  what is promised about bits, on other processors than this one
#   make test-gpu   the tests that need a graphics card, then the device's own test
#   make bench      side-by-side measurements
#   make clients    what the tests of litellm, openai-agents, lm-eval, guidellm and llama-index need, 930 MB
#   make release    what a release consists of, in dist/
#   make docs       regenerate the generated pages, then build the documentation as a site in `site/`

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

# One thread per process: tests and peers are many processes, and results depend on the number of threads.
# Compiled modules are kept, whatever the environment says: else each of these processes compiles the whole source again.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup demo check lint types contracts quick whole test test-long test-levels test-gpu bench clients docs release-files release
.DEFAULT_GOAL := check

setup: $(STAMP)

# torch comes first and alone: the rest then accepts the build that is there instead of choosing one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; name one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/fusion demo $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# All types, or with TYPES=--changed those of what changed since the last check without errors and of what imports it.
types: setup
	PYTHONPATH=tests $(BIN)/python -m harness.type_check $(BIN)/basedpyright $(TYPES)

contracts: setup
	$(BIN)/lint-imports --no-cache

quick: setup
	$(TEST_ENV) $(PYTEST) -m "not slow and not long" $(ARGS)

whole: setup
	$(TEST_ENV) $(PYTEST) -m "not long" $(ARGS)

# Types of what changed: all of them take the type checker a minute and a half of one core, the first time and in `test`.
check: setup
	@$(MAKE) --no-print-directory -j 2 TYPES=--changed lint types contracts quick

# The type checker has one process, and its minute and a half is a core's: the tests run beside it.
test: setup
	@$(MAKE) --no-print-directory -j 2 lint contracts types whole

test-long: setup
	$(TEST_ENV) $(BIN)/python -m pytest -m long --timeout 3600 $(ARGS)

# Each level is a process of its own; part of `test-long`, and a few seconds of it of `test`.
test-levels: setup
	$(TEST_ENV) $(BIN)/python -m pytest tests/conformance/test_levels.py --timeout 3600 $(ARGS)

# Without a card PyTorch can use, says so and fails: nothing would have been tested.
test-gpu: setup
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "PyTorch sees no graphics card here, so no test that needs one can run. `fusion doctor` says why.")'
	$(TEST_ENV) $(BIN)/python -m pytest -m cuda --timeout 600 $(ARGS)
	$(BIN)/fusion doctor --self-test --device cuda

bench: setup
	for subject in planner transport training recovery serving; do $(BIN)/python benchmarks/$$subject.py $(ARGS) || exit 1; done

# litellm and openai-agents want other versions of libraries than transformers and each other: each gets an environment
# of its own. So do lm-eval, guidellm and llama-index, which find torch and transformers in the main one.
clients: setup
	test -x $(VENV)/clients/bin/python || $(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/integration/clients.txt
	test -x $(VENV)/agents/bin/python || $(PYTHON) -m venv $(VENV)/agents
	$(VENV)/agents/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/integration/agents.txt
	test -x $(VENV)/evals/bin/python || $(BIN)/python -m venv $(VENV)/evals
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(VENV)/evals/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(VENV)/evals/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/integration/evals.txt

docs: setup
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# Hashes of all pinned packages, their licences, and an SBOM (CycloneDX). The tools have an environment of their own.
release-files: setup
	mkdir -p build release
	test -x $(VENV)/release/bin/python || $(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 cyclonedx-bom==7.5.0 pip-licenses==5.5.5
	$(VENV)/release/bin/uv pip compile --quiet --generate-hashes --no-deps --no-annotate \
		--custom-compile-command "make release-files" --output-file release/requirements.txt constraints.txt
	$(VENV)/release/bin/pip-licenses --python $(BIN)/python --format markdown --order name --ignore-packages fusionai \
		--output-file release/licences.md
	sed -i.whole '/^| *| *|/d' release/licences.md && rm release/licences.md.whole  # some packages give the whole text
	$(VENV)/release/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json release/requirements.txt

# A release in dist/: wheel, source, the pinned packages with their hashes, SBOM, changelog, and the SHA-256 of each.
release: release-files
	$(VENV)/release/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1
	rm -rf dist && $(VENV)/release/bin/python -m build --quiet --outdir dist
	cp release/requirements.txt release/licences.md build/sbom.json CHANGELOG.md dist/
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS
