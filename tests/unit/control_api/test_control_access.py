"""Nobody without the token learns or changes anything, by whatever route."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from tests.unit.control_api.conftest import Client, made_run, served, store, tree
from turnmill.control_api.access import OPEN_PATH, token_of
from turnmill.control_api.routes import Routes
from turnmill.control_api.server import serve_api
from turnmill.errors import ConfigError

# Each method of each route that there is: a new one can't be forgotten here.
ROUTES = [
    (method, route.path.replace("{run_id}", "one").replace("{key:path}", "a.jsonl"))
    for route in Routes(Path("nowhere"), max_upload_bytes=1).table()
    for method in sorted(route.methods or ())
]
GUARDED = [(method, path) for method, path in ROUTES if path != OPEN_PATH]


def test_there_are_routes_to_be_guarded() -> None:
    assert len(GUARDED) >= 14 and len(ROUTES) - len(GUARDED) == 2, "GET and HEAD of one open path"


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_a_route_is_closed_without_the_token_and_open_with_it(tmp_path: Path, method: str, path: str) -> None:
    await store(tmp_path, made_run())
    body = b'{"id": "a"}\n' if method == "PUT" else None
    before = tree(tmp_path)
    async with served(tmp_path) as client:
        token = client.token
        wrong = [token[:-1], token + "x", token.swapcase(), "x" * len(token), "", "\u00fc"]
        refused = [await client.ask(method, path, data=body, is_anonymous=True)]
        refused += [
            await client.ask(method, path, data=body, is_anonymous=True, headers={"Authorization": value})
            for value in [f"Bearer {text}" for text in wrong] + [f"Basic {token}", token, "Bearer"]
        ]
        for answer in refused:
            assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            assert method == "HEAD" or answer.json["error"]["type"] == "unauthorized"
        assert tree(tmp_path) == before, "nothing was changed"
        allowed = await client.ask(method, path, data=body)
        assert allowed.status in (200, 201, 202), allowed.body


async def test_only_the_open_path_answers_without_the_token_and_tells_nothing(client: Client) -> None:
    answer = await client.ask("GET", OPEN_PATH, is_anonymous=True)
    assert (answer.status, answer.body) == (200, b"ok")
    for path in ("/", "/healthz/", "/nowhere", "//healthz", "/healthz/../metrics", "/%68ealthz/x"):
        answer = await client.ask("GET", path, is_anonymous=True)
        assert answer.status == 401, path


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "[::1]", "localhost."]
)
async def test_a_name_that_a_foreign_page_may_have_been_given_is_refused(client: Client, host: str) -> None:
    for path in (OPEN_PATH, "/api/v1/runs"):
        answer = await client.ask("GET", path, headers={"Host": host})
        assert answer.status == 421, host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "localhost"])
async def test_a_name_of_this_machine_is_taken(client: Client, host: str) -> None:
    assert (await client.ask("GET", "/api/v1/runs", headers={"Host": host})).status == 200


async def test_no_answer_lets_a_foreign_page_read_it(client: Client) -> None:
    headers = {"Origin": "http://evil.example"}
    for method in ("GET", "OPTIONS"):
        answer = await client.ask(method, "/api/v1/runs", headers=headers)
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


async def test_the_token_is_made_once_for_its_owner_alone_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = os.umask(0)
    try:
        async with served(tmp_path) as client:
            for name in ("control.token", "control.json"):
                assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
            await client.ask("GET", "/api/v1/runs", token=client.token[:-1])
            token = client.token
    finally:
        os.umask(before)
    async with served(tmp_path) as again:
        assert again.token == token and len(token) >= 43
    assert token not in caplog.text


@pytest.mark.parametrize("text", ["short", "", "x" * 40 + " y", "\u00fc" * 40])
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "control.token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="must hold at least 32"):
        token_of(tmp_path)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token_of(tmp_path)
    (tmp_path / "control.token").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        token_of(tmp_path)


async def test_where_it_listens_is_said_as_long_as_it_does(tmp_path: Path) -> None:
    async with serve_api(tmp_path) as url:
        said = json.loads((tmp_path / "control.json").read_text())
        assert said == {"url": url, "pid": os.getpid()} and url.startswith("http://127.0.0.1:")
        with pytest.raises(
            ConfigError, match=r"--port \d+: 127\.0\.0\.1:\d+ can't be listened on: address already in use"
        ):
            async with serve_api(tmp_path, port=int(url.rpartition(":")[2])):
                pass
    assert not (tmp_path / "control.json").exists()
