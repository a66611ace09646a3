# SPDX-License-Identifier: Apache-2.0
# make demo    answer chat prompts with speculation on and off
# make test    every test that needs no GPU
# make fuzz    random requests for MINUTES=10 over STAGES="2 4" each; SEED=... repeats one
# make bench-e2e  on a GPU: decode throughput of CASE=qwen3-32b or llama-8b into OUT=
# make bench-kernels  on a GPU: the kernels beside their rivals, into RESULTS=
# make lint    ruff, mypy, typos and the rules of the repository
# make train-smollm2 DATA=... OUT=...   train and measure what ships, on a GPU, for
#              MINUTES=8.5 at a time; ABLATION=1: what helps instead
# make clean   remove what these leave behind, but for .venv
#
# All but the last set .venv up where it is missing or out of date, and need no network
# afterwards. PYTHON=... chooses an interpreter, 3.11 or 3.12; otherwise one is found.

.PHONY: demo test fuzz bench-e2e bench-kernels train-smollm2 lint clean

PYTHON := python3 python3.12 python3.11
# of make fuzz; a seed that was not given is a new one each time
MINUTES := 10
STAGES := 2 4
SEED := $(shell date +%s)
# of make bench-e2e; run it again where it was cut off, it goes on
CASE := qwen3-32b
OUT := bench/results/h200-halves
# of make bench-kernels, which goes on where it was cut off too
RESULTS := bench/results/h200
GPU_PYTHON := python3
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

demo: .venv/.installed
	.venv/bin/python -m spexis_runtime.demo

test: .venv/.installed
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile

fuzz: .venv/.installed
	FUZZ_MINUTES="$(MINUTES)" FUZZ_STAGES="$(STAGES)" FUZZ_SEED="$(SEED)" \
	    .venv/bin/python -m pytest --capture=no tests/runtime/test_fuzz.py

bench-e2e: .venv/.installed
	.venv/bin/python -m bench.e2e.decode_throughput --shape $(CASE) --out $(OUT)
	.venv/bin/python -m bench.e2e.decode_report $(OUT)

# with the Python of the GPU machine, which has no network to set .venv up
bench-kernels:
	$(GPU_PYTHON) -m pytest -c bench/kernels/pytest.ini --rootdir . \
	    bench/kernels/bench_kernels.py --results "$(RESULTS)" \
	    --benchmark-autosave --benchmark-storage=.benchmarks

train-smollm2: MINUTES := 8.5
train-smollm2: OUT := trained-smollm2
train-smollm2: .venv/.installed
	.venv/bin/python -m bench.train.smollm2 --data "$(DATA)" --out "$(OUT)" \
	    --minutes "$(MINUTES)" $(if $(ABLATION),--ablation)

lint: .venv/.installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/typos
	.venv/bin/python -m pytest --quiet tests/test_repository.py

clean:
	rm -rf build dist *.egg-info demo_report.json
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find spexis_kernels spexis_runtime tests bench -name __pycache__ -prune -exec rm -r {} +

# The stamp is written last: without one, an earlier set-up did not end, and what it left
# is removed.
.venv/.installed: requirements.txt pyproject.toml setup.py
	@set -e; \
	if [ -e $@ ] && .venv/bin/python -c '$(SUITABLE)'; then \
	    echo "spexis: bringing .venv up to date"; \
	    rm $@; \
	else \
	    for python in $(PYTHON); do \
	        ! $$python -c '$(SUITABLE)' 2>/dev/null || break; \
	        python=; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "spexis needs Python 3.11 or 3.12 with its venv module (python3-venv on Debian); found none as: $(PYTHON)" >&2; \
	        exit 1; \
	    fi; \
	    echo "spexis: setting up .venv with $$($$python --version), once; takes some minutes"; \
	    rm -rf .venv; \
	    $$python -m venv .venv; \
	fi; \
	.venv/bin/python -m pip install --no-deps -r requirements.txt; \
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .; \
	touch $@
