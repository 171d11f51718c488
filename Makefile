# make sao    from nothing to a self-made preference dataset, on two cores
# make loop   the whole circle: such a dataset, SimPO on it, and the trained model answering
# make test   everything installed, everything checked
# make bench  everything measured, in an hour and a half, on a machine that does nothing else

PYTHON ?= python3
PROMPTS ?= 8
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: sao loop test lint browser bench

sao: $(VENV)/sao
	$(BIN)/python pipelines/sao.py --num-prompts $(PROMPTS) --max-new-tokens 512 \
	    --audit-modes rating,yesno --audit-prompts 3

# A dataset, an adapter trained on it, the adapter as GGUF, and a second round's dataset from it.
LOOP := runs/loop
loop: $(VENV)/test
	$(BIN)/python pipelines/sao.py --num-prompts $(PROMPTS) --max-new-tokens 200 --keep-truncated \
	    --judge-mode rating --output-dir $(LOOP)/pairs
	$(BIN)/python recipes/simpo.py --config recipes/qwen2.5-coder-0.5b/simpo.yaml \
	    --dataset $(LOOP)/pairs --output_dir $(LOOP)/model
	test -f $(LOOP)/model/adapter.gguf || $(BIN)/python recipes/to_gguf.py $(LOOP)/model \
	    --output-file $(LOOP)/model/adapter.gguf
	$(BIN)/python pipelines/sao.py --model embedded+$(LOOP)/model/adapter.gguf --num-prompts 2 \
	    --max-new-tokens 200 --keep-truncated --judge-mode rating --seed 1 \
	    --output-dir $(LOOP)/round-2

test: $(VENV)/test lint browser
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The page of a report is opened in Debian's Chromium, where it is or can be installed.
browser:
	@has() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }; \
	if ! has && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing chromium, which opens the pages of reports'; \
	  (apt-get update && apt-get install --yes --no-install-recommends \
	    chromium chromium-driver) >/dev/null 2>&1; \
	fi; \
	has || echo 'without chromium and chromium-driver the tests of pages are left out'

bench: $(VENV)/test
	@for name in resume own_cost growth verdict_cost publish training evaluation engine_busy; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; echo; \
	done
	@$(BIN)/python -m benchmarks.kills

# A stamp file says which set of packages a venv holds, and when.
$(VENV)/sao: pyproject.toml constraints.txt | $(VENV)/new
	@echo 'installing what the main job needs (no torch)'
	@$(PIP) --editable '.[embedded]'
	@touch $@

$(VENV)/test: pyproject.toml constraints.txt | $(VENV)/new
	@echo 'installing everything'
	@$(PIP) --editable '.[embedded,train,eval,review,test]'
	@touch $@ $(VENV)/sao

$(VENV)/new:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	@echo 'making $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@
