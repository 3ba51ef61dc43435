# `make` or `make help` lists the targets. Python 3.11, a C++17 compiler and make are all
# that must be installed: everything else, cmake and ninja included, comes by pip.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= demo,bench
TEST_WORKERS ?= 3
BAZEL ?= bazel
# What `make gpu-test` installs into $(VENV) where $(PYTHON) lacks JAX for CUDA.
GPU_EXTRA ?= cuda13
ARGS ?=
DOCS_NOTEBOOKS ?= force

# The interpreter's ABI, such as cpython-311-x86_64-linux-gnu. It names the virtual
# environment's stamp and the build folder: another $(PYTHON) never meets old objects.
ABI := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))' 2>/dev/null)
BUILD := build/$(patsubst .%,%,$(notdir $(VENV)))-$(ABI)

BIN := $(VENV)/bin
# -P and PYTHONSAFEPATH (for child processes): what runs is the installed package. The
# source folder jaxcomm/, which lacks the extension, would hide it from the repository root.
# Bytecode is kept, whatever the environment says: tests start hundreds of processes.
RUN := PYTHONDONTWRITEBYTECODE= PYTHONSAFEPATH=1 $(BIN)/python -P
# cmake and ninja of the virtual environment first, those of the system second.
TOOLS := PATH="$(abspath $(BIN)):$$PATH"
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(TOOLS) $(BIN)/python -m pip install --quiet
FAKE_NCCL = JAXCOMM_TEST_FAKE_NCCL="$(abspath $(BUILD))/libjaxcomm_fake_nccl.so"
# What XLA compiled for tests. 65 of attention and dtypes took 50 s of CPU time, and 23 s again.
TEST_CACHE = JAXCOMM_TEST_CACHE="$(abspath $(BUILD))/compiled"
PYTEST = -m pytest -n $(TEST_WORKERS) --dist worksteal
# What became of each test, and its seconds: for tools/second_try.py and tests/times.toml.
REPORT = -o junit_family=xunit1 --junitxml=$(BUILD)/pytest.xml
RELEASE = PYTHONPATH="$(CURDIR)/tools" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -P -m
PIP_BUILD := $(PIP) --no-build-isolation --config-settings=build-dir=$(BUILD)

