# make demo: install what is needed into .venv and watch REINFORCE++ learn; make test: the same for the tests.
PYTHON ?= python3

demo: .venv/installed
	.venv/bin/python reinforce_pp.py

test: .venv/installed-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python -m pytest

# The stamps are younger than the requirements they were installed from, so the second time nothing is installed.
.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@

.PHONY: demo test
