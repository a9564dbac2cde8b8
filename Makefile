# The whole interface: make build | proto | lint | test | bench | demo.
# Every target sets up what it needs in its own virtual environment; stamps make a second run quick.

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

CREATED := $(VENV)/.openbook-created
INSTALLED := $(VENV)/.openbook-installed
BUILT := $(VENV)/.openbook-built
DEMO_MODEL := $(VENV)/.openbook-demo-model

ROOTS := proto indexstore worker server client
KERNELS := indexstore/openbook/indexstore
KERNEL_SOURCES := $(wildcard $(KERNELS)/*.pyx $(KERNELS)/*.pxd $(KERNELS)/*.h)
PROTO_SOURCES := $(wildcard proto/openbook/v1/*.proto)
BENCH_TEXT ?= examples/esther.txt
BENCH_TOKENS ?= 6400
BENCH_PREDICT ?= 512
STUBBED := $(addprefix openbook.indexstore.,_attend _build _guard _head _layer _probe _search)

.PHONY: build venv proto lint test test-slow bench demo clean
.DELETE_ON_ERROR:

build: $(BUILT)

venv: $(INSTALLED)

$(CREATED): scripts/find_python
	python=$$(sh scripts/find_python) && "$$python" -m venv $(VENV)
	touch $@

# Also compiles the extension in place, in pip's own build environment.
$(INSTALLED): pyproject.toml setup.py constraints.txt scripts/add_roots.py $(CREATED)
	@echo "Installing openbook and its libraries into $(VENV): some minutes, once."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python scripts/add_roots.py $(ROOTS)
	touch $@

# An install has just compiled the extension; only later changes are compiled again.
$(BUILT): $(KERNEL_SOURCES) $(INSTALLED)
	test -z "$$(find $(KERNELS) -name '*.py[xd]' -newer $(INSTALLED) -o -name '*.h' -newer $(INSTALLED))" \
		|| $(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

# The demo model comes without its dependencies, and its checksum is verified.
$(DEMO_MODEL): scripts/demo_model.py $(INSTALLED)
	$(BIN)/python scripts/demo_model.py
	touch $@

proto: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto \
		--grpc_python_out=proto $(PROTO_SOURCES)

lint: $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/stubtest --ignore-disjoint-bases --mypy-config-file pyproject.toml $(STUBBED)
	$(BIN)/buf lint
	$(MAKE) proto
	git diff --exit-code -- proto

test: $(BUILT) $(DEMO_MODEL)
	$(PYTEST) -m "not slow"

test-slow: $(BUILT) $(DEMO_MODEL)
	$(PYTEST) -m slow

# Fidelity of the default budget against full attention, what the receipt says of it, what its keys
# keep of the attention, the kernels; with VECTORS=FILE the index alone as well, beside the rivals of
# INDEXES=graph,scan,flat,ivf,...
# (bench/index.py; the libraries: pip install -e '.[bench]').
bench: $(BUILT) $(DEMO_MODEL)
	$(BIN)/python bench/fidelity.py --text $(BENCH_TEXT) --offset 0 --tokens $(BENCH_TOKENS) \
		--predict $(BENCH_PREDICT)
	$(BIN)/python bench/mass.py --text $(BENCH_TEXT)
	$(BIN)/python bench/recovery.py --text $(BENCH_TEXT) --tokens $(BENCH_TOKENS)
	$(BIN)/python bench/kernels.py
ifdef VECTORS
	$(BIN)/python bench/index.py --vectors $(VECTORS) $(if $(INDEXES),--indexes $(INDEXES))
endif

demo: $(BUILT) $(DEMO_MODEL)
	$(BIN)/openbook demo

clean:
	rm -rf $(VENV) build dist *.egg-info bench/out $(KERNELS)/*.so $(KERNELS)/*.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
