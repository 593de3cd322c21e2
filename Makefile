# Needs Python >= 3.10 with pip, and a POSIX shell. Everything goes into .venv unless VENV names another environment.
PYTHON ?= python3
# An environment that holds the torch of your device already: make VENV=path/to/env demo
VENV ?= .venv
# What to hand to pip for torch, options included; an environment that has torch keeps the one it has.
TORCH ?= torch
# Results of benchmarks, and the lane of them that is reported and published: single or nightly.
RESULTS ?= results.jsonl
LANE ?= single
BIN := $(VENV)/bin
STAMP := $(VENV)/.halo-vae-installed
# Threads that wait without spinning: fairer on a busy machine.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test browser bench bench-smoke bench-nightly bench-report bench-data bench-publish perf-publish lint clean

demo: $(STAMP)
	$(BIN)/halo-vae demo -o demo_output --force

test: $(STAMP)
	@# Two at a time: each test keeps to tiny tensors, which one core has done before a second would help.
	$(BIN)/pytest -n 2

browser: $(STAMP)
	@# The pages on a stand-in for ComfyUI; those on a real one also want `--with comfyui`. Needs a Chromium.
	$(BIN)/python -m pip install --quiet --editable ".[browser]"
	@# without these every test would be skipped, and nothing would have been tested
	$(BIN)/python -c "import comfyui_frontend_package, playwright.sync_api"
	$(BIN)/pytest -n 2 -m "browser and not comfyui" tests/browser

# BENCH adds flags: make bench BENCH="--vae wan21/4 --scenarios all"
bench: $(STAMP)
	$(BIN)/halo-vae bench -o $(RESULTS) --lane $(if $(filter nightly,$(LANE)),nightly,single) $(BENCH)

bench-smoke: $(STAMP)
	$(BIN)/halo-vae bench --smoke -o $(RESULTS) $(BENCH)

bench-nightly: $(STAMP)
	$(BIN)/halo-vae bench -o $(RESULTS) --lane nightly --scenarios all $(BENCH)

bench-report: $(STAMP)
	$(BIN)/halo-vae report $(RESULTS) --lane $(LANE) -o bench_report.html --force

bench-data: $(STAMP)
	$(BIN)/halo-vae report $(RESULTS) --format json -o bench.json --force

# Commits onto gh-pages, nothing else; PUSH=1 pushes it too.
bench-publish: $(STAMP)
	$(BIN)/halo-vae publish $(RESULTS) --lane $(LANE) $(if $(PUSH),--push)

perf-publish: $(STAMP)
	$(BIN)/halo-vae publish $(RESULTS) --lane instrumented $(if $(PUSH),--push)

lint: $(STAMP)
	$(BIN)/ruff check .
	@# mypy wants a valid package name as the folder's name, and a checkout may have any: look through a link.
	@link=$$(mktemp -d) && ln -s "$(CURDIR)" "$$link/halo_vae" && mypy=$$(cd $(BIN) && pwd)/mypy && \
	(cd "$$link" && "$$mypy" --config-file halo_vae/pyproject.toml --cache-dir halo_vae/.mypy_cache \
	-p halo_vae.optim -p halo_vae.profiling); status=$$?; rm -rf "$$link"; exit $$status

$(BIN)/python:
	@# Some systems ship Python without ensurepip: then the system's pip fills the new environment.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	$(PYTHON) -m pip --python $(BIN)/python install pip; }

$(STAMP): pyproject.toml | $(BIN)/python
	@# torch first, as the user wants it; the package names it without version, so pip leaves it alone afterwards.
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo_output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
