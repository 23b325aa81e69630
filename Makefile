# What a newcomer types. Every target first builds the environment in .venv if it is missing or older than
# pyproject.toml; after that it starts at once.
#
#   make demo    the paper's accuracy experiment on this machine: a table and a plot in out/
#   make test    the CPU test suite (on a Hopper GPU, also: make test-gpu)
#   make lint    ruff (rules and format) and mypy, at the versions pinned in pyproject.toml
#   make docs    the documentation as a site, in out/site
#   make bench   forward throughput against the installed peers (needs a Hopper GPU)
#   make clean   remove what these made; also make distclean, which removes .venv too

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# A kernel cannot run without an NVIDIA driver, so a CPU build of torch is enough there: this release has one.
# With a driver, the package index decides, which gives the newest CUDA build.
HAS_DRIVER := $(or $(wildcard /proc/driver/nvidia/version),$(shell command -v nvidia-smi 2>/dev/null))
TORCH := $(if $(HAS_DRIVER),torch,torch==2.13.0)

PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint docs bench clean distclean

help:
	@sed -n '/^# *make /s/^# *//p' Makefile

# One thread: the reference's tiles are small, so on a CPU a second thread saves a fifth of the time at best, and
# on a busy machine the threads spend most of it waiting for each other.
demo: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/hopper-attention rmse --plot out/rmse.png --json out/rmse.json

# Each worker starts with a run of files, since tests of one share what it compiles, and who is done takes half of what
# another has left. One thread each: see demo. Bytecode is kept even where the environment says otherwise, since
# every process that a test starts would compile our sources again.
test: $(STAMP)
	@echo "The CPU test suite: about 27 minutes on two cores, less on more"
	@OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu

lint: $(STAMP)
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	@$(BIN)/hopper-attention bench --json out/bench.json

clean:
	@rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache
	@find python hopper cute_kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv

# python -m venv fails where the system packages pip apart from it; then an environment without pip, filled
# by the system's own pip, does as well.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "hopper-attention needs Python 3.10 or newer, as '$(PYTHON)'. Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip .venv >/dev/null 2>&1 && \
	  $(PYTHON) -m pip --quiet --python .venv install pip >/dev/null 2>&1; } || { rm -rf .venv; \
	  echo "Could not make .venv: '$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Setting up .venv with $(TORCH) (once; some minutes) ..."
	@$(PIP) install -qq --editable '.[test,dev]' '$(TORCH)'
	@touch $@
