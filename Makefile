# Everything runs from .venv, which the first target that needs it builds; later runs find the stamp and build nothing.
PYTHON ?= python3
JOBS   ?= 2
MODEL  ?= berrylm_ref/checkpoints/nano

# Threads that spin while they wait for each other starve where cores are shared: a twentieth of the speed was measured.
OMP_WAIT_POLICY ?= PASSIVE
export OMP_WAIT_POLICY

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# --dist loadscope keeps the cells of a notebook together, in order, on one worker.
# The cell timeout stops a hung cell by name; pytest's own timeout (pyproject.toml) stands behind it.
NBVAL  := --nbval --nbval-current-env --nbval-cell-timeout=120
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope

.PHONY: demo test lab serve notebooks lint mutants scale-test

demo: $(STAMP)
	$(BIN)/python -m berrylm_ref.demo $(MODEL) tests/golden/hf-tiny-default

test: lint
	$(PYTEST) $(NBVAL)

lab: $(STAMP)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

serve: $(STAMP)
	$(BIN)/berrylm serve --model $(MODEL)

notebooks: $(STAMP)
	$(PYTEST) $(NBVAL) notebooks

lint: $(STAMP)
	$(BIN)/ruff check

mutants: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist load -m mutants tests

# An environment of its own: Ray brings another event loop, on which the server would then run.
scale-test:
	test -x $(VENV)-scale/bin/pip || $(PYTHON) -m venv $(VENV)-scale
	$(VENV)-scale/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,scale]'
	$(VENV)-scale/bin/python -m pytest -m scale tests

# Importing the font manager builds matplotlib's font cache now: a notebook that had to build it would print a message.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(f"berrylm-ref needs Python 3.11 or newer, but $(PYTHON) is {v}. Try: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -c 'import matplotlib.font_manager'
	touch $@
