"""Conversations with a model in this process, sampled as a replica samples them: for the figures of a model card.

    tasks -> environment.play <-> chat -> renderer -> engine -> reply        without proxy, queues and processes

The renderer, the engine and the reading of tool calls are those of a replica, so tokens and texts are too.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from turnmill.environment import Environment
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineCall, EngineResult
from turnmill.generation.renderer import Renderer
from turnmill.generation.replies import read_reply
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import Reply, RolloutResult, Sampling, Task

NUM_SLOTS = 64


class ModelPlayer:
    """Plays tasks with the model in a folder."""

    def __init__(self, folder: Path, *, max_length: int, max_new_tokens: int) -> None:
        self.renderer = Renderer(folder)
        self.max_length = max_length
        self.max_new_tokens = max_new_tokens
        self._engine = TransformersEngine(folder, num_slots=NUM_SLOTS, max_length=max_length)
        self._asked: dict[str, asyncio.Future[EngineResult]] = {}

    def play(self, environment: Environment, tasks: Sequence[Task], seed: str) -> list[RolloutResult]:
        """One conversation for each entry of `tasks`; raises `RuntimeError` where one has no reward."""
        return asyncio.run(self._play(environment, tasks, seed))

    async def ask(self, call: EngineCall) -> EngineResult:
        """Raises `GenerationFailed` for a call that the engine can't run."""
        self._engine.submit(call)
        self._asked[call.call_id] = asyncio.get_running_loop().create_future()
        return await self._asked[call.call_id]

    async def _play(self, environment: Environment, tasks: Sequence[Task], seed: str) -> list[RolloutResult]:
        # As many at once as there are slots, so that each conversation's cache stays.
        free = asyncio.Semaphore(NUM_SLOTS)

        async def one(index: int, task: Task) -> RolloutResult:
            async with free:
                chat = _Chat(self, f"{seed}-{index}")
                return await play_scored(environment, task, WatchedChat(chat))

        playing = asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
        while not playing.done():
            # Everybody who has something to say says it before the next step.
            await asyncio.sleep(0)
            for result in self._engine.step():
                self._engine.keep(result.call_id, result.call_id)
                self._asked.pop(result.call_id).set_result(result)
        results = await playing
        if failed := [result.detail for result in results if result.reward is None]:
            raise RuntimeError(f"{len(failed)} conversations have no reward: {failed[0]}")
        return results


class _Chat:
    """One conversation: messages are only ever appended."""

    def __init__(self, player: ModelPlayer, name: str) -> None:
        self._player = player
        self._name = name
        self._ids: list[int] = []
        self._num_messages = 0
        self._num_calls = 0
        # Name of the cache that holds the conversation.
        self._held: str | None = None

    async def complete(self, messages: Sequence[Mapping[str, Any]], **params: Any) -> Reply:
        renderer, tools = self._player.renderer, params.get("tools")
        new = [dict(message) for message in messages[self._num_messages :]]
        if self._held is None:
            new_ids = renderer.opening(new, tools)
        else:
            new_ids = renderer.continuation(new, ended=self._ids[-1] in renderer.end_ids, tools=tools)
        room = min(self._player.max_new_tokens, self._player.max_length - len(self._ids) - len(new_ids))
        if room < 1:
            raise GenerationFailed("context_length_exceeded", "the conversation is full")
        call_id = f"{self._name}/{self._num_calls}"
        result = await self._player.ask(
            EngineCall(
                call_id=call_id,
                seed_parts=(call_id,),
                prefix_key=self._held,
                new_ids=new_ids,
                context_ids=self._ids,
                sampling=Sampling(),
                max_new_tokens=room,
                end_ids=renderer.end_ids,
            )
        )
        self._ids = [*self._ids, *new_ids, *result.token_ids]
        self._held, self._num_calls, self._num_messages = call_id, self._num_calls + 1, len(messages) + 1
        syntax = renderer.syntax if tools else None
        reply = read_reply(renderer, syntax, result.token_ids, call_id=call_id, finish_reason=result.finish_reason)
        return Reply(message=reply.message, finish_reason=reply.finish_reason)


def describe(results: Sequence[RolloutResult]) -> str:
    """Mean reward, the share with the full one, and the means of the metrics."""
    rewards = [result.reward or 0.0 for result in results]
    metrics = {name: fmean(result.metrics[name] for result in results) for name in results[0].metrics}
    solved = fmean(float(reward == 1.0) for reward in rewards)
    parts = [f"{name} {value:.2f}" for name, value in metrics.items()]
    return f"reward {fmean(rewards):.3f}, solved {solved:.3f}, {', '.join(parts)}"
