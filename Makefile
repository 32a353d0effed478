# Every command of this project. `make help` lists them.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv/bin
# Inside the environment of ./env, and inside .venv.
IN_ENV := . ./env &&
CACHE := $${SPARK_VLLM_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/spark-vllm}
# Without carets in tracebacks: CPython 3.11 parses source for them, and one such parse inside or beside another ends in
# "AST constructor recursion depth mismatch" (python/cpython#106905), here in hypothesis' own look at a test.
PYTEST := PYTHONNODEBUGRANGES=1 $(VENV)/python -m pytest -q
# Says which step begins, and when: pytest says at its end how long it took.
STEP = @printf '== %s  %s\n' "$$(date +%H:%M:%S)"

.DEFAULT_GOAL := help
.PHONY: soak help up down bootstrap test check lint types format test-unit test-toolchain test-providers test-program test-engine test-slow test-slow-unit test-slow-providers test-campaign \
	test-lab test-lab-serving test-lab-hosts sshd clean-cache

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@printf '  make stack-COMMAND STACK=NAME [ARGS=...]\n'
	@printf '                       operate a stack: %s\n' '$(STACK_COMMANDS)'

up: ## set up, start the lab, deploy stack dev, show its answer
	@exec $(PYTHON) toolchain/up.py

down: ## destroy stack dev, then stop the lab
	@exec $(PYTHON) toolchain/down.py

bootstrap: ## .venv from the lock file, and a Pulumi engine
	@$(PYTHON) toolchain/bootstrap.py

check: lint types ## what must pass before every commit; below two minutes
	@$(MAKE) --no-print-directory -j3 test-unit test-program test-providers

lint: bootstrap ## format and lint, changing nothing
	$(STEP) 'format and lint'
	@$(VENV)/ruff format --check .
	@$(VENV)/ruff check .

types: bootstrap ## static types, strict
	$(STEP) 'static types'
	@$(VENV)/mypy

format: bootstrap ## format, and mend what lint can
	@$(VENV)/ruff check --fix --select I .
	@$(VENV)/ruff format .

test: check test-slow test-toolchain test-engine test-lab ## everything but the campaigns

test-unit: bootstrap ## parsers, plans, settings
	$(STEP) 'unit tests'
	@$(IN_ENV) $(PYTEST) -m 'not slow' tests/unit tests/simulation

test-program: bootstrap ## the program under a mocked engine
	$(STEP) 'program tests (mocked engine)'
	@test ! -d tests/program || { $(IN_ENV) $(PYTEST) tests/program; }

test-providers: bootstrap ## our providers over gRPC
	$(STEP) 'provider tests (gRPC)'
	@test ! -d tests/providers || { $(IN_ENV) $(PYTEST) -m 'not slow' tests/providers; }

test-slow: bootstrap ## those of the unit and provider tests that take minutes
	@$(MAKE) --no-print-directory -j2 test-slow-unit test-slow-providers

test-slow-unit: bootstrap
	$(STEP) 'slow unit tests'
	@$(IN_ENV) $(PYTEST) -m slow tests/unit

test-slow-providers: bootstrap
	$(STEP) 'slow provider tests (gRPC)'
	@$(IN_ENV) $(PYTEST) -m slow tests/providers

test-toolchain: bootstrap sshd ## bootstrap, launcher, plugins; needs an sshd
	$(STEP) 'toolchain tests (plugins, launcher)'
	@$(IN_ENV) SPARK_VLLM_TEST_SSHD="$$(toolchain/sshd.sh)" $(PYTEST) tests/toolchain

test-engine: bootstrap ## plans by the real engine, without any node
	$(STEP) 'engine tests (real engine, no node)'
	@$(IN_ENV) $(PYTEST) -m 'not campaign' tests/engine

# The tests make their own labs and stacks; a home of their own keeps them away from a stack in use. Those that serve a
# model keep the processors busy, the others mostly wait for hosts: they run side by side.
SERVING := tests/lab/test_end_to_end.py tests/lab/test_make.py
test-lab: bootstrap ## end to end on emulated hosts; minutes, root
	@$(MAKE) --no-print-directory -j2 test-lab-serving test-lab-hosts

test-lab-serving: LABS = lab and not campaign
test-lab-serving: LAB_TESTS = $(SERVING)
test-lab-serving: bootstrap
	$(STEP) 'lab tests (emulated hosts that serve a model, end to end; minutes)'
	@$(RUN_LABS)

test-lab-hosts: LABS = lab and not campaign
test-lab-hosts: LAB_TESTS = tests/lab $(SERVING:%=--ignore=%)
test-lab-hosts: bootstrap
	$(STEP) 'lab tests (emulated hosts; minutes)'
	@$(RUN_LABS)

soak: bootstrap ## faults one after another on the deployed stack dev; hours
	$(STEP) 'faults and a soak (deployed stack dev; hours)'
	@$(IN_ENV) $(VENV)/python -m bench.faults --rounds 1 --soak 200

test-campaign: LABS = lab and campaign
test-campaign: LAB_TESTS = tests/lab
test-campaign: bootstrap ## long tests: killed runs, healing, lost nodes; not part of `make test`
	$(STEP) 'killed runs (real engine, no node; many minutes)'
	@$(IN_ENV) $(PYTEST) -m campaign tests/engine
	$(STEP) 'long lab tests (emulated hosts; many minutes)'
	@$(RUN_LABS)

define RUN_LABS
home=$$(mktemp -d "$${TMPDIR:-/tmp}/spark-vllm-test.XXXXXX") && \
trap 'rm -rf "$$home"' EXIT && trap 'exit 130' INT TERM && \
export SPARK_VLLM_HOME="$$home" && $(PYTHON) toolchain/bootstrap.py && \
unset PULUMI_STACK && $(IN_ENV) $(PYTEST) -m '$(LABS)' $(LAB_TESTS)
endef

# Operating a stack, such as `make stack-drift STACK=spark ARGS=--json`; docs/automation.md has every command.
STACK_COMMANDS := preview up refresh destroy drift rollback status logs doctor stop start maintenance render report bench monitoring history use cutover
.PHONY: $(addprefix stack-,$(STACK_COMMANDS))
$(addprefix stack-,$(STACK_COMMANDS)): stack-%:
	@$(IN_ENV) exec python -m automation $* $(if $(STACK),--stack $(STACK)) $(ARGS)

sshd: ## an sshd for the tests; unpacked into the cache, not installed
	@toolchain/sshd.sh > /dev/null

clean-cache: ## remove what was built or fetched; state and passphrase stay
	@rm -rf -- "$(CACHE)/toolchain" "$(CACHE)/uv" "$(CACHE)/sshd" "$(CACHE)/registry" "$(CACHE)/seeing" && echo "removed from $(CACHE)"
