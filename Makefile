# Everything sets itself up on a Debian or Ubuntu machine, as root: `make demo` shows the main job, `make test` tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv proto native demo test test-fast test-unit search test-contract test-system test-cluster test-browser critest client-tests conformance bench bench-gpu docs docs-serve shell clean

help:
	@echo "make demo         run the main job in a throw-away node"
	@echo "make test         run all tests: unit here, the others in nodes of all lanes (NODES=3 at a time)"
	@echo "make test-fast    run the unit tests and a few in one lane of the lab, for the inner loop"
	@echo "make test-unit    run the tests that need neither root nor network (within a minute)"
	@echo "make search       try the properties of the unit tests on a thousand random examples each"
	@echo "make test-system LANE=trixie PYTEST_ARGS='-k exec'    run one lane, or a part of it"
	@echo "make test-cluster run the tests of pods under a real kubelet, in a cluster"
	@echo "make test-browser run the tests of the web page in Chromium"
	@echo "make critest      run CRI's validation suite by containerd's shim and by ours, and compare (HANDLERS='runc kybernate')"
	@echo "make client-tests run containerd's own tests of its client by containerd's shim and by ours, and compare"
	@echo "make conformance  run Kubernetes' own tests by containerd's shim and by ours, and compare (PORTIONS=node, FOCUS=Probing)"
	@echo "make bench        measure against containerd's own shim, into build/bench.jsonl (LANE=, FIGURES='restore.* cluster.*')"
	@echo "make bench-gpu    measure the data path on a machine with a real GPU, into build/bench-gpu.jsonl (tests/gpu/README.md)"
	@echo "make shell LANE=sid    open a shell in a throw-away node; with LANE=cluster NODES=2, in a cluster of two"
	@echo "make docs         build the manual as a site, into build/site; make docs-serve shows it on localhost:8000"
	@echo "make proto        generate messages from proto/"
	@echo "make native       compile what is in C: the program that containerd executes, the arena's library"
	@echo "make clean        remove what was built in this checkout (the lab's cache stays)"

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || apt-get install -y --no-install-recommends python3-venv
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[all,haproxy,postgresql,tracing,traces,test,browser,dev,docs]'
	touch $@

proto: venv
	$(BIN)/python -m tools.generate_messages

native:
	$(PYTHON) kybernate_shim/native.py

# In sid: CRIU before 4.2, as in trixie, dumps no program that listens where Linux is 6.16 or newer.
demo:
	tests/lab/run $(or $(LANE),sid) -- /opt/kybernate/bin/python -m tests.system.demo

test: venv
	$(BIN)/python tests/run_all.py $(NODES)

# For the inner loop: unit tests, and in one lane a container's life, the protocol and the CUDA helper.
test-fast: test-unit
	tests/lab/run $(or $(LANE),trixie) -- /opt/kybernate/bin/python -m pytest tests/system/test_run.py \
	    tests/contract/test_ttrpc_codec.py tests/contract/cuda_driver/test_cuda_helper.py $(PYTEST_ARGS)

test-unit: venv
	$(BIN)/python -m pytest -n auto --dist worksteal tests/unit $(PYTEST_ARGS)

search: venv
	$(BIN)/python -m pytest -n auto --hypothesis-profile=search -m hypothesis tests/unit $(PYTEST_ARGS)

test-contract test-system: test-%:
	tests/lab/run $(or $(LANE),trixie) -- /opt/kybernate/bin/python -m pytest tests/$* $(PYTEST_ARGS)

# In a cluster of one node, whatever NODES says: many tests act on the node of their pods, and know of one. Pods that name
# no class run under DEFAULT_RUNTIME. What needs more nodes is in tests/cluster/three_nodes, as tests/lanes.py runs it.
test-cluster:
	tests/lab/run --nodes 1 $(or $(LANE),cluster) -- /opt/kybernate/bin/python -m pytest tests/cluster \
	    --ignore tests/cluster/three_nodes $(PYTEST_ARGS)

test-browser: venv
	$(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

# Some minutes for each handler, of which most are waits. The logs and the tables are in build/critest.
critest:
	tests/lab/run next -- /opt/kybernate/bin/python -m tests.system.critest $(HANDLERS)

# Some minutes for each shim, in a containerd of the tests' own. The logs and the tables are in build/client-tests.
client-tests:
	KYBERNATE_LAB_PROGRAMS=containerd-client tests/lab/run next -- /opt/kybernate/bin/python -m tests.system.client_tests $(HANDLERS)

# More than an hour: each portion of tests/conformance/specs.py by both handlers, in a cluster of its own.
conformance: venv
	$(BIN)/python -m tests.conformance $(PORTIONS) $(if $(FOCUS),--focus '$(FOCUS)') $(if $(PROCESSES),--processes $(PROCESSES))

# All lanes are measured, one after the other, before a missed bar fails the target. FIGURES='restore.* cluster.*' picks.
bench: venv
	set -f; $(BIN)/python -m tests.bench.lanes $(if $(LANE),--lane $(LANE)) $(FIGURES)

# On the machine with the GPU, which needs build/gpu-kit and no network. ARGS='--gib 2,16 --rounds 5' picks.
bench-gpu:
	tests/gpu/bench $(ARGS)

docs: venv
	$(BIN)/python -m tools.generate_docs
	$(BIN)/python -m tests.browser.screenshots
	$(BIN)/python -m mkdocs build

docs-serve: venv
	$(BIN)/python -m mkdocs serve

shell:
	tests/lab/run $(or $(LANE),trixie)

clean:
	rm -rf build dist *.egg-info $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
