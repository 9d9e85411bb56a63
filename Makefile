# Two commands do all the set-up on a machine with Python >= 3.11 and make: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# The peers of the benchmarks, apart from everything that Turnmill needs.
PEERS := .venv-peers
# One torch thread a process: more of them collapse when processes share the cores.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: install demo demo-aws check format test test-aws test-control-plane test-agents test-examples test-training learning verify \
  faults bench bench-peers docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip -c constraints.txt
	$(BIN)/python -m pip install --quiet torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[train,dev]' -c constraints.txt
	@touch $@

# What the tests of an extra need that is too heavy for everybody.
$(VENV)/.mlflow: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[mlflow]' -c constraints.txt
	@touch $@

# Agents and environments of others that the tests play unmodified.
$(VENV)/.agents: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[verifiers]' 'pydantic-ai-slim[openai]' -c constraints.txt
	@touch $@

demo: install
	@$(BIN)/turnmill demo $(DEMO_ARGS)

# The same training through AWS services alone, on an emulator: queues, records, blobs, metrics and alerts.
demo-aws: install
	@$(BIN)/python -m tests.aws.demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_docs.py --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install
	$(BIN)/pytest -n 2 -m "not slow" $(TEST_ARGS)

# What the control plane promises, on real processes: minutes. It ends with the figures; `make verify` runs it too.
test-control-plane: install
	$(BIN)/pytest -n 2 tests/control_plane tests/unit/alerts tests/contracts/test_notifier_contract.py $(TEST_ARGS)

# What runs on AWS services promise, on an emulator: every adapter, stacks, functions, whole runs, faults. It ends with the
# figures; `make verify` runs it too.
test-aws: install
	$(BIN)/pytest -n 2 tests/aws tests/contracts $(TEST_ARGS)

# What agents and environments of others are promised: clients as they are, tools in chat templates, branches, kills in
# conversations, environments and their boxes, the tool-calling example trained. It ends with the figures; `make verify`
# runs it too.
AGENT_TESTS := tests/unit/conversation tests/unit/environment tests/unit/generation tests/unit/rollout tests/unit/serving \
  tests/unit/training/test_training_branches.py tests/unit/training/test_training_samples.py tests/e2e/test_agent_calls.py \
  tests/e2e/test_boxed_runs.py tests/e2e/test_trained_branches.py tests/e2e/test_choices_and_texts.py tests/e2e/test_conversations.py \
  tests/e2e/test_group_rewards.py tests/e2e/test_kills_in_conversations.py tests/e2e/test_openai_agents.py \
  tests/e2e/test_sql_agent_learns.py tests/e2e/test_tool_agents.py tests/e2e/test_forced_calls_are_trained.py \
  tests/e2e/test_verifiers_runs.py tests/unit/wiring/test_boxed_preflight.py
test-agents: $(VENV)/.agents test-examples
	$(BIN)/pytest -n 2 $(AGENT_TESTS) $(TEST_ARGS)

# The tests that the examples in custom-environments bring with them.
test-examples: install
	$(foreach folder,$(wildcard custom-environments/*/tests),$(BIN)/pytest $(folder) && )true

# What the training engine promises: every algorithm against NumPy, adapters, staleness, replicas, evaluations, the gate,
# rescoring, unread parameters; then what each variant learns, and rollouts beside steps. `make verify` runs all of it too.
TRAINING_TESTS := tests/unit/training tests/unit/test_evaluation.py tests/unit/test_evaluation_records.py \
  tests/unit/test_evaluation_statistics.py tests/unit/pipeline/test_promotion.py tests/unit/config/test_config_reads.py \
  tests/unit/conversation/test_evaluation_sampling.py tests/unit/conversation/test_moved_calls.py \
  tests/unit/conversation/test_replayed.py tests/unit/conversation/test_routing.py \
  tests/unit/generation/test_engine_adapters.py tests/unit/generation/test_proved_weights.py \
  tests/unit/wiring/test_rescoring.py tests/unit/wiring/test_rescoring_comparison.py tests/e2e/test_async_runs.py \
  tests/e2e/test_curriculum_runs.py tests/e2e/test_evaluated_runs.py tests/e2e/test_lora_runs.py tests/e2e/test_replicas.py \
  tests/e2e/test_rescoring_runs.py tests/e2e/test_resume.py
test-training: install
	$(BIN)/pytest -n 2 --dist worksteal $(if $(FULL),,-m "not long") $(TRAINING_TESTS) $(TEST_ARGS)
	$(MAKE) learning
	$(BIN)/python -m benchmarks.run_all --only async_steps --strict $(if $(FULL),,--quick)

# Three seeds of each variant with FULL=1, which writes docs/results/learning.md; one of the default otherwise.
learning: install
	$(BIN)/python -m benchmarks.learning_table $(if $(FULL),--seeds 0 1 2 --write,--seeds 0 --variants "group_based + ppo")

# Everything that runs here, the short form of the fault harness among the tests. FULL=1 runs the long series whole
# (three seeds instead of one, and `make faults`).
verify: check $(VENV)/.mlflow $(VENV)/.agents test-examples
	$(BIN)/pytest -n 2 --dist worksteal $(if $(FULL),,-m "not long")
	$(if $(FULL),$(MAKE) faults)
	$(MAKE) learning
	$(MAKE) bench

# Kills and disturbs real runs, checks what is left of each, and writes docs/results/faults.md.
KILLS ?= 200
SEED ?= 0
# Runs side by side: while one waits for a lease to run out, the other has the cores.
JOBS ?= 2
faults: install
	$(BIN)/python -m tests.faults.harness --kills $(KILLS) --seed $(SEED) --jobs $(JOBS) --write

# Peers that are not there are skipped with a line that says so: `make bench-peers` installs them.
bench: install
	$(BIN)/python benchmarks/demo_curve.py $(if $(FULL),--seeds 0 1 2,--seeds 0)
	$(BIN)/python -m benchmarks.run_all --strict $(if $(FULL),,--quick) $(BENCH_ARGS)

bench-peers: $(PEERS)/.installed

$(PEERS)/.installed: benchmarks/peers/requirements.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch -c constraints.txt
	$(PEERS)/bin/python -m pip install --quiet -r benchmarks/peers/requirements.txt
	@touch $@

docs: install
	$(BIN)/python scripts/generate_docs.py

clean:
	rm -rf $(VENV) $(PEERS) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
