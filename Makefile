# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
JOBS ?= 2

# The older Megatron that the patches serve too; beside the environment, never inside it.
MEGATRON_CORE_0171 ?= $(abspath $(VENV)/megatron-core-0.17.1)
export MEGATRON_CORE_0171

.PHONY: setup demo test test-fast lint format docs matrix overhead bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*/*) $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 12))' || \
	  { echo "Megatron needs Python 3.12: set PYTHON to one (now: $(PYTHON))" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt pip setuptools wheel ninja
	$(PIP) install -c constraints.txt torch numpy
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev,megatron,eval]'
	test -d $(MEGATRON_CORE_0171)/megatron || \
	  $(PIP) install --no-deps --target $(MEGATRON_CORE_0171) megatron-core==0.17.1
	touch $@

demo: setup
	$(BIN)/python scripts/demo.py

test: setup
	scripts/browser.sh
	$(BIN)/python -m pytest -q -m 'not matrix'

test-fast: setup
	$(BIN)/python -m pytest -q -m 'not slow and not browser'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

docs: setup
	$(BIN)/python scripts/generate_docs.py

matrix: setup
	$(BIN)/python scripts/matrix.py
	$(BIN)/python -m pytest -q -m matrix

overhead: setup
	$(BIN)/python scripts/overhead.py

bench: setup
	$(BIN)/python scripts/bench_ops.py

clean:
	rm -rf build dist *.egg-info megatron_probes/*.so runs
