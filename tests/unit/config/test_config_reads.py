"""Parameters that nothing reads: the table made from real runs, its check at load, and how the runs are watched."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnmill.config import ENVIRONMENT_PARAMETERS, Config, from_dict, load_config, parameter_names, to_dict
from turnmill.config.reads import OFF, ON, parameters_of, reads
from turnmill.config.recording import READS, read_notes
from turnmill.errors import ConfigError
from turnmill.records import RunKind

SCRIPT = Path(__file__).parents[3] / "scripts" / "generate_reads.py"


def problem(kind: RunKind = RunKind.TRAIN, *, file: Path | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(file=file, flags=flags, kind=kind)
    first, *lines = str(raised.value).splitlines()
    assert first == "1 problem in the configuration:" and len(lines) == 1
    return lines[0].strip()


def test_the_table_has_an_entry_for_every_parameter_and_no_other() -> None:
    """A new one: make the table anew with scripts/generate_reads.py."""
    assert list(reads()) == [name for name in parameter_names() if name not in ENVIRONMENT_PARAMETERS]


def test_every_parameter_is_read_by_some_run_that_was_watched() -> None:
    """Else nothing could be said about it: scripts/generate_reads.py needs a run in which it does something."""
    assert not [name for name, entry in reads().items() if not entry.is_known]


# With what each is read in a training run; all others are read in every one.
CONDITIONS: list[tuple[dict[str, str], dict[str, str]]] = [
    ({"age_tolerance": "1"}, {"rollout_strategy": "off_policy_async"}),
    ({"curriculum_low": "0.2"}, {"curriculum": "pass_rate"}),
    ({"curriculum_high": "0.8"}, {"curriculum": "pass_rate"}),
    ({"curriculum_revisit": "2"}, {"curriculum": "pass_rate"}),
    ({"gamma": "0.9"}, {"advantage_method": "group_based_per_turn"}),
    ({"clip_ratio_low": "0.1"}, {"loss_fn": "gspo"}),
    ({"clip_ratio_high": "0.1"}, {"loss_fn": "cispo"}),
    ({"kl_refresh_steps": "5"}, {"kl_coeff": "0.1"}),
    ({"mismatch_cap": "4"}, {"mismatch_correction": "token_mask"}),
    ({"min_lr": "1e-8"}, {"lr_schedule": "linear"}),
    ({"lora_rank": "8"}, {"training_method": "RFT_MULTITURN_LORA"}),
    ({"lora_alpha": "8"}, {"training_method": "RFT_MULTITURN_LORA"}),
    ({"lora_targets": "q_proj"}, {"training_method": "RFT_MULTITURN_LORA"}),
    ({"loraplus_lr_ratio": "4"}, {"training_method": "RFT_MULTITURN_LORA"}),
    ({"ignore_baseline": "true"}, {"baseline_rollouts": "8"}),
    ({"val_rollouts": "8"}, {"val_every": "2"}),
]
# Of the same parameters, where their default is no choice that leaves the other unread.
WITHOUT = {
    "clip_ratio_low": {"loss_fn": "importance_sampling"},
    "clip_ratio_high": {"loss_fn": "importance_sampling"},
    "min_lr": {"lr_schedule": "constant"},
    "ignore_baseline": {"baseline_rollouts": "0"},
}


@pytest.mark.parametrize(("given", "condition"), CONDITIONS)
def test_a_parameter_is_read_with_the_choice_that_it_is_about_and_an_error_without(
    given: Mapping[str, str], condition: Mapping[str, str]
) -> None:
    load_config(flags={**given, **condition}, kind=RunKind.TRAIN)
    (name,), (other,) = given, condition
    flags: dict[str, Any] = {**given, **WITHOUT.get(name, {})}
    text = problem(**flags)
    assert f"{name} = " in text and f" would do nothing: it is read with {other} " in text


def test_no_other_parameter_of_a_training_run_has_a_condition() -> None:
    """But `baseline_max_rollouts`, without a baseline: who sets that to 0 may set what a rule compares it with."""
    found = {name for name, entry in reads().items() if entry.text(RunKind.TRAIN)}
    assert found == {name for given, _ in CONDITIONS for name in given} | {"baseline_max_rollouts"}


def test_the_conditions_of_the_table_name_choices_that_exist() -> None:
    defaults = Config()
    for name, entry in reads().items():
        assert entry.ways.keys() == set(RunKind)
        for condition, states in [item for ways in entry.ways.values() for way in ways for item in way.items()]:
            choices = Config.__dataclass_fields__[condition].metadata["choices"]
            assert set(states) <= set(choices or (ON, OFF)), name
            assert hasattr(defaults, condition)


def test_a_parameter_that_nothing_reads_is_an_error_that_says_what_would_read_it() -> None:
    assert problem(curriculum_low="0.2") == (
        "curriculum_low = 0.2 (--curriculum-low) would do nothing: it is read with curriculum = pass_rate alone: "
        "set that as well, or leave curriculum_low out"
    )


def test_with_the_choice_that_reads_it_the_same_parameter_is_fine() -> None:
    flags = {"curriculum": "pass_rate", "curriculum_low": "0.2"}
    assert load_config(flags=flags, kind=RunKind.TRAIN).config.curriculum_low == 0.2


def test_it_is_told_together_with_values_that_are_wrong_and_never_on_their_ground() -> None:
    flags = {"loss_fn": "pp", "age_tolerance": "3", "curriculum": "pass", "curriculum_low": "0.2"}
    with pytest.raises(ConfigError) as raised:
        load_config(flags=flags, kind=RunKind.TRAIN)
    text = str(raised.value)
    assert text.startswith("3 problems in the configuration:")
    assert "loss_fn = " in text and "curriculum = " in text and "age_tolerance = 3 (--age-tolerance) would do" in text


def test_a_default_that_somebody_set_is_asked_too() -> None:
    assert "would do nothing" in problem(curriculum_revisit=str(Config().curriculum_revisit))


def test_a_file_that_different_runs_share_is_told_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("lr = 1e-4\n")
    assert problem(RunKind.EVAL, file=file) == (
        f"lr = 0.0001 ({file}:1) would do nothing: a training run reads it, and an evaluation does not: leave it out; "
        "runs that differ in that need files of their own"
    )


def test_a_variable_is_asked_and_a_recipe_is_not(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("curriculum_low = 0.3\n")
    assert load_config(recipe=recipe, kind=RunKind.TRAIN).config.curriculum_low == 0.3
    assert load_config(recipe=recipe, kind=RunKind.EVAL).config.curriculum_low == 0.3
    with pytest.raises(ConfigError, match=r"curriculum_low = 0\.3 \(TURNMILL_CURRICULUM_LOW\) would do nothing"):
        load_config(environ={"TURNMILL_CURRICULUM_LOW": "0.3"}, kind=RunKind.TRAIN)


def test_a_load_for_no_run_and_a_record_are_not_asked() -> None:
    assert load_config(flags={"curriculum_low": "0.2"}).config.curriculum_low == 0.2
    assert from_dict({"curriculum_low": 0.2}).curriculum_low == 0.2


def test_a_bad_value_is_told_alone() -> None:
    with pytest.raises(ConfigError, match="1 problem"):
        load_config(flags={"curriculum": "pass_rates", "curriculum_low": "0.2"}, kind=RunKind.TRAIN)


def test_which_environment_is_played_has_rules_of_its_own() -> None:
    flags = {"use_custom_env": "true", "custom_env_id": "other"}
    assert load_config(flags=flags, kind=RunKind.TRAIN).config.custom_env_id == "other"


def test_an_evaluation_reads_less() -> None:
    assert {"max_length", "eval_rollouts", "val_temperature"} <= parameters_of(RunKind.EVAL)
    assert not {"lr", "max_steps", "curriculum", "temperature", "rollout_strategy"} & parameters_of(RunKind.EVAL)


def test_what_a_rule_compares_with_a_parameter_that_counts_may_be_set() -> None:
    """A longer conversation needs a larger micro_batch_tokens, although an evaluation makes no pass of training."""
    flags = {"max_length": "20000", "micro_batch_tokens": "20000"}
    assert load_config(flags=flags, kind=RunKind.EVAL).config.max_length == 20000
    assert "an evaluation does not" in problem(RunKind.EVAL, micro_batch_tokens="20000")
    assert "micro_batch_tokens" in parameters_of(RunKind.EVAL)
    assert "min_lr" in problem(lr_schedule="constant", min_lr="0.0")
    flags = {"lr_schedule": "constant", "lr": "1e-3", "min_lr": "1e-3"}
    assert load_config(flags=flags, kind=RunKind.TRAIN).config.min_lr == 1e-3


def test_a_run_of_an_external_trainer_reads_what_is_about_playing() -> None:
    assert {"client_sampling", "temperature", "worker_lease_s", "vf_env_args"} <= parameters_of(RunKind.EXTERNAL)
    assert not {"lr", "seed", "success_threshold"} & parameters_of(RunKind.EXTERNAL)
    assert "max_length = 10000 (--max-length) would do nothing" in problem(RunKind.EXTERNAL, max_length="10000")
    assert problem(RunKind.EXTERNAL, lr="1e-4") == (
        "lr = 0.0001 (--lr) would do nothing: a training run reads it, and a run whose trainer is somebody else's does "
        "not: leave it out"
    )


# ---------------------------------------------------------------- how it is watched

PROGRAM = """
import dataclasses, os, signal, sys
from turnmill.config import Config, from_dict, load_config, to_dict
from turnmill.records import Task
from turnmill.training.task_order import order_of

