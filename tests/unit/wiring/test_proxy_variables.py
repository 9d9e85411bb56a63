"""Where a proxy listens, and how its workers' requests are signed: what the variables of a role may say."""

import pytest

from turnmill.errors import ConfigError, InvalidInput
from turnmill.wiring.variables import PROXY_AUTH, PROXY_LISTEN, PROXY_URL, proxy_place, proxy_signer


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PROXY_AUTH, PROXY_LISTEN, PROXY_URL):
        monkeypatch.delenv(name, raising=False)


def test_a_proxy_listens_on_this_machine_at_the_port_of_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROXY_URL, "http://127.0.0.1:8123/")
    assert proxy_place() == ("http://127.0.0.1:8123", "127.0.0.1", 8123)


def test_a_proxy_behind_something_else_is_told_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROXY_URL, "https://proxy.example.org")
    monkeypatch.setenv(PROXY_LISTEN, "0.0.0.0:8080")
    assert proxy_place() == ("https://proxy.example.org", "0.0.0.0", 8080)


@pytest.mark.parametrize(
    ("url", "listen"),
    [("", ""), ("https://proxy.example.org", ""), ("", "0.0.0.0:8080"), ("http://h:1", "0.0.0.0"), ("http://h:x", "")],
)
def test_a_place_that_is_missing_or_none_is_refused(monkeypatch: pytest.MonkeyPatch, url: str, listen: str) -> None:
    monkeypatch.setenv(PROXY_URL, url)
    monkeypatch.setenv(PROXY_LISTEN, listen)
    with pytest.raises(InvalidInput, match=PROXY_LISTEN):
        proxy_place()


def test_requests_are_signed_where_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_signer() is None
    monkeypatch.setenv(PROXY_AUTH, "sigv4")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert proxy_signer() is not None
    monkeypatch.setenv(PROXY_AUTH, "sigv5")
    with pytest.raises(ConfigError, match="must be sigv4"):
        proxy_signer()
