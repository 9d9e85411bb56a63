"""`[backend]` of turnmill.toml."""

from pathlib import Path

import pytest

from turnmill.config.backends import BackendSettings, BackendType
from turnmill.config.deployment import load_backend, load_deployment
from turnmill.errors import ConfigError


def settings_of(tmp_path: Path, text: str) -> BackendSettings | None:
    (tmp_path / "turnmill.toml").write_text(text)
    assert load_deployment(tmp_path, {}).backend == load_backend(tmp_path)
    return load_backend(tmp_path)


def test_without_the_table_nothing_is_said(tmp_path: Path) -> None:
    assert load_backend(tmp_path) is None
    assert settings_of(tmp_path, "") is None


def test_a_deployment_on_aws_has_a_name_a_region_and_an_endpoint(tmp_path: Path) -> None:
    text = '[backend]\ntype = "aws"\nname = "lab"\nregion = "eu-west-1"\nendpoint_url = "http://127.0.0.1:4566"\n'
    assert settings_of(tmp_path, text) == BackendSettings(
        type=BackendType.AWS, name="lab", region="eu-west-1", endpoint_url="http://127.0.0.1:4566"
    )
    assert settings_of(tmp_path, '[backend]\ntype = "embedded"\n') == BackendSettings()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("", "backend.type: is missing; it must be one of embedded, aws"),
        ('type = "azure"', "backend.type: = 'azure' must be one of embedded, aws"),
        ('type = "aws"\nregoin = "eu-west-1"', "backend.regoin: no such key; did you mean region?"),
        ('type = "aws"\nregion = "Ireland"', "backend.region: = 'Ireland' must be a region, e.g. eu-west-1"),
        ('type = "aws"\nregion = 7', "backend.region: = 7 must be a text"),
        ('type = "aws"\nendpoint_url = "localhost"', "backend.endpoint_url: must be an http or https URL"),
        ('type = "embedded"\nname = "lab"', "backend.name: the embedded backend has none"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, table: str, problem: str) -> None:
    (tmp_path / "turnmill.toml").write_text(f"[backend]\n{table}\n")
    for load in (load_backend, lambda root: load_deployment(root, {})):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path)
        assert problem in str(caught.value) and str(tmp_path / "turnmill.toml") in str(caught.value)


def test_a_backend_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text('backend = "aws"\n')
    with pytest.raises(ConfigError, match=r"backend: must be a table, headed \[backend\]"):
        load_backend(tmp_path)


def test_an_sns_channel_names_its_topic(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text('[[alerts]]\ntype = "sns"\ntopic = "arn:aws:sns:eu-west-1:1:pager"\n')
    (channel,) = load_deployment(tmp_path, {}).alerts
    assert (channel.name, channel.topic) == ("sns", "arn:aws:sns:eu-west-1:1:pager")
    (tmp_path / "turnmill.toml").write_text('[[alerts]]\ntype = "sns"\n')
    with pytest.raises(ConfigError, match=r"alerts\[1\].topic: is missing"):
        load_deployment(tmp_path, {})