config = load_config(flags={"curriculum": sys.argv[1]}).config
copy = dataclasses.replace(config, seed=3)
assert to_dict(copy)["seed"] == 3 and copy != config and "seed" in repr(copy)
assert from_dict(to_dict(config)) == config and config.lr > 0
order_of(config, [Task(id="a", metadata={})], {})
assert config.is_async is False
os.kill(os.getpid(), signal.SIGKILL)
"""


def notes_of(folder: Path, *arguments: str) -> Mapping[str, set[str]]:
    environ = {**os.environ, READS: str(folder)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    return read_notes(folder)


def test_what_a_module_reads_is_noted_even_if_the_process_is_killed(tmp_path: Path) -> None:
    reader = {"turnmill.training.task_order"}
    assert notes_of(tmp_path, "none") == {"curriculum": reader, "seed": reader, "shuffle": reader}


def test_a_choice_brings_more_reads(tmp_path: Path) -> None:
    window = {"curriculum_low", "curriculum_high", "curriculum_revisit"}
    assert set(notes_of(tmp_path, "pass_rate")) == {"curriculum", "seed", "shuffle"} | window


def test_without_being_told_nothing_is_recorded() -> None:
    assert type(load_config().config) is Config is type(from_dict(to_dict(Config())))


def test_what_is_read_with_several_choices_alone_is_told_with_all_of_them() -> None:
    script = runpy.run_path(str(SCRIPT))
    watched, ways_of = script["Watched"], script["ways_of"]
    plain = watched(name="train")
    adapter = watched(name="adapter", changes={"training_method": "RFT_MULTITURN_LORA"})
    asynchronous = watched(name="async", changes={"rollout_strategy": "off_policy_async"})
    both = next(run for run in script["COMBINED"] if run.changes == {**adapter.changes, **asynchronous.changes})

    def ways(*readers: object) -> object:
        found = {run: ["gamma"] if run in readers else [] for run in (plain, adapter, asynchronous, both)}
        return ways_of("gamma", found)

    asynchronous_way = {"rollout_strategy": ["off_policy_async"]}
    assert ways() == []
    assert ways(plain, adapter, asynchronous, both) == [{}]
    assert ways(plain, adapter) == [{"rollout_strategy": ["on_policy_sync"]}]
    assert ways(asynchronous, both) == [asynchronous_way]
    assert ways(both) == [{"training_method": ["RFT_MULTITURN_LORA"], **asynchronous_way}]
    assert ways(plain, adapter, both) == [
        {"rollout_strategy": ["on_policy_sync"]},
        {"training_method": ["RFT_MULTITURN_LORA"], **asynchronous_way},
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["eval", "curriculum=pass_rate"])
def test_a_run_that_is_made_again_reads_what_the_table_says(name: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--only", name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{name}: as the table says\n"), done.stderr
