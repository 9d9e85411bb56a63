"""A run's proxy over real embedded ports and a real HTTP server, and a scripted replica that answers its calls."""

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from tests.unit.conversation.talking import Tokens
from turnmill.backends.embedded import open_run
from turnmill.config import Config
from turnmill.conversation.history import checked_call, checked_sample, write_calls
from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.conversation.responses import record_message
from turnmill.conversation.service import Service, SessionCounts
from turnmill.conversation.sessions import Sessions
from turnmill.conversation.shared import SharedSessions
from turnmill.ports import Message, RunPorts, Write
from turnmill.records import (
    Call,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Purpose,
    RolloutRequest,
    RolloutResponse,
    Run,
    RunKind,
    RunStatus,
    SampleRecord,
    SampleState,
    call_key,
    decode,
    encode,
    sample_key,
)

RUN_ID = "run-1"
WORKER_TOKEN = "worker-token-0123456789"
CONFIG = Config(max_length=1000, max_new_tokens=64, call_timeout_s=20.0, worker_lease_s=20.0)
# Tokens that the scripted replica gives to each new message, and to its reply.
TOKENS_IN, TOKENS_OUT = 5, 2


def call_for(request: GenerateRequest, text: str, parent: Call | None) -> Call:
    """A recorded answer as a replica makes it."""
    return Call(
        run_id=request.run_id,
        purpose=request.purpose,
        sample_id=request.sample_id,
        call_id=request.step_id,
        attempt=request.attempt,
        parent=request.parent,
        parent_digest=parent.digest if parent else "",
        choice=request.choice,
        num_choices=request.num_choices,
        tools=None if parent else request.tools,
        tool_choice=request.tool_choice,
        request_digest=request.request_digest,
        sampling=request.sampling,
        messages=request.messages,
        reply={"role": "assistant", "content": text},
        token_ids=[7] * (TOKENS_IN * len(request.messages) + TOKENS_OUT),
        loss_mask=[0] * (TOKENS_IN * len(request.messages)) + [1] * TOKENS_OUT,
        logprobs=[-0.5] * TOKENS_OUT,
        version="0.0",
        finish_reason=FinishReason.STOP,
        created_at=time.time(),
    ).sealed()


@dataclass
class ScriptedReplica:
    """Answers the calls of one generate_request queue, `reply` by `reply`."""

    ports: RunPorts
    requests: list[GenerateRequest] = field(default_factory=list)
    # Text of the answer to a request; a dict is the answer's error.
    reply: Callable[[GenerateRequest], str | dict[str, str]] = lambda request: f"answer {request.step_id}"
    # The record of an answer.
    make: Callable[[GenerateRequest, str, Call | None], Call] = call_for
    # False: the record is written, but nobody is told.
    tells: bool = True
    # Cleared: calls are taken and wait.
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    # Set once a call was taken.
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    index: int = 0

    async def run(self) -> None:
        self.may_answer.set()
        queue = self.ports.generate_request[self.index]
        while True:
            messages = await queue.lease(max_messages=64, lease_s=30, wait_s=5)
            requests = [decode(message.body, GenerateRequest) for message in messages]
            self.requests += requests
            if requests:
                self.was_asked.set()
            await self.may_answer.wait()
            for request in requests:
                await self.answer(request)
            await queue.ack([message.receipt for message in messages])

    async def answer(self, request: GenerateRequest) -> None:
        reply = self.reply(request)
        error = reply if isinstance(reply, dict) else None
        if isinstance(reply, str):
            await write_calls(self.ports.records, [self.make(request, reply, await self._parent(request))])
        if self.tells:
            response = GenerateResponse(
                sample_id=request.sample_id,
                step_id=request.step_id,
                error=error,
                run_id=request.run_id,
                purpose=request.purpose,
            )
            await self.ports.generate_response.send(
                [Message(body=encode(response), group=request.step_id, dedup_id=f"{request.step_id}#{time.time()}")]
            )

    async def _parent(self, request: GenerateRequest) -> Call | None:
        if request.parent is None:
            return None
        key = call_key(request.run_id, request.purpose, request.sample_id, request.parent)
        (stored,) = await self.ports.records.get([key])
        assert stored is not None
        return checked_call(stored)


