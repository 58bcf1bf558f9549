# Every target sets up what it needs in .venv; nothing is installed outside the checkout.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: setup demo test test-torch211 lint mutants soak clean

setup: $(VENV)/.ready

# With an accelerator the user's torch is kept (system site packages); without one the index's torch==2.13.0 is a CPU build.
$(VENV)/.ready: pyproject.toml
	@if $(PYTHON) -c "import torch,sys; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(PY) -m pip install -q --disable-pip-version-check torch==2.13.0; \
	fi
	$(PY) -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

demo: setup
	$(PY) bench/demo.py

test: setup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest -n 2 --dist worksteal --durations 60 -m "not slow and not gpu and not multi_gpu" tests

test-torch211:
	$(PYTHON) -m venv .venv-torch211
	.venv-torch211/bin/python -m pip install -q --disable-pip-version-check torch==2.11.0 transformers==5.17.0
	.venv-torch211/bin/python -m pip install -q --disable-pip-version-check -e ".[test]"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-torch211/bin/python -m pytest -n 2 --dist worksteal --durations 60 -m "not slow and not gpu and not multi_gpu" tests

lint: setup
	$(PY) -m mypy

mutants: setup
	$(PY) tests/mutants.py

soak: setup
	$(PY) -m pytest --full-search -m "slow" tests

clean:
	rm -rf $(VENV) .venv-torch211 out build