VENV_MADE := $(VENV)/.python-$(ABI)
BUILD_REQUIRES := $(VENV)/.build-requires
RELEASE_REQUIRES := $(VENV)/.release-requires
INSTALLED := $(VENV)/.installed
SOURCES := $(shell find jaxcomm ffi -type f ! -path '*/__pycache__/*' ! -name '*.so' 2>/dev/null | LC_ALL=C sort)
CXX_FILES = $(shell find ffi tests/ffi tests/doubles benchmarks -name "*.cc" -o -name "*.h" -o -name "*.inc" -o -name "*.cu")
CLANGXX ?= clang++
# The compiler of the GPU kernels, beside .venv: jax[cuda12] needs a newer one there.
NVRTC := build/nvrtc
# Not $(MAKE) in a recipe: `make -n check` would run it.
SUBMAKE := $(MAKE) --no-print-directory
LINT_REQUIRES := $(VENV)/.extra-dev $(NVRTC)/.installed
NOTEBOOKS = $(wildcard notebooks/*.ipynb)

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# Two pips in one environment trip over each other; ninja uses all cores by itself.
.NOTPARALLEL:
.DEFAULT_GOAL := help

# C++ tests of `make check`: planning, one process, several processes, sums, NCCL.
CHECK_CPP := plan_test|local_test|crossing_test|reduce_test|fake_nccl_test

.PHONY: help demo test test-all pytest reports times gpu-test coverage check smoke smoke-tests doubles mutation mutation-cpp install develop cpptest cppbuild planbench sanitize soak lint format stubs ptx bench \
  bench-plots notebooks docs wheel release-check clean bazel-test FORCE

help: ## list the targets
	@echo 'make TARGET [VARIABLE=value ...]'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /  \1|/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-13s %s\n", $$1, $$2}'
	@echo
	@echo '  ARGS=...         passed on: make demo ARGS="--steps 5", make test ARGS="-k psum"'
	@echo '  PYTHON=...       interpreter that .venv is made with (now: $(PYTHON)); when its version'
	@echo '                   changes, .venv is made anew. To keep both: VENV=.venv-3.13'
	@echo '  EXTRAS=...       extras of `make install` (now: $(EXTRAS))'
	@echo '  DOCS_NOTEBOOKS=off  make docs does not run notebooks (now: $(DOCS_NOTEBOOKS)); cache: changed ones'
	@echo '  TEST_WORKERS=... pytest processes (now: $(TEST_WORKERS)); each simulates 8 devices'

demo: $(VENV)/.extra-demo ## train a small language model over a ring of virtual devices
	@PYTHONPATH="$(CURDIR)/examples" $(RUN) -m language_model $(ARGS)

test: $(VENV)/.extra-test cpptest ## C++ and Python tests against the installed package
	@$(SUBMAKE) pytest

# worksteal: a worker has whole files, and with them what their tests share.
pytest: $(VENV)/.extra-test cppbuild
	@find $(BUILD)/compiled -type f -atime +7 -delete 2> /dev/null || true
	@$(FAKE_NCCL) $(TEST_CACHE) $(RUN) $(PYTEST) $(REPORT) $(ARGS)

test-all: ## `make test` with what is thorough too: all restarts, sizes and notebooks; then `make soak`
	@$(SUBMAKE) test ARGS='--thorough $(ARGS)'
	@[ -n '$(ARGS)' ] || $(SUBMAKE) soak

reports:
	@echo '$(abspath $(BUILD))'

times: ## write what the last `make test` took, by folder, into tests/times.toml
	@$(BIN)/python tools/test_times.py --write $(BUILD)/pytest.xml

gpu-test: ## tests/gpu on a machine with NVIDIA GPUs
	@status=0; $(PYTHON) tools/gpu_test.py --serves || status=$$?; \
	case $$status in 0) exec $(PYTHON) tools/gpu_test.py $(ARGS);; 2) ;; *) exit $$status;; esac; \
	$(SUBMAKE) $(VENV)/.extra-test $(VENV)/.extra-$(GPU_EXTRA); \
	exec $(BIN)/python tools/gpu_test.py $(ARGS)

# coverage.py follows the processes that tests start, see [tool.coverage.run]. From Python
# 3.12 on it is told of each line once, and not at each call.
coverage: $(VENV)/.extra-test doubles ## the Python tests, and the lines of jaxcomm/ that none of them runs
	@rm -rf build/coverage; mkdir -p build/coverage
	@core=$$($(RUN) -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")'); \
	COVERAGE_CORE=$$core $(FAKE_NCCL) $(TEST_CACHE) $(RUN) -m coverage run $(PYTEST) $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

install: $(VENV)/.extra-$(EXTRAS) ## make .venv and install jaxcomm into it
	@echo 'jaxcomm is installed: source $(BIN)/activate'

# Python started in the repository root finds jaxcomm/ there before the installed one.
develop: $(VENV)/.extra-$(EXTRAS) ## put the extension into jaxcomm/, to work in the tree
	@$(TOOLS) cmake --install $(BUILD) --prefix . --component module > /dev/null
	@echo 'Run from the repository root: $(BIN)/python -m pytest'

# What breaks most things breaks one of these. Most of lint has one thread: tests use the
# other cores meanwhile.
check: $(VENV)/.extra-test $(LINT_REQUIRES) cppbuild ## lint, types and one test of each file: the inner loop
	@$(SUBMAKE) lint > $(BUILD)/lint.log 2>&1 & lint=$$!; trap 'kill $$lint 2> /dev/null || true' EXIT; status=0; \
	$(TOOLS) ctest --test-dir $(BUILD) -j 2 --output-on-failure --no-tests=error -R '^($(CHECK_CPP))$$' || status=$$?; \
	$(FAKE_NCCL) $(TEST_CACHE) $(RUN) $(PYTEST) --one-of-each $(ARGS) || status=$$?; \
	wait $$lint || status=$$?; cat $(BUILD)/lint.log; exit $$status

# For a second Python: make smoke PYTHON=python3.13 VENV=.venv-3.13
smoke: $(VENV)/.extra-test doubles ## one test of each file, without lint and C++ tests
	@$(SUBMAKE) smoke-tests

doubles: $(INSTALLED)
	@$(TOOLS) cmake -S . -B $(BUILD) -DJAXCOMM_BUILD_FAKE=ON > /dev/null
	@$(TOOLS) cmake --build $(BUILD) --target jaxcomm_fake_nccl jaxcomm_fake_flash > /dev/null

# tools/newer_jax.py runs it too, and has nothing built for its JAX.
smoke-tests:
	@$(FAKE_NCCL) $(TEST_CACHE) $(RUN) $(PYTEST) $(REPORT) --one-of-each $(ARGS)

# Side by side: most of their time they wait for a timeout or another process.
cpptest: cppbuild ## C++ tests, built from the objects of the installed extension
	@$(TOOLS) ctest --test-dir $(BUILD) -j 4 --output-on-failure --no-tests=error \
	  --output-junit $(abspath $(BUILD))/ctest.xml $(CTEST_ARGS)

cppbuild: $(INSTALLED)
	@$(TOOLS) cmake -S . -B $(BUILD) -DJAXCOMM_BUILD_TESTS=ON > $(BUILD)/cpptest.log 2>&1 \
	  && $(TOOLS) cmake --build $(BUILD) >> $(BUILD)/cpptest.log 2>&1 \
	  || { cat $(BUILD)/cpptest.log >&2; exit 1; }

planbench: $(INSTALLED) ## time and memory of planning on one rank of 1,024, without devices
	@$(TOOLS) cmake -S . -B $(BUILD) -DJAXCOMM_BUILD_TESTS=ON > /dev/null
	@$(TOOLS) cmake --build $(BUILD) --target plan_bench > /dev/null
	@$(BUILD)/plan_bench $(ARGS)

# setarch -R: ThreadSanitizer refuses the address layouts of kernels with many random bits.
sanitize: $(BUILD_REQUIRES) ## C++ tests under ThreadSanitizer, then Address- and UBSanitizer
	@norandom=""; if setarch -R true 2>/dev/null; then norandom="setarch -R"; fi; \
	for sanitizer in thread address,undefined; do \
	  echo "==> C++ tests under -fsanitize=$$sanitizer"; \
	  folder=build/sanitize-$${sanitizer%%,*}; \
	  $(TOOLS) cmake -S . -B $$folder -G Ninja --log-level=WARNING -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g" -DJAXCOMM_SANITIZE=$$sanitizer \
	    -DJAXCOMM_BUILD_MODULE=OFF -DJAXCOMM_BUILD_TESTS=ON -DPython_EXECUTABLE="$(abspath $(BIN)/python)"; \
	  $(TOOLS) cmake --build $$folder --parallel -- --quiet; \
	  TSAN_OPTIONS="halt_on_error=1 report_thread_leaks=0 second_deadlock_stack=1 $${TSAN_OPTIONS:-}" \
	  ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1 $${ASAN_OPTIONS:-}" \
	  UBSAN_OPTIONS="print_stacktrace=1 $${UBSAN_OPTIONS:-}" \
	  $(TOOLS) $$norandom ctest --test-dir $$folder -j 2 --output-on-failure --no-tests=error; \
	done

mutation: develop $(VENV)/.extra-test cpptest ## run tests on 200 defects, and write docs/mutation.md (hours)
	@$(FAKE_NCCL) PYTHONPATH="$(CURDIR)/tools" $(BIN)/python -m mutation $(ARGS)

# In a build of its own, with the tools that .venv has.
mutation-cpp: $(VENV)/.extra-test $(BUILD_REQUIRES) ## C++ tests and pytest on 100 defects in ffi/ (hours)
	@$(TOOLS) PYTHONPATH="$(CURDIR)/tools" $(BIN)/python -m mutation.cpp $(ARGS)

soak: $(INSTALLED) ## 100,000 mixed collectives between processes, every result checked
	@PYTHONPATH="$(CURDIR)/tests:$(CURDIR)/tests/support" $(RUN) -m jaxcomm.launch -n 2 --no-prefix -m stress.worker $(ARGS)

lint: $(LINT_REQUIRES) ## ruff, pyright, clang-format, notebooks, PTX, prose, locks, layers, how tests wait
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify --keep-id $(NOTEBOOKS))
	$(BIN)/pyright --pythonpath $(abspath $(BIN))/python
	$(BIN)/python tools/make_ptx.py --check
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/layers.py
	$(BIN)/python tools/error_page.py
	$(BIN)/python tools/test_waits.py
	$(BIN)/python tools/test_times.py
	@CLANGXX="$(CLANGXX)" $(BIN)/python tools/thread_safety.py $(BUILD)/thread-safety

format: $(VENV)/.extra-dev ## rewrite Python, C++ and notebooks in the project's style
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --keep-id $(NOTEBOOKS))

stubs: $(INSTALLED) ## write jaxcomm/_ffi.pyi from the built extension
	@$(TOOLS) cmake --install $(BUILD) --prefix . --component stub > /dev/null
	@echo 'wrote jaxcomm/_ffi.pyi'

ptx: $(NVRTC)/.installed ## compile the GPU kernels to the PTX that is checked in
	@$(BIN)/python tools/make_ptx.py

bench: $(VENV)/.extra-bench ## measure against jax.lax: make bench ARGS="collectives --devices 8"
	@PYTHONPATH="$(CURDIR)/benchmarks:$(CURDIR)/examples" $(RUN) -m bench $(ARGS)

bench-plots: $(VENV)/.extra-bench ## draw docs/figures/*.json, one a machine, for README.md and docs/performance.md
	@PYTHONPATH="$(CURDIR)/benchmarks" $(RUN) -m bench.figures docs/figures README.md docs/performance.md

notebooks: $(VENV)/.extra-notebooks ## open the notebooks in Jupyter
	@PYTHONSAFEPATH=1 PYTHONPATH="$(CURDIR)/examples" $(BIN)/jupyter lab notebooks $(ARGS)

# -E: every page anew, since a page of docs/api follows what the package exports.
docs: $(VENV)/.extra-docs ## build the site into build/docs, notebooks executed (minutes)
	@DOCS_NOTEBOOKS="$(DOCS_NOTEBOOKS)" $(RUN) -m sphinx -q -E -n -W --keep-going -c docs $(ARGS) . build/docs
	@echo 'Open build/docs/index.html'

# In environments of their own, with the oldest jaxlib's headers: see pyproject.toml.
wheel: $(RELEASE_REQUIRES) ## build dist/jaxcomm-*.whl for every Python and jaxlib; glibc 2.28 or newer; and without the extension
	@$(RELEASE) release.wheels $(ARGS)

release-check: $(VENV)/.extra-test $(RELEASE_REQUIRES) ## all that a release must pass (an hour); goes on where it was ended
	@$(RELEASE) release $(ARGS)

bazel-test: $(VENV)/.extra-test ## build and test with Bazel (apt install bazel-bootstrap), offline
	@command -v $(BAZEL) > /dev/null || { echo 'make: no $(BAZEL). Debian: apt install bazel-bootstrap' >&2; exit 1; }
	PYTHON="$(abspath $(BIN)/python)" $(BAZEL) test $(ARGS) //:all //tests/bazel:all

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	rm -f jaxcomm/_ffi*.so
	find jaxcomm tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

# ---- how .venv comes about; one stamp file a step -------------------------------------

$(VENV_MADE):
	@$(PYTHON) -c '' 2>/dev/null || { echo 'make: cannot run $(PYTHON). Install Python 3.11 or newer, or name one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: jaxcomm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo 'make: $(PYTHON) lacks the venv module. Debian, Ubuntu: apt install python3-venv' >&2; exit 1; }
	@if [ -e $(VENV) ] && ! ls $(VENV)/.made-by-make > /dev/null 2>&1; then \
	  echo 'make: $(VENV) exists and was not made by this Makefile. Move it away or choose another: make VENV=.venv-jaxcomm' >&2; exit 1; fi
	@echo "==> $(VENV): a virtual environment with $$($(PYTHON) -V)"
	@base=$$($(PYTHON) -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))'); \
	  rm -rf $(VENV); mkdir -p $(VENV); touch $(VENV)/.made-by-make; "$$base" -m venv $(VENV)
	@touch $@

# The project's dependencies come in this step and before the build requirement's old
# jaxlib: here the extension is compiled against the jaxlib that it will run with.
$(BUILD_REQUIRES): pyproject.toml $(VENV_MADE)
	@found=; for compiler in $${CXX:-c++ g++ clang++}; do ! command -v $$compiler > /dev/null || found=1; break; done; \
	  [ -n "$$found" ] || { echo "make: no C++ compiler ($${CXX:-c++, g++ or clang++}). Debian, Ubuntu: apt install g++. Or name one: make CXX=..." >&2; exit 1; }
	@echo '==> installing jax and the build tools'
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*(r for r in p["build-system"]["requires"] if not r.startswith("jaxlib")), *p["project"]["dependencies"], *p["tool"]["jaxcomm"]["tried"], "cmake", "ninja", sep="\n")' > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

# Without jaxcomm, so that `make wheel` needs no compiler of the machine.
$(RELEASE_REQUIRES): pyproject.toml $(VENV_MADE)
	@echo '==> installing what builds and checks wheels'
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*p["project"]["optional-dependencies"]["release"], sep="\n")' > $@.txt
	@$(PIP) -r $@.txt
	@touch $@

# Written when the list of files changes, so that a deleted file counts as a change too.
build/sources.list: FORCE
	@mkdir -p build
	@printf '%s\n' $(SOURCES) | cmp -s - $@ || printf '%s\n' $(SOURCES) > $@

# The stamp bears the time at which the build began: a file saved meanwhile is newer.
$(INSTALLED): $(BUILD_REQUIRES) build/sources.list CMakeLists.txt $(SOURCES)
	@echo '==> building and installing jaxcomm'
	@touch $@.begun
	@$(PIP_BUILD) --no-deps --force-reinstall .
	@mv $@.begun $@

$(NVRTC)/.installed: pyproject.toml $(VENV_MADE)
	@rm -rf $(NVRTC)
	@$(PIP) --no-deps --target $(NVRTC) "$$($(BIN)/python tools/make_ptx.py --requirement)"
	@touch $@

$(VENV)/.extra-%: $(BUILD_REQUIRES) | $(INSTALLED)
	@echo '==> installing what jaxcomm[$*] needs'
	@$(PIP_BUILD) '.[$*]'
	@touch $@
