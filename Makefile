# Everything happens in .venv of this checkout; the first target that needs it sets it up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes of `make test`: one more than cores, as tests of real processes wait much; with four it takes longer.
JOBS ?= 3
# Folders of `make quick`: unit tests without real processes and whole simulated swarms.
QUICK := $(addprefix tests/,protocol flow train data observe net sim/kernel sim/network sim/cluster sim/planning *.py)

.DEFAULT_GOAL := train
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

train: $(READY)  ## a local swarm (two data nodes, six relays) trains llama-tiny; then every step is verified
	$(BIN)/anabranch train

setup: $(READY)  ## install everything into .venv

# Tests and checks.

test: $(READY)  ## lint and the suite, at the same time
	$(MAKE) --jobs 2 lint suite

# Byte code is kept, whatever the environment says: some hundred processes import the package.
suite thorough quick: export PYTHONDONTWRITEBYTECODE :=

suite: $(READY)  ## each rule's tests; of costly ones a part
	$(BIN)/pytest -m "not soak and not thorough" -n $(JOBS) --dist worksteal

thorough: $(READY)  ## all tests but the long ones, before a release and after a change of the protocol
	$(BIN)/pytest -m "not soak" -n $(JOBS) --dist worksteal

quick: $(READY)  ## unit tests only, without real processes; under a minute on two cores
	$(BIN)/pytest -m "not soak and not slow and not thorough" -n 2 --dist worksteal $(QUICK)

lint: $(READY)  ## ruff, the style lint and mypy
	$(BIN)/ruff check --no-cache .
	$(BIN)/python tools/style_lint.py src/anabranch tests benchmarks tools
	$(BIN)/mypy

soak: $(READY)  ## long tests: the whole grid of models, partitions and fleets, and faults over many seeds
	$(BIN)/pytest -m soak --timeout 3600

dist: $(READY)  ## wheel and sdist in build/dist, for those who install without a checkout
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist

# In an environment of its own; constraints.txt holds all of `dev`. Folders are not named: a conftest that imports torch
# is skipped where pytest finds it, not where it is told of it.
OTHER := build/python-$(notdir $(PYTHON))
test-python:  ## unit tests with PYTHON=python3.13 and without torch: for a Python of which no build of torch is at hand
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|peft|accelerate)==' constraints.txt > $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install --disable-pip-version-check --no-deps --requirement $(OTHER)/requirements.txt --editable .
	$(OTHER)/bin/python -m compileall -q src
	$(OTHER)/bin/anabranch --help > /dev/null
	$(OTHER)/bin/python -m pytest -m "not soak and not slow and not thorough" --without-torch

wheel-test: $(READY)  ## the wheel in an empty environment trains in an empty folder; two minutes and a download
	$(BIN)/pytest -m "slow or soak" --timeout 3600 tests/install

WHEEL := build/wheel
tutorials: dist  ## the commands of the README and of each tutorial, in small, with the wheel in an environment of its own; four minutes on two cores, and the installation
	test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt build/dist/anabranch-*.whl
	$(WHEEL)/bin/python -m pip install --disable-pip-version-check --no-deps --force-reinstall build/dist/anabranch-*.whl
	$(WHEEL)/bin/python tools/run_tutorials.py

chaos: $(READY)  ## real processes killed, frozen and replaced for ten minutes, then the proof; half an hour in all
	$(BIN)/anabranch chaos

FUZZ_S ?= 60
fuzz: $(READY)  ## every decoder, FUZZ_S seconds each; inputs that reach something new stay in tests/fuzz/corpus
	FUZZ_S=$(FUZZ_S) $(BIN)/pytest -m soak -s --timeout 7200 tests/fuzz

golden: $(READY)  ## write the golden histories anew with the reference, after a change of numbers
	PYTHONPATH=tests $(BIN)/python -m support.swarms.golden_histories --write

hooks: $(READY)  ## install the git hooks of .pre-commit-config.yaml
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt pre-commit
	$(BIN)/pre-commit install

# Benchmarks; benchmarks/README.md lists all.

bench: $(READY)  ## CPU and bytes of a local swarm over those of a single process
	$(BIN)/python -m benchmarks.overhead.swarm_over_single

bench-flow: $(READY)  ## routing policies on random instances, in virtual time; about an hour on two cores
	$(BIN)/python -m benchmarks.flow.policies

bench-wire: $(READY)  ## codecs and coarse sums: bytes, CPU, held-out loss of 3,000 steps, three seeds, simulated time to it; many hours
	$(BIN)/python -m benchmarks.wire.codecs
	nice -n 10 $(BIN)/python -m benchmarks.wire.loss
	nice -n 10 $(BIN)/python -m benchmarks.wire.time_to_loss

tables: $(READY)  ## two models, equal and unequal machines, churn and ablations, in virtual time; over an hour
	$(BIN)/python -m benchmarks.simulation.policies
	$(BIN)/python -m benchmarks.simulation.churn --seeds 5

bench-sync: $(READY)  ## loss of every preset at equal tokens, and time to it; resumable, hours on one free core
	$(BIN)/python -m benchmarks.simulation.preset_loss --fleets 30 --longer 12000 24000

compiled: $(READY)  ## compile the simulator with mypyc, in build/compiled, for long simulations
	$(BIN)/python benchmarks/checks/compile_simulator.py

# Pictures.

pictures: $(READY)  ## the README's pictures from a finished run: make pictures RUN=runs/tiny
	$(BIN)/python docs/generate/make_pictures.py $(RUN)

screenshots: $(READY)  ## pictures of the page and the terminal view, from a run that is made for them (chromium)
	$(BIN)/python docs/generate/make_screenshots.py docs/images

# Documentation site. The variable silences a notice about the future of MkDocs, no warning about this site.

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY)  ## the site in build/site, without network; a warning, broken link or missing anchor fails
	$(BIN)/mkdocs build --strict
	$(BIN)/python docs/generate/check_links.py build/site

docs-serve: export NO_MKDOCS_2_WARNING := 1
docs-serve: $(READY)  ## the site at http://127.0.0.1:8000, rebuilt when a page changes
	$(BIN)/mkdocs serve

# The stamp is renewed when what is installed changes. constraints.txt pins every version, torch included.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:  ## remove .venv, build outputs and caches
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis src/anabranch.egg-info