@dataclass(frozen=True)
class HttpAnswer:
    """Status and JSON of an answer."""

    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        content = self.body["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    @property
    def code(self) -> str:
        code = self.body["error"]["code"]
        assert isinstance(code, str)
        return code


class Form(StrEnum):
    """How a run is served."""

    # By one process, which remembers.
    LONE = "lone"
    # By two at once that share nothing but the records; requests go to the one and the other by turns.
    SHARED = "shared"


@dataclass
class World:
    """One run with its proxy, or its two."""

    root: Path
    ports: RunPorts
    config: Config
    form: Form
    services: Sequence[Service]
    urls: Sequence[str]
    replica: ScriptedReplica
    http: aiohttp.ClientSession

    run: Run
    # Samples that were given up, as `on_dead` was told.
    dead: list[SampleRecord] = field(default_factory=list)
    num_posts: int = 0

    @property
    def is_lone(self) -> bool:
        """One process serves it, which remembers."""
        return self.form is Form.LONE

    @property
    def sessions(self) -> Sessions:
        """The process that remembers."""
        (service,) = self.services
        assert isinstance(service, Sessions)
        return service

    @property
    def counts(self) -> SessionCounts:
        """Of all proxies."""
        names = vars(SessionCounts())
        return SessionCounts(**{name: sum(getattr(one.counts, name) for one in self.services) for name in names})

    @property
    def url(self) -> str:
        return self.urls[0]

    async def add_sample(self, sample_id: str = "task_0", *, purpose: Purpose = Purpose.TRAIN) -> SampleRecord:
        """A requested sample, as the scheduler makes it."""
        request = RolloutRequest(
            sample_id=sample_id,
            timestamp="2026-01-01T00:00:00+00:00",
            max_length=self.config.max_length,
            rewards={"range": [0.0, 1.0]},
            data={"prompt": [{"role": "user", "content": "Guess."}]},
            run_id=RUN_ID,
            purpose=purpose,
        )
        sample = SampleRecord(
            run_id=RUN_ID,
            purpose=purpose,
            sample_id=sample_id,
            task_id="task",
            group_id="group",
            state=SampleState.REQUESTED,
            created_at=time.time(),
            request=request,
            deadline=time.time() + 1000,
        )
        await self.ports.records.write([Write(key=sample.key, value=encode(sample), expected=0)])
        message = Message(body=encode(request), group=sample_id, dedup_id=f"{sample.key}#0")
        await self.ports.rollout_request.send([message])
        return sample

    async def sample(self, sample_id: str = "task_0", *, purpose: Purpose = Purpose.TRAIN) -> SampleRecord:
        (stored,) = await self.ports.records.get([sample_key(RUN_ID, purpose, sample_id)])
        assert stored is not None
        return checked_sample(stored)

    async def alter(self, **changes: Any) -> None:
        """Change the record of task_0 as another role would."""
        sample = replace(await self.sample(), **changes)
        await self.ports.records.write([Write(key=sample.key, value=encode(sample), expected=None)])

    async def post(self, path: str, body: Any, *, token: str | None = None, **headers: str) -> HttpAnswer:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # A stream: aiohttp warns about long bytes.
        data = io.BytesIO(body if isinstance(body, bytes) else encode(body))
        async with self.http.post(self._next(path), data=data, headers=headers) as response:
            return HttpAnswer(status=response.status, body=await response.json(content_type=None))

    async def get(self, path: str, *, token: str | None = None, **headers: str) -> HttpAnswer:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # As it is written, with what is escaped in it.
        async with self.http.get(URL(self._next(path), encoded=True), headers=headers) as response:
            return HttpAnswer(status=response.status, body=await response.json(content_type=None))

    def _next(self, path: str) -> str:
        """A path at the next proxy, or a URL, at the next one where it is one of theirs."""
        base = next((url for url in self.urls if path.startswith(url)), "")
        if path.startswith("http") and not base:
            return path
        self.num_posts += 1
        return self.urls[self.num_posts % len(self.urls)] + path.removeprefix(base)

    async def lease(self, *, max_rollouts: int = 8, wait_s: float = 5.0, token: str = WORKER_TOKEN) -> HttpAnswer:
        body = {"worker": "worker-0", "max_rollouts": max_rollouts, "wait_s": wait_s}
        return await self.post("/v1/rollouts/lease", body, token=token)

    async def lease_one(self) -> dict[str, Any]:
        answer = await self.lease(max_rollouts=1)
        assert answer.status == 200, answer
        (rollout,) = answer.body["rollouts"]
        assert isinstance(rollout, dict)
        return rollout

    async def begin(self, sample_id: str = "task_0") -> dict[str, Any]:
        """A sample, leased."""
        await self.add_sample(sample_id)
        return await self.lease_one()

    async def chat(self, rollout: dict[str, Any], *messages: Any, **more: Any) -> HttpAnswer:
        """Texts are the user's, dicts are messages; `headers` are sent as such, the rest goes into the body."""
        headers = more.pop("headers", {})
        turns = [{"role": "user", "content": item} if isinstance(item, str) else item for item in messages]
        body = {"model": "turnmill", "messages": turns, **more}
        return await self.post(f"{rollout['base_url']}/chat/completions", body, **headers)

    async def report(self, rollout: dict[str, Any], score: float | None = 1.0, **more: Any) -> HttpAnswer:
        body = {
            "id": rollout["request"]["sample_id"],
            "aggregate_reward_score": score,
            "metrics_list": [{"name": "turns", "value": 2, "type": "Metric"}],
            **more,
        }
        return await self.post("/v1/rollouts/report", body, token=rollout["report_secret"])

    async def stored_bytes(self) -> bytes:
        """Everything that is in the run's files."""
        return await asyncio.to_thread(
            lambda: b"".join(path.read_bytes() for path in self.root.rglob("*") if path.is_file())
        )

    async def news(self) -> list[RolloutResponse]:
        """What was told about ended samples."""
        messages = await self.ports.rollout_response.lease(max_messages=64, lease_s=30)
        return [decode(message.body, RolloutResponse) for message in messages]

    async def lose_lease(self) -> None:
        """What a lease that ran out looks like to the proxy: the message is back in the queue."""
        await self.ports.rollout_request.release([(await self.sample()).receipt or ""])

    @asynccontextmanager
    async def restarted(self, **options: Any) -> AsyncIterator["World"]:
        """The same run served by a fresh proxy, beside the first one, which is left alone; `options` of its app."""
        async with _proxy(self.ports, self.config, self.form, **options) as (service, url):
            # The attempt's own paths, at the new address.
            yield replace(self, services=(service,), urls=(url,))

    @asynccontextmanager
    async def beside(self, **options: Any) -> AsyncIterator["World"]:
        """Another server of the same sessions, whose app has these options; it stops them when it is left."""
        async with serve(create_app(self.services[0], **options)) as port:
            yield replace(self, urls=(f"http://127.0.0.1:{port}",))

    def here(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """A rollout whose base_url points to this proxy."""
        return {**rollout, "base_url": self.url + rollout["base_url"][rollout["base_url"].index("/a/") :]}


RUN = Run(
    run_id=RUN_ID,
    cause="test",
    status=RunStatus.ACTIVE,
    created_at=0.0,
    config={},
    sources={},
    data_path="",
    worker_token_hash=hashlib.sha256(WORKER_TOKEN.encode()).hexdigest(),
)


@asynccontextmanager
async def _proxy(
    ports: RunPorts,
    config: Config,
    form: Form,
    run: Run = RUN,
    dead: list[SampleRecord] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Service, str]]:
    async def on_dead(sample: SampleRecord) -> None:
        if dead is not None:
            dead.append(sample)

    if form is Form.LONE:
        async with Sessions(ports, run=run, config=config) as sessions, serve(create_app(sessions, **options)) as port:
            yield sessions, f"http://127.0.0.1:{port}"
    else:
        shared = SharedSessions(ports, run=run, config=config, on_dead=on_dead)
        async with serve(create_app(shared, **options)) as port:
            yield shared, f"http://127.0.0.1:{port}"


async def responding(ports: RunPorts, run: Run) -> None:
    """What a function that is called with the messages of generate_response does."""
    while True:
        messages = await ports.generate_response.lease(max_messages=64, lease_s=30, wait_s=5)
        for message in messages:
            await record_message(ports, run, message.body)
        await ports.generate_response.ack([message.receipt for message in messages])


@asynccontextmanager
async def open_world(
    root: Path, config: Config = CONFIG, form: Form = Form.LONE, *, num_replicas: int = 1
) -> AsyncIterator[World]:
    """Of several replicas the first one is there; the others are the test's own."""
    ports = open_run(root, RUN_ID, num_replicas=num_replicas)
    try:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            num_proxies = 1 if form is Form.LONE else 2
            proxies = [await stack.enter_async_context(_proxy(ports, config, form)) for _ in range(num_proxies)]
            replica = ScriptedReplica(ports)
            running = [asyncio.create_task(replica.run())]
            if form is Form.SHARED:
                running.append(asyncio.create_task(responding(ports, RUN)))
            services, urls = zip(*proxies, strict=True)
            yield World(
                root=root,
                ports=ports,
                config=config,
                form=form,
                services=services,
                urls=urls,
                replica=replica,
                http=http,
                run=RUN,
            )
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    finally:
        ports.close()


@asynccontextmanager
async def open_external_world(
    root: Path, over: Callable[[RunPorts], RunPorts] | None = None, config: Config = CONFIG
) -> AsyncIterator[World]:
    """A run with a foreign trainer, served by two proxies; whoever generates is the test's own.

    `over` puts other ports in the place of the embedded ones.
    """
    embedded = open_run(root, RUN_ID, num_replicas=1)
    ports = embedded if over is None else over(embedded)
    run = replace(RUN, kind=RunKind.EXTERNAL)
    dead: list[SampleRecord] = []
    try:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession())
            proxies = [await stack.enter_async_context(_proxy(ports, config, Form.SHARED, run, dead)) for _ in range(2)]
            services, urls = zip(*proxies, strict=True)
            yield World(
                root=root,
                ports=ports,
                config=config,
                form=Form.SHARED,
                services=services,
                urls=urls,
                replica=ScriptedReplica(ports),
                http=http,
                run=run,
                dead=dead,
            )
    finally:
        embedded.close()


