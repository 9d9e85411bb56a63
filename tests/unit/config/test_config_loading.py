"""Layers, parsing, checks and messages of the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnmill.config import (
    Config,
    base_model_of,
    describe,
    from_dict,
    load_config,
    parameter_names,
    to_dict,
)
from turnmill.errors import ConfigError
from turnmill.pipeline.engine import POLL_INTERVAL_S
from turnmill.records import decode, encode


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems_of(file: Path | None = None, **flags: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file=file, flags=flags)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_without_any_layer_each_value_is_its_default() -> None:
    resolved = load_config()
    assert resolved.config == Config()
    assert set(resolved.sources.values()) == {"default"}
    assert list(resolved.sources) == parameter_names()


def test_each_layer_overrides_the_ones_before_it_and_is_named_as_the_source(tmp_path: Path) -> None:
    """Defect 15: defaults that win over what was set."""
    layers = ["recipe", "file", "environment", "flag", "sidecar"]
    keys = ["max_steps", "seed", "eval_rollouts", "torch_threads", "max_attempts"]
    files = {}
    # The key at index i is set by layer i and all layers before it.
    for level, layer in enumerate(layers):
        text = "\n".join(f"{key} = {level + 10}" for key in keys[level:])
        files[layer] = write(tmp_path / f"{layer}.toml", text)
    resolved = load_config(
        recipe=files["recipe"],
        file=files["file"],
        environ={f"TURNMILL_{key.upper()}": "12" for key in keys[2:]},
        sidecar=files["sidecar"],
        flags=dict.fromkeys(keys[3:], "13"),
    )
    assert [getattr(resolved.config, key) for key in keys] == [10, 11, 12, 13, 14]
    assert [resolved.sources[key] for key in keys] == [
        "recipe.toml",
        "file.toml",
        "TURNMILL_EVAL_ROLLOUTS",
        "--torch-threads",
        "sidecar sidecar.toml",
    ]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_steps", " 12 ", 12),
        ("max_steps", "+12", 12),
        ("lr", "1e-3", 1e-3),
        ("lr", "1", 1.0),
        ("temperature", ".5", 0.5),
        ("shuffle", "YES", True),
        ("shuffle", "1", True),
        ("shuffle", "no", False),
        ("env_args", '{"max_turns": 6}', {"max_turns": 6}),
        ("env_args", "{}", {}),
        ("judges", "a, b", ("a", "b")),
        ("judges", " ", ()),
    ],
)
def test_text_from_the_environment_and_the_command_line_is_parsed_by_type(name: str, text: str, value: object) -> None:
    by_variable = load_config(environ={f"TURNMILL_{name.upper()}": text}).config
    by_flag = load_config(flags={name: text}).config
    assert getattr(by_variable, name) == getattr(by_flag, name) == value
    assert type(getattr(by_flag, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_steps", "3.0"),
        ("max_steps", "1e3"),
        ("max_steps", "1_000"),
        ("max_steps", "٣"),
        ("max_steps", ""),
        ("max_steps", "9" * 5000),
        ("lr", "nan"),
        ("lr", "inf"),
        ("lr", "1e999"),
        ("lr", "-1e-3"),
        ("lr", "0x1"),
        ("shuffle", "on"),
        ("env_args", "[1]"),
        ("env_args", "{"),
        ("env_args", '{"x": NaN}'),
        ("env_args", '{"x": 1e999}'),
        ("env_args", '{"x": ' * 100 + "1" + "}" * 100),
        ("env_args", '{"x": ' * 100_000),
        ("env_args", '{"x": "\\ud800"}'),
        ("base_model", "caf\udce9"),
        ("lr_schedule", "cosin"),
        ("judges", "a,,b"),
        ("judges", "a,a"),
    ],
)
def test_text_that_does_not_fit_names_key_value_and_source(name: str, text: str) -> None:
    """Defects 17 and 18: values that nobody checks fail late, or arrive as the text "null"."""
    with pytest.raises(ConfigError, match=rf"(?s){name} = .*\(TURNMILL_{name.upper()}\): must be "):
        load_config(environ={f"TURNMILL_{name.upper()}": text})


@pytest.mark.parametrize(
    "line",
    [
        "max_steps = 3.0",
        "max_steps = true",
        'max_steps = "3"',
        "max_steps = 1979-05-27",
        "lr = true",
        "lr = nan",
        "lr = inf",
        'lr = "0.1"',
        f"success_threshold = 1{'0' * 400}",
        "shuffle = 1",
        'shuffle = "true"',
        "env = 3",
        "env_args = 3",
        "env_args = {x = nan}",
        "env_args = {x = 1979-05-27}",
        "max_steps = {x = 1}",
    ],
)
def test_a_toml_value_must_have_the_right_type(tmp_path: Path, line: str) -> None:
    file = write(tmp_path / "run.toml", line)
    name = line.split(" = ")[0]
    [problem] = problems_of(file)
    assert problem.startswith(f"{name} = ")
    assert f"({file}:1): must be " in problem


def test_toml_takes_integers_for_numbers_and_a_table_for_env_args(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "training_timeout = 900\nmax_runtime_s = 9000\n[env_args]\nmax_turns = 6\n")
    config = load_config(file=file).config
    assert config.training_timeout == 900.0 and type(config.training_timeout) is float
    assert config.env_args == {"max_turns": 6}


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert load_config(file=file).config.seed == 3


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"seed = \n", ":1:8: not valid TOML: Invalid value"),
        (b"seed = 1\nseed = 2\n", ":2:9: not valid TOML: Cannot overwrite a value"),
        (b"seed = 1\nlr = [\n", ": not valid TOML: "),
        (b"# caf\xe9\n", ": not valid TOML: not UTF-8 at byte 5"),
        (b"x = " + b"[" * 50_000, ": not valid TOML: "),
        (b"x = " + b"9" * 5_000, ": not valid TOML: "),
    ],
)
def test_what_is_not_toml_is_named_with_its_place(tmp_path: Path, content: bytes, fragment: str) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    [problem] = problems_of(file)
    assert problem.startswith(f"{file}{fragment}")


def test_a_missing_file_and_a_folder_are_problems_like_others(tmp_path: Path) -> None:
    [missing, other] = problems_of(tmp_path / "none.toml", max_steps="0")
    assert missing == f"{tmp_path / 'none.toml'}: can't read this configuration file: no such file or directory"
    assert other.startswith("max_steps = 0 (--max-steps)")
    [folder] = problems_of(tmp_path)
    assert folder.endswith("is a directory")


def test_all_problems_of_all_layers_are_reported_together(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", '# comment\nmax_stepz = 3\n\nlr = "high"\n')
    sidecar = write(tmp_path / "tasks.config.toml", "zzz = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(
            file=file,
            environ={"TURNMILL_MAX_STEP": "3", "HOME": "/", "TURNMILL_ROOT": "x"},
            sidecar=sidecar,
            flags={"lr_schedule": "cosin", "number_generation": 12},
        )
    assert str(caught.value).splitlines() == [
        "6 problems in the configuration:",
        f"  max_stepz = 3 ({file}:2): no such parameter; did you mean max_steps?",
        f'  lr = "high" ({file}:4): must be a number greater than 0 and at most 1',
        '  TURNMILL_MAX_STEP = "3" (environment): no such parameter; did you mean TURNMILL_MAX_STEPS?',
        '  lr_schedule = "cosin" (--lr-schedule): must be one of constant, linear, cosine; did you mean cosine?',
        f"  zzz = 1 ({sidecar}:1): no such parameter; `turnmill run --help` lists all parameters",
        "  global_batch_size = 64 (default) must be a multiple of number_generation = 12 (--number-generation): "
        "a batch is made of whole groups; set global_batch_size to 60 or 72 as well",
    ]


def test_a_bad_value_is_a_problem_even_where_a_later_layer_overrides_it(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "max_steps = 0\n")
    [problem] = problems_of(file, max_steps="5")
    assert problem == f"max_steps = 0 ({file}:1): must be an integer at least 1 and at most 100000"


def test_a_recipe_can_not_choose_the_model(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", 'base_model = "other"\n')
    with pytest.raises(ConfigError, match="a model's recipe can't choose the model"):
        load_config(recipe=recipe)


def test_characters_that_a_terminal_acts_on_are_escaped(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", '"\\u001b[31m" = "\\u009b31m"\n')
    [problem] = problems_of(file)
    assert problem.startswith("\\x1b[31m = ")
    assert problem.isprintable()


COMBINATIONS: list[tuple[Mapping[str, Any], str]] = [
    (
        {"max_length": 512},
        "max_new_tokens = 4096 (default) must be less than max_length = 512 (--max-length): "
        "the prompt needs room too; set max_new_tokens below 512 as well",
    ),
    (
        {"max_length": 20000},
        "max_length = 20000 (--max-length) must not exceed micro_batch_tokens = 16384 (default): "
        "a conversation is trained in one pass; set micro_batch_tokens to at least 20000 as well",
    ),
    (
        {"global_batch_size": 20},
        "global_batch_size = 20 (--global-batch-size) must be a multiple of number_generation = 8 (default): "
        "a batch is made of whole groups; set number_generation to a divisor of 20 as well",
    ),
    (
        {"global_batch_size": 4, "number_generation": 8},
        "global_batch_size = 4 (--global-batch-size) must be a multiple of number_generation = 8 "
        "(--number-generation): a batch is made of whole groups; set global_batch_size to 8, "
        "or set number_generation to a divisor of 4",
    ),
    (
        {"min_lr": "1e-5"},
        "min_lr = 1e-05 (--min-lr) must not exceed lr = 7e-07 (default): "
        "the schedule falls from lr to min_lr; set lr to at least 1e-05 as well",
    ),
    (
        {"max_steps": "10", "warmup_steps": "11"},
        "warmup_steps = 11 (--warmup-steps) must not exceed max_steps = 10 (--max-steps): "
        "the warm-up is a part of the run; set warmup_steps to at most 10, or set max_steps to at least 11",
    ),
    (
        {"training_timeout": 600},
        "call_timeout_s = 600 (default) must be less than training_timeout = 600 (--training-timeout): "
        "a call is a part of a rollout; set call_timeout_s below 600 as well",
    ),
    (
        {"max_runtime_s": 900.5},
        "training_timeout = 1800 (default) must be less than max_runtime_s = 900.5 (--max-runtime-s): "
        "a rollout is a part of the run; set training_timeout below 900.5 as well",
    ),
    (
        {"watchdog_s": 1800},
        "training_timeout = 1800 (default) must be less than watchdog_s = 1800 (--watchdog-s): "
        "a rollout that may still end is no stall; set training_timeout below 1800 as well",
    ),
    (
        {"watchdog_s": 90000},
        "watchdog_s = 90000 (--watchdog-s) must be less than max_runtime_s = 86400 (default): "
        "a stall is to be seen before the stage runs out of time; set max_runtime_s above 90000 as well",
    ),
    (
        {"audit_mean_tolerance": 0.01},
        "audit_mean_tolerance = 0.01 (--audit-mean-tolerance) must not exceed audit_max_tolerance = 0.001 (default): "
        "a mean is never larger than the maximum; set audit_max_tolerance to at least 0.01 as well",
    ),
    (
        {"ppo_minibatches": 9},
        "ppo_minibatches = 9 (--ppo-minibatches) must not exceed the groups of a batch, which are 8, of "
        "global_batch_size = 64 (default) and number_generation = 8 (default): an update is made on whole groups; set "
        "ppo_minibatches to at most 8",
    ),
    (
        {"precision": "bf16"},
        'precision = "bf16" (--precision) does not go with audit_mean_tolerance = 0.0001 (default) and '
        "audit_max_tolerance = 0.001 (default): the sampler is in fp32, and what bf16 rounds would stop the first "
        "step; set audit_mean_tolerance = 0.02 and audit_max_tolerance = 1, or what your model needs",
    ),
]


def test_bf16_goes_with_tolerances_that_somebody_chose() -> None:
    flags = {"precision": "bf16", "audit_mean_tolerance": 0.02, "audit_max_tolerance": 1.0}
    assert load_config(flags=flags).config.precision == "bf16"


@pytest.mark.parametrize(("flags", "message"), COMBINATIONS)
def test_a_bad_combination_names_both_keys_values_and_sources(flags: Mapping[str, Any], message: str) -> None:
    assert problems_of(**flags) == [message]


def test_the_deadlines_of_a_run_are_ordered_whether_or_not_the_watchdog_s_is_set() -> None:
    """poll < call < rollout < watchdog < stage."""
    for config in (Config(), load_config(flags={"watchdog_s": "2000"}).config):
        assert config.call_timeout_s < config.training_timeout < config.stall_after_s < config.max_runtime_s
    [problem] = problems_of(call_timeout_s="0.5")
    assert problem.startswith("call_timeout_s = 0.5 (--call-timeout-s): must be a number at least 1")
    assert POLL_INTERVAL_S < 1


def test_a_limit_of_zero_is_compared_like_any_other() -> None:
    config = load_config(flags={"baseline_rollouts": 0, "baseline_max_rollouts": 0}).config
    assert (config.baseline_rollouts, config.baseline_max_rollouts) == (0, 0)
    with pytest.raises(ConfigError, match=r"baseline_rollouts = 64 .* must not exceed baseline_max_rollouts = 0"):
        load_config(flags={"baseline_max_rollouts": 0})


def test_a_value_from_the_recipe_counts_as_not_chosen_by_the_user(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", "max_length = 160\nmax_new_tokens = 8\n")
    with pytest.raises(
        ConfigError, match=r"max_length = 160 \(.*recipe.toml:1\): .*; set max_length above 200 as well"
    ):
        load_config(recipe=recipe, flags={"max_new_tokens": "200"})


def test_a_combination_with_a_bad_value_is_not_reported_on_top() -> None:
    [problem] = problems_of(max_length="0")
    assert problem.startswith("max_length = 0 (--max-length): must be an integer at least 8")


def test_the_base_model_is_found_before_its_recipe(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", 'base_model = "from-file"\nmax_steps = "bad"\n')
    assert base_model_of() == Config().base_model
    assert base_model_of(file=file) == "from-file"
    assert base_model_of(file=file, environ={"TURNMILL_BASE_MODEL": "from-env"}) == "from-env"
    assert base_model_of(file=file, flags={"base_model": "from-flag"}) == "from-flag"


def test_a_negated_flag_is_named_as_it_was_typed() -> None:
    assert load_config(flags={"shuffle": False}).sources["shuffle"] == "--no-shuffle"


def test_a_configuration_survives_its_record() -> None:
    config = load_config(flags={"env_args": '{"a": [1, 2.5, null]}', "lr": "1e-4", "shuffle": True}).config
    assert from_dict(decode(encode(to_dict(config)), dict)) == config
    assert from_dict({}) == Config()
    with pytest.raises(ConfigError, match=r"lrr = 1 \(run record\): no such parameter; did you mean lr\?"):
        from_dict({"lrr": 1})


def test_every_parameter_has_a_meaning_and_a_default_in_its_range() -> None:
    assert [parameter.name for parameter in describe()] == parameter_names()
    for parameter in describe():
        assert parameter.doc
        assert from_dict({parameter.name: parameter.default}) == Config()
        assert parameter.flag == "--" + parameter.name.replace("_", "-")


def test_two_configurations_do_not_share_their_env_args() -> None:
    assert Config().env_args is not Config().env_args


def test_a_seed_is_one_that_every_generator_takes() -> None:
    """Else the trainer is the first to find out."""
    assert load_config(flags={"seed": 2**32 - 1}).config.seed == 4294967295
    (problem,) = problems_of(seed=2**32)
    assert problem.startswith("seed = 4294967296")


def test_a_list_of_texts_is_one_in_toml_and_survives_the_record(tmp_path: Path) -> None:
    config = load_config(file=write(tmp_path / "run.toml", 'served_model_names = ["gpt-4o", "policy"]\n')).config
    assert config.served_model_names == ("gpt-4o", "policy")
    assert from_dict(decode(encode(to_dict(config)), dict)) == config
    for line in ("judges = [1]", 'judges = [""]', 'judges = ["a", "a"]', 'judges = "a"', 'judges = {a = "b"}'):
        with pytest.raises(ConfigError, match=r"judges = .*: must be a list of texts"):
            load_config(file=write(tmp_path / "bad.toml", line))


def test_an_evaluation_is_greedy_or_samples_and_nothing_in_between() -> None:
    assert load_config(flags={"val_temperature": "0"}).config.val_temperature == 0
    assert load_config(flags={"val_temperature": "0.01"}).config.val_temperature == 0.01
    with pytest.raises(ConfigError, match=r"val_temperature = 0.001 \(.*\): must be 0 \(greedy\) or at least 0.01"):
        load_config(flags={"val_temperature": "0.001"})
    with pytest.raises(ConfigError, match="val_temperature"):
        load_config(flags={"val_temperature": "-1"})


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("loss_fn", "PPO", "; did you mean ppo?"),
        ("training_method", "lora", "; did you mean RFT_MULTITURN_LORA?"),
        ("mismatch_correction", "token_truncat", "; did you mean token_truncate?"),
        # One that is merely about as long helps nobody.
        ("advantage_method", "grpo", ""),
        # And neither does one of several.
        ("mismatch_correction", "mask", ""),
    ],
)
def test_the_choice_that_was_meant_is_told(name: str, text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(flags={name: text})
    (line,) = str(raised.value).splitlines()[1:]
    assert line.endswith(hint) if hint else "did you mean" not in line
