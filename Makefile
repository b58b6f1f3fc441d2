# Two commands for newcomers: `make demo` and `make test`. Both build what they need in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NATIVE_SOURCES := $(wildcard csrc/*.cpp csrc/*.h)
CLAIMS ?= allreduce
say     = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.DEFAULT_GOAL := help
.PHONY: help demo test bench check format clean

help:  ## show the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

demo: $(VENV)/.ready  ## train a small CNN with 1 worker, then with 2, and compare
	$(call say,running the demo)
	@$(BIN)/python examples/demo.py

test: $(VENV)/.ready  ## run all tests
	$(call say,running the tests)
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

bench: $(VENV)/.ready  ## measure us and the peers into bench/results (as root: between hosts too); CLAIMS=data_parallel, say
	$(call say,measuring $(CLAIMS))
	@$(BIN)/python bench/$(CLAIMS).py --json bench/results/$(CLAIMS).json $(ARGS)

check: $(VENV)/.ready  ## lint, types, layering
	$(call say,ruff)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(call say,mypy --strict)
	@$(BIN)/mypy
	$(call say,import-linter)
	@$(BIN)/lint-imports
	$(call say,clang-format)
	@$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)

format: $(VENV)/.ready  ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix --quiet . && $(BIN)/ruff format . && $(BIN)/clang-format -i $(NATIVE_SOURCES)

clean:  ## remove what was built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# torch comes first and pinned: left to a dependency resolver it would bring gigabytes of CUDA.
$(VENV)/.torch: Makefile
	$(call say,creating $(VENV) and installing torch 2.13.0)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0 numpy
	@$(PIP) "scikit-build-core>=1.0" "nanobind>=2.4" cmake ninja
	@touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml CMakeLists.txt $(NATIVE_SOURCES)
	$(call say,building the native core and installing argosy with what its demo and tests need)
	@$(PIP) --no-build-isolation --editable ".[demo,dev]"
	@$(BIN)/python -m compileall -q argosy  # where Python may not write what it compiles, each worker would anew
	@touch $@
