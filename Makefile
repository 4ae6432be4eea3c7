# The only task runner. `make demo` and `make test` do all of their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc src -type f) CMakeLists.txt pyproject.toml
CXX_FILES := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
CHECKED := src tests examples benchmarks

.PHONY: help demo test check lint types docs format bench picture wheel clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

$(VENV)/.packages: requirements.txt requirements-no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -r requirements-no-deps.txt
	touch $@

$(VENV)/.library: $(VENV)/.packages $(SOURCES)
	@echo "building the library (one to six minutes with CUDA)"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install --disable-pip-version-check -q --no-deps --no-build-isolation .
	touch $@

demo: $(VENV)/.library ## score a real text with the tiny model, and compare bits over batch layouts
	$(BIN)/detlogp info
	$(BIN)/detlogp score --model examples/tiny-llama --text examples/held-out.txt

test: $(VENV)/.library ## run the tests (those marked cuda where there is a GPU)
	$(BIN)/pytest -n 2

check: lint types docs test ## everything that CI runs

lint: $(VENV)/.packages ## ruff and clang-format, changing nothing
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

types: $(VENV)/.packages ## mypy, strict
	$(BIN)/mypy

docs: $(VENV)/.library ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.packages ## let ruff and clang-format rewrite the files
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/clang-format -i $(CXX_FILES)

bench: $(VENV)/.library ## time forward and backward beside torch, on the GPU if there is one
	$(BIN)/detlogp bench --output build/bench

picture: $(VENV)/.packages ## draw the README's picture from the recorded measurement
	$(BIN)/python examples/drift.py --from benchmarks/results/drift-h200.json --picture docs/images/drift.png

wheel: $(VENV)/.packages ## build the wheel into dist/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .

clean: ## remove what make has made
	rm -rf build dist site $(VENV)
