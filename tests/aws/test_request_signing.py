"""Signed requests get through a gate that works every signature out again, and nothing else does."""

import asyncio
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from aiohttp import web
from botocore.credentials import Credentials, RefreshableCredentials

from tests.aws.iam_gate import REGION, Gate, Key, guarded
from tests.unit.conversation.conftest import CONFIG, WORKER_TOKEN, open_world
from tests.unit.conversation.later_server import SECRET, later
from turnmill import AsyncTurnmillClient
from turnmill.backends.aws.http_auth import SigV4Auth
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.aws.signing import RequestSigner
from turnmill.conversation.client import ChatClient, Retry, RolloutApi
from turnmill.conversation.http import HttpClient, Url
from turnmill.conversation.polling import Pauses
from turnmill.environment.base import Chat, Environment, Message, Outcome, Score
from turnmill.errors import BackendUnavailable, GenerationFailed, InvalidInput
from turnmill.records import RolloutResponse, RolloutResult, SampleState, StopReason, Task, decode
from turnmill.rollout.worker import run_worker

MESSAGES: list[Any] = [{"role": "user", "content": "Rate « crâne », 鶴, 🦩."}]
LASTING = Key(secret="secret/a+b=")
FAST = Retry(first_s=0.001, most_s=0.01)
POLL = Pauses(first_s=0.001, most_s=0.005)


def signer_with(access_key: str, key: Key, **options: Any) -> RequestSigner:
    return RequestSigner(lambda: Credentials(access_key, key.secret, key.token), region=REGION, **options)


def at(gate: Gate, url: str) -> str:
    """The same path behind the gate."""
    return gate.url + url[url.index("/a/") :]


