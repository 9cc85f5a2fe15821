# Every target sets up what it needs in .venv first; the only thing asked of the machine is Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format unit bench bench-quick bench-control-plane bench-data bench-node-failover bench-checkpoint bench-goodput bench-diagnosis chaos clean lock licences simulate false-alarms

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything the other targets need; LOCKED=1 checks the hash of each file but torch's

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt constraints.locked.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {v.major}.{v.minor} found; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch included; a few minutes the first time)"
ifdef LOCKED
	@$(PIP) --require-hashes --no-deps -r constraints.locked.txt
	@$(PIP) -c constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(PIP) -c constraints.txt -e '.[dev,torch,data,frameworks,dashboard,stacks]'
endif
	@touch $@

demo: $(STAMP) ## train a small GPT with 2 workers, kill one, watch it recover
	@$(BIN)/python examples/gpt/demo.py

test: lint unit ## all checks and tests: what CI runs

lint: $(STAMP) ## formatting, lint, types, layers
	$(BIN)/ruff format --check dlrover tests benchmarks examples tools
	$(BIN)/ruff check dlrover tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code as the formatter wants it
	$(BIN)/ruff format dlrover tests benchmarks examples tools
	$(BIN)/ruff check --fix dlrover tests benchmarks examples tools

unit: $(STAMP) ## the tests alone, a file on each of two cores at a time
	@# With PYTHONDONTWRITEBYTECODE set, each of the thousands of processes would compile our modules again.
	@$(BIN)/python -m compileall -q dlrover tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(STAMP) ## failover and start-up against torchrun and dlrover 0.6.1, interleaved (about 20 minutes)
	$(BIN)/python benchmarks/failover.py
	$(BIN)/python benchmarks/master_restart.py

bench-quick: $(STAMP) ## the same in two minutes, torchrun only
	$(BIN)/python benchmarks/failover.py --quick

bench-control-plane: $(STAMP) ## rendezvous, heartbeats and keys of masters: ours, dlrover 0.6.1's, torch's (about 20 minutes)
	$(BIN)/python benchmarks/control_plane.py

bench-data: $(STAMP) ## shards, large datasets, samplers and steps: ours, dlrover 0.6.1's, torch's (about 5 minutes)
	$(BIN)/python benchmarks/data.py

bench-node-failover: $(STAMP) ## one of two nodes killed: ours, torchrun, dlrover 0.6.1 (about 20 minutes)
	$(BIN)/python benchmarks/node_failover.py

bench-checkpoint: $(STAMP) ## saves and restores of 0.25 and 1 GB: ours, torch's, torchsnapshot's, dlrover 0.6.1's (at most 20 minutes)
	$(BIN)/python benchmarks/checkpoint.py --json checkpoint.json

bench-diagnosis: $(STAMP) ## more than 250 faults of 38 kinds in jobs of four workers, and 50 healthy jobs (about 30 minutes)
	$(BIN)/python benchmarks/diagnosis.py --json diagnosis.json

bench-goodput: $(STAMP) ## goodput with a worker killed every 30 s: ours, torchrun, dlrover 0.6.1 (about 35 minutes)
	$(BIN)/python benchmarks/goodput.py --json goodput.json

bench-monitoring: $(STAMP) ## what watching costs: a step with and without the hooks, each hook, the agent's share (about 1 minute)
	$(BIN)/python benchmarks/monitoring.py

chaos: $(STAMP) ## slow fault tests that are not part of `make test`
	$(BIN)/python -m pytest -m chaos

simulate: $(STAMP) ## a million injected faults against the control plane, on all cores
	$(BIN)/python -m dlrover.simulator --faults 1000000 --seed 1

false-alarms: $(STAMP) ## 10,000 simulated node-days of healthy, busy nodes: nobody may be given up
	$(BIN)/python -m dlrover.simulator --false-alarms --node-days 10000 --seed 1

lock: $(STAMP) ## write the hashes of all pinned files to constraints.locked.txt (about 2 minutes)
	$(BIN)/python tools/dependencies.py lock

licences: $(STAMP) ## write the licences of all pinned packages to docs/reference/licences.md
	$(BIN)/python tools/dependencies.py licences

clean: ## remove what the targets made
	rm -rf $(VENV) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
