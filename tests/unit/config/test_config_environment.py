"""Which environment a run plays, by its parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnmill.config import Config, from_dict, load_config, to_dict
from turnmill.errors import ConfigError
from turnmill.records import decode, encode


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems_of(**flags: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("wordle", {}, "any")),
        ({"env": "sql-agent", "env_args": {"a": 1}}, ("sql-agent", {"a": 1}, "any")),
        ({"use_custom_env": "true"}, ("my-custom-env", {}, "custom")),
        ({"use_custom_env": True, "custom_env_id": "x", "env_args": {"a": 1}}, ("x", {"a": 1}, "custom")),
        ({"vf_env_id": "wordle", "vf_env_args": {"use_think": False}}, ("wordle", {"use_think": False}, "verifiers")),
        ({"use_custom_env": "false", "custom_env_id": "my-custom-env"}, ("wordle", {}, "any")),
        ({"vf_env_id": ""}, ("wordle", {}, "any")),
    ],
)
def test_one_of_three_parameters_says_which_environment_is_played(
    flags: Mapping[str, Any], expected: tuple[str, dict[str, Any], str]
) -> None:
    config = load_config(flags=flags).config
    for one in (config, from_dict(decode(encode(to_dict(config)), dict))):
        played = one.environment
        assert (played.env_id, played.env_args, played.origin) == expected


def test_a_verifiers_package_is_told_from_a_built_in_environment_of_its_name() -> None:
    assert load_config(flags={"vf_env_id": "wordle"}).config.environment.name != Config().environment.name == "wordle"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"env": "wordle", "vf_env_id": "x"},
            'env = "wordle" (--env) and vf_env_id = "x" (--vf-env-id) each name an environment: '
            "a run plays one, so set one of them",
        ),
        (
            {"use_custom_env": True, "vf_env_id": "x"},
            'use_custom_env = true (--use-custom-env) and vf_env_id = "x" (--vf-env-id) each name an environment: '
            "a run plays one, so set one of them",
        ),
        (
            {"vf_env_id": "x", "env_args": {"a": 1}},
            'env_args = {"a": 1} (--env-args) are not for vf_env_id = "x" (--vf-env-id): set vf_env_args instead',
        ),
        (
            {"vf_env_args": {"a": 1}},
            'vf_env_args = {"a": 1} (--vf-env-args) is read with vf_env_id alone, which is not set: '
            "set it, or env_args",
        ),
        (
            {"custom_env_id": "x"},
            'custom_env_id = "x" (--custom-env-id) is not read: set use_custom_env = true as well, or env instead',
        ),
        (
            {"env": "../../etc"},
            'env = "../../etc" (--env): must be the id of an environment: letters, digits, - and _',
        ),
        (
            {"use_custom_env": True, "custom_env_id": ""},
            'custom_env_id = "" (--custom-env-id): must be the id of an environment: letters, digits, - and _',
        ),
    ],
)
def test_parameters_that_contradict_each_other_about_the_environment_are_named(
    flags: Mapping[str, Any], message: str
) -> None:
    assert problems_of(**flags) == [message]


def test_contradictions_are_found_over_the_layers(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", 'env = "a"\n')
    with pytest.raises(ConfigError, match=r'env = "a" \(.*run.toml:1\) and vf_env_id = "b" \(--vf-env-id\)'):
        load_config(file=file, flags={"vf_env_id": "b"})


def test_what_a_recipe_says_of_its_environment_is_for_that_one_alone(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.toml", 'env = "sql-agent"\nenv_args = {depth = 2}\nlr = 0.1\n')
    assert load_config(recipe=recipe).config.environment.env_args == {"depth": 2}
    assert load_config(recipe=recipe, flags={"env_args": {"depth": 3}}).config.environment.env_id == "sql-agent"
    for flags in ({"env": "wordle"}, {"vf_env_id": "x"}, {"use_custom_env": True}):
        config = load_config(recipe=recipe, flags=flags).config
        assert config.environment.env_id != "sql-agent" and config.environment.env_args == {} and config.lr == 0.1
        assert from_dict(decode(encode(to_dict(config)), dict)) == config
