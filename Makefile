# make sao    from nothing to a self-made preference dataset, on two cores
# make test   everything installed, everything checked
# make bench  everything measured, in an hour and a half, on a machine that does nothing else

PYTHON ?= python3
PROMPTS ?= 8
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: sao test lint bench

sao: $(VENV)/sao
	$(BIN)/python pipelines/sao.py --num-prompts $(PROMPTS) --max-new-tokens 512 \
	    --audit-modes rating,yesno --audit-prompts 3

test: $(VENV)/test lint
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/test
	@for name in resume own_cost growth verdict_cost publish engine_busy; do \
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
