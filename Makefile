# Every chore, the same for people and for CI. Needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS ?= auto
COUNT ?= 100000
SECONDS ?= 600
PROCESSES ?= 2

.DEFAULT_GOAL := help
.PHONY: help packages demo test test-all test-slurm test-manifests test-torch-free test-oldest test-newest test-doors test-gpu wheel fuzz audit coverage check format bench docs clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## ?/\t/' | expand -t 12

packages:        ## install system packages that tests use, where they are missing (Debian, Ubuntu)
	.ci/packages

demo: $(VENV)/.torch   ## a plan for a mixed 16-GPU cluster; then a small GPT trained on four unequal hosts, predicted and measured
	$(BIN)/argosy demo

test: $(VENV)/.test   ## the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not exhaustive and not slurm"

test-all: $(VENV)/.test   ## the test suite with the exhaustive matrices
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slurm"

test-slurm: $(VENV)/.test   ## batch scripts on a real Slurm with unequal emulated nodes (Debian, Ubuntu; root)
	.ci/packages slurm
	$(BIN)/python -m pytest tests/slurm -n 0 -m slurm

test-manifests: .venv-manifests/.torch-free   ## JobSets and SkyPilot tasks by the schemas of kubeflow-trainer-api and skypilot
	.venv-manifests/bin/python -m pip install --quiet --disable-pip-version-check kubeflow-trainer-api skypilot jsonschema
	.venv-manifests/bin/python -m pytest tests/exporters/test_manifests.py -n 0 -p no:cacheprovider -W default

test-torch-free: .venv-$(notdir $(PYTHON))/.torch-free   ## planning, simulating and reporting without torch: make test-torch-free PYTHON=python3.13
	.venv-$(notdir $(PYTHON))/bin/python -m pytest -n $(JOBS) --dist worksteal --torch-free -m "not exhaustive and not slurm" -p no:cacheprovider

test-oldest: .venv-oldest/.torch-free   ## the same with the oldest versions that pyproject.toml allows: make test-oldest TESTS=tests/cluster
	.venv-oldest/bin/python -m pytest -n $(JOBS) --dist worksteal --torch-free -m "not exhaustive and not slurm" -p no:cacheprovider $(TESTS)

test-newest: .venv-newest/.any-torch   ## what uses torch, with the newest torch, which brings CUDA with it: make test-newest TESTS=tests/workload
	.venv-newest/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not exhaustive and not slurm" -p no:cacheprovider $(or $(TESTS),tests/workload tests/runtime tests/exporters tests/schedule tests/cost)

test-doors: $(VENV)/.core   ## exports read by the systems themselves, each in an environment of its own: make test-doors DOORS="torchtitan megatron" NEWEST=1
	$(BIN)/python tests/doors $(if $(NEWEST),--newest) $(DOORS)

wheel: $(VENV)/.core   ## build the wheel, install it into a fresh environment, and plan with it
	rm -rf dist .venv-wheel
	$(PIP:install=wheel) --no-deps --wheel-dir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/argosy-*.whl
	cd dist && ../.venv-wheel/bin/argosy --version && ../.venv-wheel/bin/argosy plan -m gpt2 -c two-cards -b 8 -q -o plan.json >/dev/null

test-gpu: $(VENV)/.test   ## ranks on GPUs over NCCL; NCCL 2.30 runs several on one card with NCCL_MULTI_RANK_GPU_ENABLE=1
	$(BIN)/python -m pytest -n 0 --gpu tests/gpu

audit: $(VENV)/.audit   ## known holes in what is installed; asks a service on the network
	$(BIN)/pip-audit --strict --skip-editable

fuzz: $(VENV)/.test   ## changed inputs for every reader and command: make fuzz COUNT=100000 SECONDS=600 PROCESSES=2
	$(BIN)/python tests/fuzz --count $(COUNT) --seconds $(SECONDS) --jobs $(PROCESSES)
	$(BIN)/python -m pytest -n $(PROCESSES) tests/fuzz

coverage: $(VENV)/.coverage   ## the test suite, and which lines no test reaches (build/coverage/index.html)
	@mkdir -p build/coverage && $(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) --dist worksteal -m "not exhaustive and not slurm"
	@$(BIN)/coverage combine -q && $(BIN)/coverage html -q -d build/coverage
	$(BIN)/coverage report --skip-covered --sort=cover

check: $(VENV)/.check $(VENV)/.test   ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.check   ## rewrite the sources in the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench   ## every benchmark, printed as ratios against a baseline of the same run
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs   ## the documentation, as a site in build/docs
	$(BIN)/python -m sphinx -W -q -b html docs build/docs
	@echo "wrote build/docs/index.html"

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "argosy needs Python 3.11 or newer; found $$($(PYTHON) --version). Set PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml
	@echo "installing argosy into $(VENV)"
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) -e .
	@touch $@

.venv-%/.torch-free: pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check $(if $(filter oldest,$*),-c tests/oldest.txt) -e '.[nbody]' --group torch-free
	@touch $@

.venv-newest/.any-torch: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[hf,torch,nbody]' --group any-torch
	@touch $@

# The dependency group of that name, and the extras of argosy that it is used with.
$(VENV)/.test $(VENV)/.coverage: EXTRAS := [hf,torch,nbody]
$(VENV)/.bench: EXTRAS := [torch,nbody]
$(VENV)/.torch: EXTRAS := [torch]
$(VENV)/.torch: GROUP := tested-torch
$(VENV)/.test $(VENV)/.check $(VENV)/.bench $(VENV)/.torch $(VENV)/.docs $(VENV)/.audit $(VENV)/.coverage: $(VENV)/.%: $(VENV)/.core
	@echo "installing what '$*' needs into $(VENV)"
	$(PIP) -e '.$(EXTRAS)' --group $(or $(GROUP),$*)
	@touch $@
