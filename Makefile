# make sao    from nothing to a self-made preference dataset, on two cores
# make loop   the whole circle: such a dataset, SimPO on it, and the trained model answering
# make test   everything installed, everything checked
# make bench  everything measured, in an hour and a half, on a machine that does nothing else

PYTHON ?= python3
PROMPTS ?= 8
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: sao loop test lint bench

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

test: $(VENV)/test lint
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/test
	@for name in resume own_cost growth verdict_cost publish training engine_busy; do \
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
