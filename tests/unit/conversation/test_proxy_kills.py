"""The proxy is killed, by SIGKILL, at each turn of a conversation; its client asks again, with the same key."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.conversation.conftest import CONFIG, RUN, RUN_ID, Form, HttpAnswer, ScriptedReplica, World, responding
from tests.unit.conversation.talking import Tokens, check_sample, user
from turnmill import failpoints
from turnmill.backends.embedded import open_run
from turnmill.conversation.history import read_calls
from turnmill.records import Purpose

NUM_TURNS = 4


@asynccontextmanager
async def proxy(root: Path, form: Form, armed: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.conversation.proxy_child", str(root), form.value),
        env={**os.environ, failpoints.VARIABLE: str(armed)},
        cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield process, f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def world_without_proxy(root: Path, form: Form) -> AsyncIterator[World]:
    """Its replica, and what puts answers into the records where nobody listens to the news."""
    ports = open_run(root, RUN_ID, num_replicas=1)
    replica = ScriptedReplica(ports)
    running = [asyncio.create_task(replica.run())]
    if form is Form.SHARED:
        running.append(asyncio.create_task(responding(ports, RUN)))
    try:
        async with aiohttp.ClientSession() as http:
            yield World(
                root=root,
                ports=ports,
                config=CONFIG,
                form=form,
                services=(),
                urls=(),
                replica=replica,
                http=http,
                run=RUN,
            )
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        ports.close()


async def killed_while_pending(world: World, process: asyncio.subprocess.Process, ask: Callable[[], Any]) -> None:
    """The replica has the request, and answers when the proxy is gone."""
    world.replica.may_answer.clear()
    world.replica.was_asked.clear()
    asking = asyncio.create_task(ask())
    await world.replica.was_asked.wait()
    process.kill()
    await process.wait()
    with pytest.raises(aiohttp.ClientError):
        await asking
    world.replica.may_answer.set()


async def killed_when_answered(world: World, process: asyncio.subprocess.Process, ask: Callable[[], Any]) -> None:
    """The call is recorded; its client may or may not have read the answer."""
    answer: HttpAnswer = await ask()
    assert answer.status == 200, answer
    process.kill()
    await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("killed", [killed_while_pending, killed_when_answered])
async def test_a_conversation_whose_proxy_is_killed_at_each_turn_is_exact(
    tmp_path: Path, form: Form, killed: Callable[..., Any]
) -> None:
    async with world_without_proxy(tmp_path / "root", form) as world:
        tokens = Tokens()
        world.replica.make = tokens.make
        said: list[dict[str, Any]] = []
        rollout: dict[str, Any] = {}
        ids: list[str] = []
        for turn in range(NUM_TURNS):
            said.append(user(f"turn {turn}"))
            headers = {"Idempotency-Key": f"key {turn}"}
            async with proxy(world.root, form, tmp_path) as (process, url):
                world.urls = (url,)
                rollout = world.here(rollout) if rollout else await world.begin()
                asked = rollout
                await killed(world, process, lambda: world.chat(asked, *said, headers=headers))  # noqa: B023
            async with proxy(world.root, form, tmp_path) as (process, url):
                world.urls = (url,)
                rollout = world.here(rollout)
                answer = await world.chat(rollout, *said, headers=headers)
                assert answer.status == 200, answer
                ids.append(answer.body["id"])
                said.append(answer.body["choices"][0]["message"])
                if turn == NUM_TURNS - 1:
                    assert (await world.report(rollout)).status == 200
        assert list((await world.sample()).calls) == ids
        (row,) = await check_sample(world, tokens)
        assert [span.call_id for span in row.spans] == ids
        calls = await read_calls(world.ports.records, RUN_ID, Purpose.TRAIN, "task_0")
        # Whatever else was generated belongs to nobody.
        assert killed is killed_while_pending or [call.call_id for call in calls] == ids


@pytest.mark.slow
@pytest.mark.parametrize("form", list(Form))
async def test_attempts_and_proxies_that_die_at_each_turn_leave_one_branch(tmp_path: Path, form: Form) -> None:
    """At each turn the worker's lease runs out and the proxy is killed; the next attempt says something else there."""
    async with world_without_proxy(tmp_path / "root", form) as world:
        tokens = Tokens()
        world.replica.make = tokens.make
        rollout: dict[str, Any] = {}
        ids: list[str] = []
        for attempt in range(1, CONFIG.max_attempts + 1):
            async with proxy(world.root, form, tmp_path) as (_, url):
                world.urls = (url,)
                rollout = await (world.begin() if attempt == 1 else world.lease_one())
                said: list[dict[str, Any]] = []
                ids = []
                for turn in range(NUM_TURNS):
                    own = f" by {attempt}" if turn >= attempt else ""
                    said.append(user(f"turn {turn}{own}"))
                    answer = await world.chat(rollout, *said)
                    ids.append(answer.body["id"])
                    said.append(answer.body["choices"][0]["message"])
                if attempt == CONFIG.max_attempts:
                    assert (await world.report(rollout)).status == 200
            await world.lose_lease()
        sample = await world.sample()
        assert list(sample.calls) == ids
        (row,) = await check_sample(world, tokens)
        assert [span.call_id for span in row.spans] == ids
        calls = {call.call_id: call for call in await read_calls(world.ports.records, RUN_ID, Purpose.TRAIN, "task_0")}
        assert len(calls) > len(ids), "dead branches are there, and in no row"
        # Each attempt has replayed what it said as the one before did.
        assert [calls[call_id].attempt for call_id in ids] == [1, 2, 3, 3]
