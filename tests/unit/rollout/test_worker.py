"""The worker role against a real HTTP server that leases, renews, chats and records reports as the proxy does."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tests.unit.rollout.small_proxy import TOKEN, SmallProxy, small_proxy
from turnmill.config import Config
from turnmill.conversation.client import Retry, RolloutApi
from turnmill.conversation.http import HttpClient
from turnmill.environment.base import Chat, Environment, Message, Outcome, Score
from turnmill.environment.wordle import Wordle
from turnmill.errors import BackendUnavailable, InvalidInput
from turnmill.records import Task
from turnmill.rollout.runner import InProcessRunner
from turnmill.rollout.worker import Worker, run_worker


@asynccontextmanager
async def working(
    proxy: SmallProxy, environment: Environment, *, num_slots: int = 4
) -> AsyncIterator[asyncio.Task[None]]:
    """A worker that stops at the end, and must."""
    stop = asyncio.Event()
    config = Config(max_concurrent_rollouts=num_slots, worker_lease_s=1.0)
    worker = asyncio.create_task(
        run_worker(
            proxy_url=proxy.url, worker_token=TOKEN, name="worker-0", config=config, environment=environment, stop=stop
        )
    )
    try:
        yield worker
    finally:
        stop.set()
        await worker


class Failing(Environment):
    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete([{"role": "user", "content": "hello"}])
        raise KeyError(task.id)


class Unscorable(Environment):
    async def play(self, task: Task, chat: Chat) -> Outcome:
        return Outcome()

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=float("nan"))


async def test_rollouts_are_played_and_reported() -> None:
    async with small_proxy() as proxy, working(proxy, Wordle()):
        for number in range(10):
            proxy.queue.put_nowait(f"t_{number}")
        await proxy.until(lambda: len(proxy.reports) == 10)

    assert {report["id"] for report in proxy.reports} == {f"t_{number}" for number in range(10)}
    assert proxy.reports[0] == {
        "id": proxy.reports[0]["id"],
        "aggregate_reward_score": 1.0,
        "metrics_list": [
            {"name": "turns", "value": 1.0, "type": "Metric"},
            {"name": "greens", "value": 5.0, "type": "Metric"},
            {"name": "invalid_guesses", "value": 0.0, "type": "Metric"},
        ],
        "stop_reason": "end_of_conversation",
    }


async def test_no_more_rollouts_are_in_flight_than_there_are_slots() -> None:
    async with small_proxy() as proxy:
        proxy.may_chat.clear()
        for number in range(12):
            proxy.queue.put_nowait(f"t_{number}")
        async with working(proxy, Wordle(), num_slots=3):
            await proxy.until(lambda: proxy.num_chatting == 3)
            assert proxy.queue.qsize() == 9
            proxy.may_chat.set()
            await proxy.until(lambda: len(proxy.reports) == 12)

    assert proxy.most_chatting == 3
    in_flight_limit = [body["max_rollouts"] for body, _ in proxy.leases]
    assert max(in_flight_limit) == 3
    assert all(given <= body["max_rollouts"] for body, given in proxy.leases)


async def test_free_slots_are_leased_in_one_request() -> None:
    async with small_proxy() as proxy:
        for number in range(16):
            proxy.queue.put_nowait(f"t_{number}")
        proxy.may_chat.clear()
        async with working(proxy, Wordle(), num_slots=16):
            await proxy.until(lambda: proxy.num_chatting == 16)

    assert (proxy.leases[0][0]["max_rollouts"], proxy.leases[0][1]) == (16, 16)
    assert len(proxy.leases) == 1


async def test_all_leases_are_renewed_while_their_rollouts_run() -> None:
    async with small_proxy() as proxy:
        proxy.may_chat.clear()
        proxy.queue.put_nowait("t_0")
        proxy.queue.put_nowait("t_1")
        async with working(proxy, Wordle()):
            await proxy.until(lambda: proxy.num_chatting == 2)
            seen = len(proxy.heartbeats)
            await proxy.until(lambda: len(proxy.heartbeats) >= seen + 2)

    assert proxy.heartbeats[-1]["worker"] == "worker-0"
    assert set(proxy.heartbeats[-1]["lease_tokens"]) == {"lease-t_0", "lease-t_1"}


async def test_a_lost_lease_cancels_its_rollout_without_a_report_and_frees_its_slot() -> None:
    async with small_proxy() as proxy:
        proxy.may_chat.clear()
        for sample_id in ("t_0", "t_1", "t_2"):
            proxy.queue.put_nowait(sample_id)
        async with working(proxy, Wordle(), num_slots=2):
            await proxy.until(lambda: proxy.num_chatting == 2)
            proxy.lost.add("lease-t_0")
            await proxy.until(lambda: len(proxy.leases) == 2)
            proxy.may_chat.set()
            await proxy.until(lambda: len(proxy.reports) == 2)

    assert {report["id"] for report in proxy.reports} == {"t_1", "t_2"}


async def test_a_report_on_its_way_is_not_cancelled_by_a_lease_that_ended_with_it() -> None:
    async with small_proxy() as proxy:
        proxy.may_report.clear()
        proxy.queue.put_nowait("t_0")
        async with working(proxy, Wordle()):
            await proxy.until(lambda: proxy.num_reporting == 1)
            proxy.lost.add("lease-t_0")
            seen = len(proxy.heartbeats)
            await proxy.until(lambda: len(proxy.heartbeats) == seen + 2)
            proxy.may_report.set()
            await proxy.until(lambda: proxy.reports)

    assert proxy.heartbeats[-1]["lease_tokens"] == ["lease-t_0"]


async def test_an_exception_of_the_environment_is_reported_as_null_with_a_reason() -> None:
    async with small_proxy() as proxy, working(proxy, Failing()):
        proxy.queue.put_nowait("t_0")
        await proxy.until(lambda: proxy.reports)

    report = proxy.reports[0]
    assert report["aggregate_reward_score"] is None
    assert (report["reason"], report["metrics_list"]) == ("env_error", [])
    assert "KeyError: 't_0'" in report["detail"]


async def test_a_reward_that_is_nan_is_reported_as_null_with_a_reason() -> None:
    async with small_proxy() as proxy, working(proxy, Unscorable()):
        proxy.queue.put_nowait("t_0")
        await proxy.until(lambda: proxy.reports)

    assert proxy.reports[0]["aggregate_reward_score"] is None
    assert proxy.reports[0]["reason"] == "reward_error"


async def test_a_report_of_an_old_attempt_is_no_reason_to_stop() -> None:
    async with small_proxy() as proxy, working(proxy, Wordle(), num_slots=1):
        proxy.refused["t_0"] = 409
        proxy.queue.put_nowait("t_0")
        proxy.queue.put_nowait("t_1")
        await proxy.until(lambda: proxy.reports)

    assert [report["id"] for report in proxy.reports] == ["t_1"]


async def test_a_report_whose_content_is_refused_ends_as_an_env_error() -> None:
    async with small_proxy() as proxy, working(proxy, Wordle()):
        proxy.refused["t_0"] = 400
        proxy.queue.put_nowait("t_0")
        await proxy.until(lambda: proxy.reports)

    assert (proxy.reports[0]["aggregate_reward_score"], proxy.reports[0]["reason"]) == (None, "env_error")


class Unspeakable(Environment):
    """Uses text that is no Unicode text: half a surrogate pair."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        if task.id == "t_0":
            raise ValueError("\ud800")
        return Outcome(reward=1.0, metrics={"\ud800": 1.0} if task.id == "t_1" else {})


