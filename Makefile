# make train    train the embedded default, a minute on two cores (settings: make train ARGS="--set train.steps=100")
# make test     what continuous integration checks on every push; ten minutes on two cores
# make test-all the slow tests too, and a selection without the tests' replacements; an hour
# make lint     the part of it that takes seconds
# make docs     the documentation as a site, in build/site
# make models   examine every causal model type of transformers, and write docs/models.md; 20 minutes
# make mutations  plant errors, one at a time, and print which test catches each; 20 minutes
# make faults   100 runs killed at random moments and resumed; half an hour

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
GPU    := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
# Without an NVIDIA driver a fixed torch; with one, whatever pip chooses for it.
TORCH  := $(if $(GPU),,torch==2.13.0)
# With one, FlashAttention 4 too.
EXTRAS := $(if $(GPU),dev$(shell echo ,)gpu,dev)
# How many tests run at once. On a GPU, those that take much of its memory run one after the other, as a group.
TESTS  := $(if $(GPU),-n 5 --dist loadgroup,-n 2 --dist worksteal)
# Runs with --plain: processes, checkpoints, meshes and measured models, see tests/replacements.py.
PLAIN  := $(patsubst %,tests/test_%.py,checkpoint_files commands_under_torchrun faults general_routing hugging_face \
  launch measured_shapes one_rank parallel_model_parity resume_is_bitwise ring_is_exact train_loop_step_is_exact)

.PHONY: docs train test test-all lint models mutations faults clean

train: $(STAMP)
	$(BIN)/ithaka train $(ARGS)

# Writes bytecode: otherwise each process would rewrite the asserts of all tests again, which takes seconds.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(TESTS) $(ARGS)

test-all: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(TESTS) --slow $(ARGS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest $(TESTS) --plain $(PLAIN)

docs: $(STAMP)
	$(BIN)/python -m pip install -q -e '.[docs]'
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_site.py
	$(BIN)/mkdocs build --strict

models: $(STAMP)
	PYTHONPATH=tests $(BIN)/python docs/make_models.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutations: $(STAMP)
	$(BIN)/python tests/mutations.py $(ARGS)

faults: $(STAMP)
	PYTHONPATH=tests $(BIN)/python tests/faults.py $(ARGS)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ithaka needs Python 3.11 or newer, $(PYTHON) is `$(PYTHON) --version 2>&1`;" \
	       "name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@if [ -n "$(TORCH)" ]; then echo "pip install $(TORCH)"; $(BIN)/python -m pip install -q $(TORCH); fi
	$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
