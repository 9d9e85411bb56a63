"""Plays stored conversations again with an environment, as a worker plays rollouts: by a runner, side by side.

    Stored -> secret of its replay -> runner (in process | boxed) -> RolloutResult | Divergence -> Rescored
    all of a group rescored -> the reward functions per group, by the same runner -> what the group adds

The model of each rollout is the replay of its own conversation, at a port of this machine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from turnmill.config import Config
from turnmill.conversation.client import LeasedRollout
from turnmill.conversation.http import HttpClient
from turnmill.conversation.replayed import ReplayApp, Replayed, ReplayedChats
from turnmill.conversation.requests import offers_of
from turnmill.conversation.serving import listening
from turnmill.environment.base import Environment
from turnmill.environment.groups import group_metadata, values_of
from turnmill.errors import RecordCorrupt, RolloutGivenBack
from turnmill.records import Call, InvalidReason, RolloutRequest, RolloutResult, Run, SampleRecord
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.boxed import BoxedRunner
from turnmill.rollout.runner import InProcessRunner, Runner
from turnmill.wiring.rescoring.comparison import Rescored, Verdict

# As often is a conversation played that shared its box with one that ended it; the last time it is alone.
_MOST_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Played:
    """A conversation that was played again, with what scoring its group needs."""

    rescored: Rescored
    # That the environment asked for again, in order of first use.
    calls: Sequence[Call]
    stop_reason: str | None = None


class Player:
    """Made by `player`."""

    def __init__(self, runner: Runner, chats: ReplayedChats, app: ReplayApp, url: str, config: Config) -> None:
        self._runner = runner
        self._chats = chats
        self._app = app
        self._url = url
        self._config = config

    async def play(self, sample: SampleRecord, calls: Sequence[Call]) -> Played:
        """`calls` are all that are recorded of the sample; raises `RecordCorrupt` where one that it used is not."""
        by_id = {call.call_id: call for call in calls}
        if missing := [call_id for call_id in sample.calls if call_id not in by_id]:
            raise RecordCorrupt(f"{sample.key}: its call {missing[0]} is not recorded any more")
        result, replayed = await self._run(sample.request, sample, [by_id[call_id] for call_id in sample.calls])
        known = Rescored(
            sample=sample,
            verdict=Verdict.RESCORED,
            num_calls=len(replayed.attempt.consumed),
            num_stored_calls=len(sample.calls),
        )
        if replayed.divergence is not None:
            turn, what = replayed.divergence.turn, replayed.divergence.what
            rescored = replace(known, verdict=Verdict.DIVERGED, turn=turn, detail=what)
        elif result.reward is None:
            rescored = replace(known, verdict=Verdict.INVALID, reason=result.reason, detail=result.detail)
        else:
            rescored = replace(known, reward=result.reward, metrics=result.metrics, turn_rewards=result.turn_rewards)
        return Played(rescored=rescored, calls=replayed.consumed, stop_reason=result.stop_reason)

    async def score_group(self, members: Sequence[Played]) -> list[Rescored]:
        """What the functions per group add to each; all are invalid where these fail. In the order of sample ids."""
        ordered = sorted(members, key=lambda played: played.rescored.sample.sample_id)
        first = ordered[0].rescored.sample
        data = group_metadata(
            [
                (
                    replace(
                        played.rescored.sample,
                        reward=played.rescored.reward,
                        metrics=dict(played.rescored.metrics),
                        stop_reason=played.stop_reason,
                    ),
                    played.calls,
                )
                for played in ordered
            ]
        )
        request = replace(first.request, sample_id=f"group-{first.group_id}", data=data)
        result, _ = await self._run(request, replace(first, calls=()), [])
        values = None if result.reward is None else values_of(result.metrics, len(ordered))
        if values is None:
            why = result.detail or f"it did not return a number for each of {len(ordered)} samples"
            return [
                replace(
                    played.rescored,
                    verdict=Verdict.INVALID,
                    reward=None,
                    reason=result.reason or InvalidReason.REWARD_ERROR,
                    detail=f"its group can't be scored: {why}",
                )
                for played in ordered
            ]
        return [replace(played.rescored, group_reward=value) for played, value in zip(ordered, values, strict=True)]

    async def _run(
        self, request: RolloutRequest, sample: SampleRecord, calls: Sequence[Call]
    ) -> tuple[RolloutResult, Replayed]:
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            with self._replaying(sample, calls) as (base_url, replayed):
                try:
                    return await self._runner.run(self._leased(request, attempt, base_url)), replayed
                except RolloutGivenBack as error:
                    why = str(error)
        return RolloutResult(reason=InvalidReason.INFRA, detail=why), replayed

    @contextmanager
    def _replaying(self, sample: SampleRecord, calls: Sequence[Call]) -> Iterator[tuple[str, Replayed]]:
        secret, replayed = self._chats.open(sample, calls)
        try:
            yield f"{self._url}/a/{secret}/v1", replayed
        finally:
            self._chats.close(secret)
            self._app.end(secret)

    def _leased(self, request: RolloutRequest, attempt: int, base_url: str) -> LeasedRollout:
        """What a worker would be given; nobody waits for a report."""
        return LeasedRollout(
            request=request,
            attempt=attempt,
            base_url=base_url,
            report_secret="",
            deadline=time.time() + self._config.training_timeout,
            lease_token="",
            lease_s=self._config.worker_lease_s,
        )


@asynccontextmanager
async def player(run: Run, config: Config, environment: Environment | Settings) -> AsyncIterator[Player]:
    """Plays conversations of `run` with an `Environment`, or in boxes that are made by `Settings`.

    `config` is the run's, with what is to be different. Raises `InvalidInput` for an environment that does not load.
    """
    offers = offers_of(config, run.kind)
    chats = ReplayedChats(offer=next(iter(offers.values())), offers=offers, created_at=run.created_at)
    app = ReplayApp(chats)
    async with (
        listening(app, host="127.0.0.1", port=0, name="replay") as port,
        HttpClient() as session,
        _runner(session, config, environment) as runner,
    ):
        yield Player(runner, chats, app, f"http://127.0.0.1:{port}", config)


@asynccontextmanager
async def _runner(session: HttpClient, config: Config, environment: Environment | Settings) -> AsyncIterator[Runner]:
    if isinstance(environment, Settings):
        boxed = BoxedRunner(
            environment,
            session,
            num_slots=config.max_concurrent_rollouts,
            max_attempts=_MOST_ATTEMPTS,
            training_timeout_s=config.training_timeout,
        )
        async with boxed as runner:
            yield runner
    else:
        yield InProcessRunner(
            environment,
            session,
            call_timeout_s=config.call_timeout_s,
            training_timeout_s=config.training_timeout,
        )


async def play_all(
    player: Player,
    samples: Iterable[SampleRecord],
    read_calls: Callable[[SampleRecord], list[Call]],
    *,
    num_at_once: int,
    told: Callable[[Rescored], None],
) -> list[Played]:
    """All of them, `num_at_once` side by side; `read_calls` blocks and is called in a thread, `told` of each one."""
    waiting = iter(samples)
    found: list[Played] = []

    async def work() -> None:
        for sample in waiting:
            calls = await asyncio.to_thread(read_calls, sample)
            played = await player.play(sample, calls)
            found.append(played)
            told(played.rescored)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(num_at_once):
                group.create_task(work(), name=f"rescore-{number}")
    except ExceptionGroup as errors:
        # What environments do wrong is data: the first thing that is none ends it all.
        raise errors.exceptions[0] from errors
    return found