async def test_a_rollout_is_played_and_reported_through_the_gate_by_openais_client(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, guarded(world.url, AKIA=LASTING) as gate:
        rollout = await world.begin()
        auth = SigV4Auth(signer_with("AKIA", LASTING))
        async with AsyncTurnmillClient(
            base_url=at(gate, rollout["base_url"]), auth=auth, report_secret=rollout["report_secret"]
        ) as client:
            completion = await client.chat.completions.create(model="turnmill", messages=MESSAGES)
            await client.report_rollout("task_0", 0.5, {"größe": 1.0})

        assert completion.choices[0].message.content == "answer task_0_0"
        sample = await world.sample()
        assert (sample.state, sample.metrics) == (SampleState.REPORTED, {"größe": 1.0})
        assert (gate.passed, gate.refused) == (["AKIA"] * 2, [])


async def test_the_light_client_leases_plays_and_reports_through_the_gate(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, guarded(world.url, AKIA=LASTING) as gate:
        await world.add_sample()
        async with HttpClient(signer_with("AKIA", LASTING)) as session:
            api = RolloutApi(session, gate.url, WORKER_TOKEN)
            (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=5)
            chat = ChatClient(session, at(gate, leased.base_url), timeout_s=10, deadline=math.inf)
            assert (await chat.complete(MESSAGES)).content == "answer task_0_0"
            assert await api.heartbeat(worker="w", lease_tokens=[leased.lease_token]) == []
            await api.report(leased, RolloutResult(reward=0.5))

        assert (await world.sample()).state is SampleState.REPORTED
        assert (gate.passed, gate.refused) == (["AKIA"] * 4, [])


class Echo(Environment):
    """One turn, rewarded whatever it says."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete([{"role": "user", "content": "hello"}])
        return Outcome(stop_reason=StopReason.END_OF_CONVERSATION)

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=0.5)


async def test_a_worker_plays_behind_the_gate_with_a_signer(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world, guarded(world.url, AKIA=LASTING) as gate:
        world.sessions.base_url = gate.url
        await world.add_sample()
        stop = asyncio.Event()
        worker = asyncio.create_task(
            run_worker(
                proxy_url=gate.url,
                worker_token=WORKER_TOKEN,
                name="worker-0",
                config=CONFIG,
                environment=Echo(),
                stop=stop,
                sign=signer_with("AKIA", LASTING),
            )
        )
        ended: list[RolloutResponse] = []
        try:
            while not ended and not worker.done():
                messages = await world.ports.rollout_response.lease(max_messages=1, lease_s=30, wait_s=1)
                ended = [decode(message.body, RolloutResponse) for message in messages]
        finally:
            stop.set()
            await worker
        sample = await world.sample()
        assert (sample.state, sample.reward, sample.calls) == (SampleState.REPORTED, 0.5, ("task_0_0",))
        assert gate.refused == []
        assert {"lease", "completions", "report"} <= {path.rpartition("/")[2] for path in gate.paths}


async def test_questions_for_a_late_answer_and_repeated_requests_are_signed_anew() -> None:
    async with later(num_pending=2) as proxy, guarded(proxy.url, AKIA=LASTING) as gate:
        answers = [web.Response(status=502), None, web.Response(status=503)]
        gate.instead = lambda request: answers.pop(0) if answers else None
        signer = signer_with("AKIA", LASTING)
        base_url = f"{gate.url}/a/{SECRET}/v1"
        async with AsyncTurnmillClient(base_url=base_url, auth=SigV4Auth(signer), poll_interval_s=0.01) as client:
            completion = await client.chat.completions.create(model="turnmill", messages=MESSAGES)
        async with HttpClient(signer) as session:
            chat = ChatClient(session, base_url, timeout_s=10, deadline=math.inf, poll=POLL)
            reply = await chat.complete(MESSAGES)

        # The id of a step holds a slash and an umlaut.
        assert (completion.id, reply.content) == ("task/ö_0_0", "answer task/ö_0_1 to 1")
        assert (proxy.num_sampled, gate.refused) == (2, [])
        # A bearer token that openai demands is not lost, and not mistaken for a signature.
        assert {headers["x-turnmill-authorization"] for _, _, headers in proxy.requests[:4]} == {"Bearer none"}


QUERIES = ["q=1", "b=2&a=1&a=0", "x=a%20b%2Fc%2B&empty=", "%C3%B6=%E9%B6%B4~-_."]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("path", ["/", "/a/b%2Fc/%E9%B6%B4%20x", "/~-_.;v=1/@:"])
async def test_any_path_and_query_is_signed(query: str, path: str) -> None:
    async with guarded("", AKIA=LASTING) as gate:
        gate.instead = lambda request: web.json_response({"path": request.raw_path})
        signer = signer_with("AKIA", LASTING)
        url = f"{gate.url}{path}?{query}"
        async with httpx2.AsyncClient(auth=SigV4Auth(signer)) as client, HttpClient(signer) as session:
            sent = await client.post(url, content="crâne".encode(), headers={"X-Words": "a   b"})
            assert sent.status_code == 200, sent.text
            status, _ = await session.post(Url.parse(url), b"{}", {"X-Words": "a   b"}, timeout_s=10)
            assert status == 200
            status, _ = await session.get(Url.parse(url), {}, timeout_s=10)
            assert status == 200


@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("0a1b2c3d4e.lambda-url.eu-west-1.on.aws", "eu-west-1"),
        ("proxy.example.org", REGION),
        ("0a1b2c3d4e.lambda-url.eu-west-1.on.aws.example.org", REGION),
    ],
)
def test_the_url_of_a_function_is_signed_for_its_own_region(host: str, region: str) -> None:
    signed = signer_with("AKIA", LASTING).sign("POST", f"https://{host}/rollouts/lease", {}, b"")
    assert f"/{region}/lambda/aws4_request" in signed["Authorization"]


async def test_code_without_a_loop_signs_as_well() -> None:
    async with guarded("", AKIA=LASTING) as gate:
        gate.instead = lambda request: web.json_response({})

        def ask() -> int:
            with httpx2.Client(auth=SigV4Auth(signer_with("AKIA", LASTING))) as client:
                return client.post(gate.url, json={"a": 1}).status_code

        assert await asyncio.to_thread(ask) == 200


async def test_wrong_secrets_and_unsigned_requests_do_not_get_through() -> None:
    async with later() as proxy, guarded(proxy.url, AKIA=LASTING) as gate:
        base_url = f"{gate.url}/a/{SECRET}/v1"
        wrong = signer_with("AKIA", Key(secret="another"))
        async with AsyncTurnmillClient(base_url=base_url, auth=SigV4Auth(wrong)) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(model="turnmill", messages=MESSAGES)
        async with HttpClient() as session:
            with pytest.raises(GenerationFailed, match="Missing Authentication Token"):
                await ChatClient(session, base_url, timeout_s=10, deadline=math.inf).complete(MESSAGES)

        assert gate.refused == [
            "The request signature we calculated does not match the signature you provided.",
            "Missing Authentication Token",
        ]
        assert proxy.requests == []


class Issuer:
    """Gives out credentials that last for a moment, as a role's do, and lets the gate know."""

    def __init__(self, keys: dict[str, Key]) -> None:
        self._keys = keys
        self.count = 0

    def issue(self) -> dict[str, str]:
        for key in self._keys.values():
            key.is_expired = True
        self.count += 1
        name = f"ASIA{self.count}"
        self._keys[name] = Key(secret=f"secret-{self.count}", token=f"token-{self.count}/+=")
        # Botocore renews what expires within a quarter of an hour.
        expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
        key = self._keys[name]
        return {
            "access_key": name,
            "secret_key": key.secret,
            "token": key.token or "",
            "expiry_time": expiry.isoformat(),
        }


async def test_credentials_that_rotate_are_used_from_the_next_request_on() -> None:
    async with later(num_pending=2) as proxy, guarded(proxy.url) as gate:
        issuer = Issuer(gate.keys)
        credentials = RefreshableCredentials.create_from_metadata(issuer.issue(), issuer.issue, "test")
        signer = RequestSigner(lambda: credentials, region=REGION)
        base_url = f"{gate.url}/a/{SECRET}/v1"
        async with AsyncTurnmillClient(base_url=base_url, auth=SigV4Auth(signer), poll_interval_s=0.01) as client:
            await client.chat.completions.create(model="turnmill", messages=MESSAGES)
        async with HttpClient(signer) as session:
            await ChatClient(session, base_url, timeout_s=10, deadline=math.inf, poll=POLL).complete(MESSAGES)

        # Each request with credentials of its own, all of which were good for it alone.
        assert len(gate.passed) == len(set(gate.passed)) == 8
        assert gate.refused == []


async def test_credentials_that_do_not_renew_themselves_are_read_again() -> None:
    now = 0.0
    keys = {"AKIA1": Key(secret="one"), "AKIA2": Key(secret="two")}
    current = "AKIA1"
    async with guarded("", **keys) as gate:
        gate.instead = lambda request: web.json_response({})
        signer = RequestSigner(lambda: Credentials(current, keys[current].secret), region=REGION, clock=lambda: now)
        async with HttpClient(signer) as session:
            for now in (0.0, 29.0, 31.0):
                if now == 29.0:
                    current = "AKIA2"
                await session.get(Url.parse(gate.url), {}, timeout_s=10)

        assert gate.passed == ["AKIA1", "AKIA1", "AKIA2"]


async def test_without_credentials_or_region_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="AWS_PROFILE"):
        await RequestSigner(lambda: None, region=REGION)("GET", "http://proxy/", {}, b"")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(InvalidInput, match="AWS_REGION"):
        RequestSigner.of(AwsSettings())
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InvalidInput, match="nobody"):
        RequestSigner.of(AwsSettings())