async def test_text_that_can_not_be_sent_costs_its_own_rollout_only(caplog: pytest.LogCaptureFixture) -> None:
    # Its log holds that text too, which the test runner can't send to its own parent either.
    caplog.set_level(logging.CRITICAL, logger="turnmill")
    async with small_proxy() as proxy, working(proxy, Unspeakable()):
        for sample_id in ("t_0", "t_1", "t_2"):
            proxy.queue.put_nowait(sample_id)
        await proxy.until(lambda: len(proxy.reports) == 3)

    reports = {report["id"]: report for report in proxy.reports}
    assert [reports[sample_id].get("reason") for sample_id in ("t_0", "t_1", "t_2")] == ["env_error"] * 2 + [None]
    assert "surrogates not allowed" in reports["t_1"]["detail"]


async def test_a_report_is_repeated_when_the_proxy_was_away() -> None:
    async with small_proxy() as proxy, working(proxy, Wordle()):
        proxy.refused["t_0"] = 503
        proxy.queue.put_nowait("t_0")
        await proxy.until(lambda: proxy.reports)

    assert proxy.reports[0]["aggregate_reward_score"] == 1.0


async def test_a_worker_that_stops_ends_its_rollouts_and_reports_nothing() -> None:
    async with small_proxy() as proxy:
        proxy.may_chat.clear()
        proxy.queue.put_nowait("t_0")
        async with working(proxy, Wordle()) as worker:
            await proxy.until(lambda: proxy.num_chatting == 1)

        assert worker.done()
        assert proxy.reports == []


async def test_a_worker_that_is_told_to_stop_before_it_began_returns() -> None:
    async with small_proxy() as proxy:
        stop = asyncio.Event()
        stop.set()
        await run_worker(
            proxy_url=proxy.url, worker_token=TOKEN, name="w", config=Config(), environment=Wordle(), stop=stop
        )

    assert proxy.leases == []


async def test_a_wrong_token_ends_the_worker_with_an_error() -> None:
    async with small_proxy() as proxy:
        with pytest.raises(InvalidInput, match="wrong token"):
            await run_worker(
                proxy_url=proxy.url,
                worker_token="anothertoken0123456789",
                name="w",
                config=Config(),
                environment=Wordle(),
                stop=asyncio.Event(),
            )


async def test_a_proxy_that_stays_away_ends_the_worker_with_an_error() -> None:
    with socket.socket() as deaf:
        # Bound, but not listening: connections are refused.
        deaf.bind(("127.0.0.1", 0))
        async with HttpClient() as session:
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            api = RolloutApi(session, url, TOKEN, retry=Retry(for_s=0.1, first_s=0.01, most_s=0.02))
            runner = InProcessRunner(Wordle(), session, call_timeout_s=1, training_timeout_s=1)
            with pytest.raises(BackendUnavailable, match="no answer from the proxy"):
                await Worker(api, runner, name="w", config=Config()).run(asyncio.Event())


async def test_a_cancelled_worker_ends_its_rollouts() -> None:
    async with small_proxy() as proxy:
        proxy.may_chat.clear()
        proxy.queue.put_nowait("t_0")
        worker = asyncio.create_task(
            run_worker(
                proxy_url=proxy.url,
                worker_token=TOKEN,
                name="w",
                config=Config(),
                environment=Wordle(),
                stop=asyncio.Event(),
            )
        )
        await proxy.until(lambda: proxy.num_chatting == 1)
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker

        assert proxy.reports == []
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith(("rollout ", "play ", "lease", "heartbeat")) for name in names)
