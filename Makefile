# Every target sets up what it needs in .venv first; the only thing asked of the machine is Python 3.11 or newer and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-kubernetes demo-ray demo-unified demo-scaling demo-brain bench-brain bench-scaling-pauses test test-kubernetes test-ray test-unified test-coordinator test-ray-oldest test-grpc-oldest test-core measure-style lint format unit bench bench-quick bench-control-plane bench-data bench-node-failover bench-checkpoint bench-goodput bench-diagnosis bench-ray chaos chaos-ray clean lock licences packages docs reference simulate false-alarms mutate demo-tensorflow test-tensorflow test-tensorflow-clusters bench-tensorflow bench-scaling bench-scaling-cost test-scaling bench-unified bench-kubernetes

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything the other targets need; LOCKED=1 checks the hash of each file but torch's

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(STAMP): pyproject.toml constraints.txt constraints.locked.txt dlrover/snapshot/copy/streaming.c
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {v.major}.{v.minor} found; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch included; a few minutes the first time)"
ifdef LOCKED
	@$(PIP) --require-hashes --no-deps -r constraints.locked.txt
	@$(PIP) -c constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation -e .
else
	@$(PIP) -c constraints.txt -e '.[dev,torch,data,frameworks,dashboard,stacks,k8s,brain]'
endif
	@touch $@

# Ray lies over .venv in an environment of its own: other targets do not need it, and its 57 packages stay away from theirs.
RAY_VENV ?= .venv-ray
RAY_BIN := $(RAY_VENV)/bin
RAY_STAMP := $(RAY_VENV)/.installed
OLDEST_RAY := 2.40.0
OLDEST_GRPC := $(shell sed -n 's/.*"grpcio>=\([0-9.]*\)".*/\1/p' pyproject.toml)

define over_venv
	@test -x $(1)/bin/python || $(BIN)/python -m venv $(1)
	@$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' > "$$($(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
endef

demo: $(STAMP) ## train a small GPT with 2 workers, kill one, watch it recover
	@$(BIN)/python examples/gpt/demo.py

demo-kubernetes: $(STAMP) ## an ElasticJob of three workers; a pod is deleted, another evicted, the master's pod deleted (needs root, no cluster)
	@$(BIN)/python examples/kubernetes/demo.py

demo-ray: $(RAY_STAMP) ## a job on a Ray of four machines; a worker, a node, a machine and the job's host are killed (no cluster needed)
	@$(RAY_BIN)/python examples/ray/demo.py

demo-unified: $(RAY_STAMP) ## reinforcement learning with four roles on a Ray of four machines; a process of each part and a machine are killed, and no loss differs
	@$(RAY_BIN)/python -m examples.grpo.demo

demo-scaling: $(STAMP) ## a job on this machine finds its own size between 1 and 4 nodes, then loses half of its room; reasons and the fitted curve
	@$(BIN)/python examples/scaling/demo.py

demo-brain: $(STAMP) ## two runs of a script: the second starts with the nodes that the first ended with, and Brain is killed meanwhile
	@$(BIN)/python examples/brain/demo.py

test: lint unit ## all checks and tests: what CI runs

test-core: $(STAMP) ## the fast loop: messages, decisions and samples of simulated jobs (about 80 s)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/protocol tests/agreed tests/core tests/simulator

lint: $(STAMP) ## formatting, lint, types, layers, plain English
	$(BIN)/ruff format --check dlrover tests benchmarks examples tools
	$(BIN)/ruff check dlrover tests benchmarks examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.plain_english

measure-style: $(STAMP) ## print how the code is built, in figures: sizes, types, imports, names, words (about 15 s)
	@$(BIN)/python tools/measure_style.py

format: $(STAMP) ## rewrite the code as the formatter wants it
	$(BIN)/ruff format dlrover tests benchmarks examples tools
	$(BIN)/ruff check --fix dlrover tests benchmarks examples tools