async def test_credentials_that_can_not_be_renewed_are_an_unavailable_backend() -> None:
    async with guarded("") as gate:
        issuer = Issuer(gate.keys)
        gone = {**issuer.issue(), "expiry_time": "2020-01-01T00:00:00Z"}
        credentials = RefreshableCredentials.create_from_metadata(gone, lambda: gone, "test")
        signer = RequestSigner(lambda: credentials, region=REGION)
        with pytest.raises(BackendUnavailable, match="can't be read"):
            await signer("GET", gate.url, {}, b"")
        async with AsyncTurnmillClient(base_url=gate.url, auth=SigV4Auth(signer), max_retries=1) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="turnmill", messages=MESSAGES)


async def test_a_request_that_can_not_be_signed_for_now_is_tried_again() -> None:
    async with later(num_pending=0) as proxy, guarded(proxy.url) as gate:
        issuer = Issuer(gate.keys)
        gone = {**issuer.issue(), "expiry_time": "2020-01-01T00:00:00Z"}
        issued = [gone, gone]
        credentials = RefreshableCredentials.create_from_metadata(
            gone, lambda: issued.pop() if issued else issuer.issue(), "test"
        )
        signer = RequestSigner(lambda: credentials, region=REGION)
        base_url = f"{gate.url}/a/{SECRET}/v1"
        async with HttpClient(signer) as session:
            chat = ChatClient(session, base_url, timeout_s=10, deadline=math.inf, retry=FAST, poll=POLL)
            assert (await chat.complete(MESSAGES)).content == "answer task/ö_0_0 to 1"
        issued += [gone]
        async with AsyncTurnmillClient(base_url=base_url, auth=SigV4Auth(signer), poll_interval_s=0.01) as client:
            completion = await client.chat.completions.create(model="turnmill", messages=MESSAGES)

        assert (completion.id, proxy.num_sampled, gate.refused) == ("task/ö_0_1", 2, [])