WorldOf = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture(params=list(Form))
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A run with lasting leases, in both forms of the proxy."""
    async with open_world(tmp_path, form=request.param) as opened:
        yield opened


@pytest.fixture
async def lone_world(tmp_path: Path) -> AsyncIterator[World]:
    """A run with lasting leases, served by one process."""
    async with open_world(tmp_path) as opened:
        yield opened


@pytest.fixture
async def shared_world(tmp_path: Path) -> AsyncIterator[World]:
    """A run with lasting leases, served by two processes that share its records."""
    async with open_world(tmp_path, form=Form.SHARED) as opened:
        yield opened


@pytest.fixture(params=list(Form))
def world_of(tmp_path: Path, request: pytest.FixtureRequest) -> WorldOf:
    """A run with parameters of the test's own, in both forms of the proxy."""

    def opened(**changes: Any) -> AbstractAsyncContextManager[World]:
        return open_world(tmp_path, replace(CONFIG, **changes), request.param)

    return opened


@pytest.fixture
def lone_world_of(tmp_path: Path) -> WorldOf:
    """A run with parameters of the test's own, served by one process."""

    def opened(**changes: Any) -> AbstractAsyncContextManager[World]:
        return open_world(tmp_path, replace(CONFIG, **changes))

    return opened


@pytest.fixture
def tokens(world: World) -> Tokens:
    """Of the world's replica, whose replies are unlike one another unless a test says otherwise."""
    tokens = Tokens()
    world.replica.make = tokens.make
    return tokens