unit: $(STAMP) ## the tests alone, a file on each of two cores at a time
	@# With PYTHONDONTWRITEBYTECODE set, each of the thousands of processes would compile our modules again.
	@$(BIN)/python -m compileall -q dlrover tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-kubernetes: $(STAMP) ## what needs an API server: ours, and a real one too if KUBEBUILDER_ASSETS names a directory with etcd and kube-apiserver
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/kubernetes

$(RAY_STAMP): $(STAMP)
	@echo "Installing Ray into $(RAY_VENV)"
	$(call over_venv,$(RAY_VENV))
	@$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'ray[default]' omegaconf
	@touch $@

.venv-ray-oldest/.installed: $(STAMP)
	@echo "Installing Ray $(OLDEST_RAY) into .venv-ray-oldest"
	$(call over_venv,.venv-ray-oldest)
	@$(BIN)/python -c 'import re; print("".join(line for line in open("constraints.txt") if not re.match("ray==", line)), end="")' > .venv-ray-oldest/constraints.txt
	@.venv-ray-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-ray-oldest/constraints.txt 'ray[default]==$(OLDEST_RAY)'
	@touch $@

.venv-grpc-oldest/.installed: $(STAMP) pyproject.toml
	@echo "Installing grpcio $(OLDEST_GRPC) into .venv-grpc-oldest"
	$(call over_venv,.venv-grpc-oldest)
	@.venv-grpc-oldest/bin/python -m pip install --quiet --disable-pip-version-check 'grpcio==$(OLDEST_GRPC)'
	@touch $@

test-grpc-oldest: .venv-grpc-oldest/.installed ## the tests of the wire with the oldest gRPC that we support (about 1 minute)
	.venv-grpc-oldest/bin/python -m pytest tests/protocol/rpc

test-ray: $(RAY_STAMP) ## what needs a Ray cluster: a real one of several raylets on this machine
	@# The example of reinforcement learning takes as long as all other multi-role jobs together: see test-unified.
	$(RAY_BIN)/python -m pytest tests/ray tests/unified/api --ignore tests/ray/unified/test_grpo.py

test-unified: $(RAY_STAMP) ## multi-role jobs on a real Ray, and the example of reinforcement learning with kills of every part
	$(RAY_BIN)/python -m pytest tests/ray/unified

test-ray-oldest: .venv-ray-oldest/.installed ## the same with the oldest Ray that we support
	.venv-ray-oldest/bin/python -m pytest tests/ray --ignore tests/ray/unified

bench-ray: $(RAY_STAMP) ## a killed worker and a killed node: ours on Ray and Ray Train v2, interleaved; then lost machines and hosts (about an hour)
	$(RAY_BIN)/python benchmarks/ray_recovery.py

bench-unified: $(RAY_STAMP) ## calls, streams, killed roles and lost machines of multi-role jobs, beside plain actors of Ray (about 6 minutes)
	$(RAY_BIN)/python benchmarks/unified.py

# TensorFlow's Estimator needs packages of 2023: an environment of its own, which shares nothing with the others.
TF_PYTHON ?= python3.11
TF_VENV ?= .venv-tf215
TF_STAMP := $(TF_VENV)/.installed
# The newest one has no Estimator; ours takes its place there.
NEWEST_TF_VENV ?= .venv-tf
NEWEST_TF_STAMP := $(NEWEST_TF_VENV)/.installed
TF_TOOLS := pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis

$(TF_STAMP): pyproject.toml constraints.tensorflow.txt
	@$(TF_PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v[:2] == (3, 11) else f"TensorFlow 2.15 needs Python 3.11, {v.major}.{v.minor} found; set TF_PYTHON=/path/to/python3.11")'
	@test -x $(TF_VENV)/bin/python || $(TF_PYTHON) -m venv $(TF_VENV)
	@echo "Installing TensorFlow 2.15 into $(TF_VENV) (about 1.3 GB; two minutes the first time)"
	@$(TF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.tensorflow.txt -e '.[tensorflow-estimator]' $(TF_TOOLS)
	@touch $@

$(NEWEST_TF_STAMP): pyproject.toml constraints.tensorflow-newest.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed, {v.major}.{v.minor} found; set PYTHON=/path/to/python3.11")'
	@test -x $(NEWEST_TF_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_TF_VENV)
	@echo "Installing the newest TensorFlow into $(NEWEST_TF_VENV) (about 1.3 GB; two minutes the first time)"
	@$(NEWEST_TF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.tensorflow-newest.txt -e '.[tensorflow]' $(TF_TOOLS)
	@# With its dependencies it would install all of TensorFlow once more, over the CPU wheel.
	@$(NEWEST_TF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.tensorflow-newest.txt tf_keras
	@touch $@

test-tensorflow: $(TF_STAMP) $(NEWEST_TF_STAMP) ## parameter-server jobs with real TensorFlow, 2.15 and the newest, each in an environment of its own (needs Python 3.11)
	$(TF_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/tensorflow
	$(NEWEST_TF_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/tensorflow

# Jobs on Ray and Kubernetes need three environments at once; this one only lies over them, TensorFlow's packages first.
TF_CLUSTERS_VENV ?= .venv-tf-clusters
TF_CLUSTERS_STAMP := $(TF_CLUSTERS_VENV)/.installed

$(TF_CLUSTERS_STAMP): $(NEWEST_TF_STAMP) $(RAY_STAMP)
	@test -x $(TF_CLUSTERS_VENV)/bin/python || $(NEWEST_TF_VENV)/bin/python -m venv --without-pip $(TF_CLUSTERS_VENV)
	@for over in $(NEWEST_TF_VENV) $(RAY_VENV) $(VENV); do \
	  $$over/bin/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])'; \
	done > "$$($(TF_CLUSTERS_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth"
	@touch $@

test-tensorflow-clusters: $(TF_CLUSTERS_STAMP) ## parameter-server jobs on a Ray of three machines and on Kubernetes with processes as pods (about 2 minutes; the pods need root)
	$(TF_CLUSTERS_VENV)/bin/python -m pytest tests/ray/test_parameter_servers.py tests/kubernetes/jobs/test_parameter_servers.py

test-coordinator: $(NEWEST_TF_STAMP) ## the coordinator runtime alone, a part of make test-tensorflow (about 4 minutes)
	$(NEWEST_TF_VENV)/bin/python -m pytest tests/tensorflow/test_coordinator.py

demo-tensorflow: $(TF_STAMP) ## a click-rate model with 2 parameter servers; one is killed, a third joins, every record is counted
	@$(TF_VENV)/bin/python examples/tensorflow/ctr/demo.py

bench-tensorflow: $(TF_STAMP) $(NEWEST_TF_STAMP) ## a parameter server is killed five times: ours, a script that does nothing else, and the original's way; planned changes, lost workers and chiefs, a model of 1 GB; then the coordinator (about 12 minutes)
	$(TF_VENV)/bin/python benchmarks/tensorflow_failover.py --original 2
	$(TF_VENV)/bin/python benchmarks/tensorflow_changes.py
	$(NEWEST_TF_VENV)/bin/python benchmarks/tensorflow_coordinator.py

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

bench-kubernetes: $(STAMP) ## replaced pods, a thousand pods, lost masters, orders of people, jobs that cannot run, 200 jobs (about 15 minutes; some need root)
	$(BIN)/python benchmarks/kubernetes_client.py
	$(BIN)/python benchmarks/kubernetes_pods.py
	$(BIN)/python benchmarks/kubernetes_refusals.py
	$(BIN)/python benchmarks/kubernetes_masters.py
	$(BIN)/python benchmarks/kubernetes_orders.py
	$(BIN)/python benchmarks/kubernetes_operator.py

bench-monitoring: $(STAMP) ## what watching costs: a step with and without the hooks, each hook, the agent's share (about 1 minute)
	$(BIN)/python benchmarks/monitoring.py

bench-scaling: $(STAMP) ## many jobs on one cluster in virtual time: what scaling, Brain and a divided room are worth against sizes that users ask for
	$(BIN)/python benchmarks/cluster_replay.py

bench-scaling-pauses: $(STAMP) ## how long training pauses when a job grows and shrinks by a node, ten of each (about 3 minutes)
	$(BIN)/python benchmarks/scaling_pauses.py

bench-brain: $(STAMP) ## a thousand virtual masters with a report a minute, and start plans over a million stored runs (about 4 minutes)
	$(BIN)/python benchmarks/brain.py

bench-scaling-cost: $(STAMP) ## what the evidence for scaling adds to a step: 10,000 with and without, interleaved (about 1 minute)
	$(BIN)/python benchmarks/scaling_cost.py

test-scaling: $(STAMP) ## the properties of scaling with 10,000 examples and 1,000 laws each (an hour or two on two cores)
	DLROVER_EXAMPLES=10000 DLROVER_LAWS=1000 $(BIN)/python -m pytest -n 2 --timeout 14400 tests/core/scaling/test_scaling_properties.py

chaos: $(STAMP) ## slow fault tests that are not part of `make test`
	$(BIN)/python -m pytest -m chaos tests tests/kubernetes

chaos-ray: $(RAY_STAMP) ## the slow ones of the Ray platform: a machine that is silent for 90 s, and the recommended settings
	$(RAY_BIN)/python -m pytest -m chaos tests/ray

simulate: $(STAMP) ## a million injected faults against the control plane, and 100,000 in parameter-server jobs, on all cores; 100,000 multi-role jobs
	$(BIN)/python -m dlrover.simulator --faults 1000000 --seed 1
	$(BIN)/python -m dlrover.simulator --faults 100000 --seed 1 --tasks
	$(BIN)/python -m tests.unified.core.walks 100000

false-alarms: $(STAMP) ## 10,000 simulated node-days of healthy, busy nodes: nobody may be given up
	$(BIN)/python -m dlrover.simulator --false-alarms --node-days 10000 --seed 1

SEED ?= 1
SAMPLE ?= 500
mutate: $(STAMP) ## 500 small mistakes in the core, one at a time: the goal is that 95 % are noticed (20 to 30 minutes; SEED=N draws others)
	$(BIN)/python -m tools.mutation --seed $(SEED) --sample $(SAMPLE) --fresh --json mutation.json

lock: $(STAMP) ## write the hashes of all pinned files to constraints.locked.txt (about 2 minutes)
	$(BIN)/python tools/dependencies.py lock

# The site builder has an environment of its own: nothing else needs its packages.
DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

$(DOCS_STAMP): pyproject.toml constraints.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt sphinx myst-parser furo
	@touch $@

docs: $(DOCS_STAMP) ## the documentation as a site, in build/site/; a broken link or any other warning is an error
	@$(DOCS_VENV)/bin/sphinx-build -q -W --keep-going -c tools/site -d build/doctrees docs build/site
	@echo "build/site/index.html is the front page."

reference: $(STAMP) ## write the generated pages of docs/reference anew: commands, Python API, settings, error codes
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.error_codes

packages: $(STAMP) ## the sdist and two wheels, in dist/: one that runs everywhere, one with the compiled copy loop
	@rm -rf dist
	$(BIN)/python -m hatchling build
	CC=false $(BIN)/python -m hatchling build -t wheel

licences: $(STAMP) ## write the licences of all pinned packages to docs/reference/licences.md
	$(BIN)/python tools/dependencies.py licences

clean: ## remove what the targets made
	rm -rf $(VENV) $(RAY_VENV) .venv-ray-oldest .venv-grpc-oldest $(TF_VENV) $(NEWEST_TF_VENV) $(TF_CLUSTERS_VENV) $(DOCS_VENV) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
