"""`turnmill.toml`: strict, every problem named with its key, and never a secret shown."""

from pathlib import Path

import pytest

from turnmill.alerts import open_channels, secrets_of
from turnmill.config.deployment import AlertChannel, AlertChannelType, Deployment, load_deployment
from turnmill.errors import ConfigError

SLACK = "https://hooks.slack.com/services/T0/B0/abcdefgh"
KEY = "0123456789abcdef0123456789abcdef"
SECRET = "a-secret-of-the-receiver"
GOOD = f"""
[[alerts]]
type = "webhook"
name = "ops"
url = "https://example.org/hook"
secret_env = "OPS_SECRET"
max_per_hour = 5

[[alerts]]
type = "slack"
url = "{SLACK}"
min_severity = "error"

[[alerts]]
type = "pagerduty"
routing_key_env = "PAGER_KEY"
"""


def load(root: Path, text: str | bytes, **environ: str) -> Deployment:
    (root / "turnmill.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_deployment(root, environ)


def test_without_a_file_there_are_no_channels(tmp_path: Path) -> None:
    assert load_deployment(tmp_path, {}) == Deployment()
    assert load(tmp_path, "") == Deployment()


def test_channels_are_read_with_secrets_from_the_environment(tmp_path: Path) -> None:
    deployment = load(tmp_path, GOOD, OPS_SECRET=SECRET, PAGER_KEY=KEY)
    kind = AlertChannelType
    assert deployment.alerts == (
        AlertChannel(type=kind.WEBHOOK, name="ops", url="https://example.org/hook", secret=SECRET, max_per_hour=5),
        AlertChannel(type=kind.SLACK, name="slack", url=SLACK, min_severity="error"),
        AlertChannel(type=kind.PAGERDUTY, name="pagerduty", routing_key=KEY),
    )
    assert not any(secret in repr(deployment) for secret in (SECRET, SLACK, KEY))
    assert [channel.notifier.name for channel in open_channels(deployment.alerts)] == [
        "log",
        "ops",
        "slack",
        "pagerduty",
    ]
    assert set(secrets_of(deployment.alerts)) == {"https://example.org/hook", SECRET, SLACK, KEY}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("alert = 1", "alert: no such key; did you mean alerts?"),
        ("alerts = 1", "alerts: must be tables"),
        ("[alerts]\ntype='slack'", "alerts: must be tables"),
        ("[[alerts]]", "alerts[1].type: is missing; it must be one of webhook, slack, pagerduty"),
        ("[[alerts]]\ntype='slak'", "alerts[1].type: = 'slak' must be one of"),
        ("[[alerts]]\ntype=['x']", "alerts[1].type: = ['x'] must be one of"),
        ("[[alerts]]\ntype='slack'\nulr='x'", "alerts[1].ulr: no such key; did you mean url?"),
        ("[[alerts]]\ntype='slack'\nrouting_key='x'", "alerts[1].routing_key: no such key"),
        ("[[alerts]]\ntype='slack'", "alerts[1].url: is missing; give url, or url_env"),
        ("[[alerts]]\ntype='slack'\nurl='x'\nurl_env='X'", "alerts[1].url: give url or url_env, not both"),
        ("[[alerts]]\ntype='slack'\nurl=1", "alerts[1].url: must be a text"),
        ("[[alerts]]\ntype='slack'\nurl=' '", "alerts[1].url: must be a text"),
        ("[[alerts]]\ntype='slack'\nurl='ftp://x'", "alerts[1].url: must be an https URL"),
        ("[[alerts]]\ntype='slack'\nurl='https://'", "alerts[1].url: must be an https URL"),
        ("[[alerts]]\ntype='slack'\nurl='https://x:99999'", "alerts[1].url: is no valid URL"),
        ("[[alerts]]\ntype='slack'\nurl='http://example.org'", "alerts[1].url: must be https"),
        ("[[alerts]]\ntype='slack'\nurl='https://u:p@x'", "alerts[1].url: must hold no user"),
        ("[[alerts]]\ntype='slack'\nurl_env='TURNMILL_URL'", "alerts[1].url_env: names that begin with TURNMILL_"),
        ("[[alerts]]\ntype='slack'\nurl_env='NOT_SET'", "alerts[1].url_env: the environment variable that it names"),
        ("[[alerts]]\ntype='slack'\nurl_env='https://x'", "alerts[1].url_env: must be the name of"),
        ("[[alerts]]\ntype='slack'\nurl_env=3", "alerts[1].url_env: must be the name of"),
        ("[[alerts]]\ntype='pagerduty'\nrouting_key='x'", "alerts[1].routing_key: must be the 32 letters"),
        ("[[alerts]]\ntype='webhook'\nurl='https://x'\nsecret='x'", "alerts[1].secret: must have at least 16"),
        ("[[alerts]]\ntype='webhook'\nurl='https://x'", "alerts[1].secret: is missing"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\nname='log'", "alerts[1].name: 'log' is taken"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\nname='a b'", "alerts[1].name: = 'a b' must be 1 to 64"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\nmin_severity='bad'", "alerts[1].min_severity: = 'bad'"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\nmax_per_hour=true", "alerts[1].max_per_hour: = True"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\nmax_per_hour=0", "alerts[1].max_per_hour: = 0"),
        ("[[alerts]]\ntype='slack'\nurl='https://x'\n" * 2, "alerts[2].name: 'slack' is taken"),
        ("a = ", "not valid TOML"),
        (b"a = '\xff'", "not valid TOML: not UTF-8"),
        ("a = " + "[" * 10000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    assert told in str(raised.value) and str(tmp_path / "turnmill.toml") in str(raised.value)


def test_every_problem_is_told_at_once_and_no_secret(tmp_path: Path) -> None:
    text = f"""
[[alerts]]
type = "slack"
url_env = "{SLACK}"
x = "{SECRET}"

[[alerts]]
type = "pagerduty"
routing_key = "{KEY}0"
"""
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text)
    told = str(raised.value)
    assert told.startswith("3 problems in") and told.count("\n") == 3
    assert not any(secret in told for secret in (SLACK, SECRET, KEY))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").mkdir()
    with pytest.raises(ConfigError, match="can't be read: is a directory"):
        load_deployment(tmp_path, {})


def test_a_webhook_may_be_plain_http_and_any_type_on_this_machine(tmp_path: Path) -> None:
    text = f"[[alerts]]\ntype='webhook'\nurl='http://10.0.0.1/x'\nsecret='{SECRET}'\n"
    text += "[[alerts]]\ntype='slack'\nurl='http://127.0.0.1:8080/x'\n"
    assert len(load(tmp_path, text).alerts) == 2
