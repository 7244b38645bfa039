# make demo: watch a small GPT train with Pier.   make test: the tests.   Both set themselves up.

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# Megatron's Makefile for its dataset helper calls the python3 on the PATH.
export PATH := $(BIN):$(PATH)

# Further releases that tests run on. Their dependencies are those of the pinned release, so each is installed without any,
# in a folder of its own.
MEGATRON_RELEASES := 0.17.1 0.18.2
RELEASES := $(MEGATRON_RELEASES:%=$(VENV)/megatron-%)

.PHONY: setup demo test quick quick-unit quick-training test-newest test-newest-torch test-newest-megatron slurm launchers torture bench gpu study lint typecheck format docs links package clean

setup: $(VENV)/.ready

# What a demo needs: the package, and the optimizers for Muon. make setup adds the tools of tests, pages and evaluation.
$(VENV)/.ready-demo: pyproject.toml setup.py constraints.txt tools/find_python.sh Makefile
	@test -x $(BIN)/python || { python=$$(tools/find_python.sh) && echo "Using $$python" && "$$python" -m venv $(VENV); }
	@echo "Installing PyTorch, megatron-core and this package into $(VENV) ..."
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[muon]'
	@touch $@

$(VENV)/.ready: $(VENV)/.ready-demo
	@echo "Adding the tools of tests, pages and evaluation ..."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[data,dev,docs,downstream]'
	@touch $@

$(VENV)/megatron-%: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ megatron-core==$*
	@touch $@

demo: $(VENV)/.ready-demo
	@$(BIN)/pier-megatron demo

# The wheel of nvidia-resiliency-ext is for a newer C library than some machines have; what is imported of it is Python.
$(VENV)/bridge: $(VENV)/.ready tests/bridge-requirements.txt
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --platform any --platform manylinux2014_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_39_x86_64 \
		--target $@ --requirement tests/bridge-requirements.txt || { rm -rf $@; exit 1; }
	@touch $@

# For two cores: one file waits for its processes while others use the cores. What a file's tests share stays in one process. In the
# order of testpaths, the short tests come last and fill what is left of both processes.
test: setup $(RELEASES)
	@$(MAKE) --no-print-directory $(VENV)/bridge || echo "Megatron-Bridge cannot be installed here: its tests are skipped."
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# What most mistakes break, in a minute: the sources, the unit tests that are quick, one job of the pages from a cold start.
quick: setup
	@$(MAKE) --no-print-directory --jobs 2 quick-training quick-unit typecheck lint

quick-unit: setup
	$(BIN)/python -m pytest -q -m "not slow and not processes" tests/unit tests/pages

quick-training: setup
	$(BIN)/python -m pytest -q "tests/pages/test_shown_jobs.py::test_jobs_shown_whole[0]"

# Before each release of the plugin, by hand; docs/status.md has the result and the date. What pyproject.toml leaves out until
# it was tested is tried here.
test-newest: test-newest-megatron test-newest-torch
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/newest-islands torchft-nightly
	PYTHONPATH=$(CURDIR)/$(VENV)/newest-islands $(BIN)/python -m pytest tests/loop/test_islands_as_jobs.py tests/loop/test_admission_of_islands.py

# On the newest PyTorch of the registry instead of the pinned one; by hand, since it is a download of gigabytes.
test-newest-torch: setup
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/newest-torch torch emerging-optimizers
	PYTHONPATH=$(CURDIR)/$(VENV)/newest-torch $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# On the newest megatron-core of the registry, candidates of releases too: which seams the next release breaks. By hand.
test-newest-megatron: setup
	$(BIN)/python -m pip install --quiet --no-deps --pre --upgrade --target $(VENV)/newest-megatron megatron-core
	PYTHONPATH=$(CURDIR)/$(VENV)/newest-megatron $(BIN)/python -m pytest --numprocesses 2 tests/unit

# The pages' job scripts under a real Slurm, of six nodes on this machine. It installs nothing: apt-get install slurm-wlm munge.
slurm: setup
	$(BIN)/python -m pytest tests/slurm

# The tools of examples/launchers, a gigabyte, in an environment of their own; by hand.
launchers: $(VENV)/launchers
	$(BIN)/python -m pytest tests/launchers

$(VENV)/launchers: $(VENV)/.ready tests/launchers/requirements.txt
	rm -rf $@
	$(BIN)/python -m venv $@
	$@/bin/python -m pip install --disable-pip-version-check --quiet --requirement tests/launchers/requirements.txt || { rm -rf $@; exit 1; }
	@touch $@

torture: setup
	$(BIN)/python tests/end_to_end/torture.py
	$(BIN)/python tests/loop/islands_torture.py
	$(BIN)/python tests/loop/islands_torture.py --overlap 2 --fragments 2 --codec int2

bench: setup
	$(BIN)/python benchmarks/interconnect.py --output runs/bench
	$(BIN)/python benchmarks/outer_step_passes.py

# Without an environment, with the Python on the PATH: a machine with a GPU may have PyTorch and no package index.
gpu:
	$(if $(wildcard $(VENV)/.ready),$(BIN)/python,python3) benchmarks/gpu/run.py --into benchmarks/gpu/results.md

study: setup
	$(BIN)/python study/run.py
	$(BIN)/python study/report.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_docstrings.py pier_megatron study benchmarks tools tests
	$(BIN)/python tools/check_limits.py pier_megatron
	$(BIN)/python tools/check_private.py pier_megatron tests
	$(BIN)/python tools/check_promises.py README.md SECURITY.md docs
	$(BIN)/python tools/check_prose.py README.md CONTRIBUTING.md SECURITY.md docs examples pier_megatron study benchmarks tools tests

typecheck: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site goes to runs/docs; tests/pages hold the pages to the code and to their records, and train the jobs that they show; what made the records is tested with them. A link that leads nowhere in this repository is an error, and so is a page without a place that conf.py does not name.
SPHINX = $(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs
docs: setup
	$(SPHINX) --builder dirhtml . runs/docs
	$(BIN)/python -m pytest -q --numprocesses 2 tests/pages study benchmarks

# Also those into the Internet; by hand.
links: setup
	$(SPHINX) --builder linkcheck . runs/links

package: setup
	rm -rf build dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	tools/try_package.sh $(BIN)/python

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
