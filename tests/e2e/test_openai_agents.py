"""An agent written for OpenAI, with its client swapped: what it says is trained on, token by token."""

from pathlib import Path
from typing import Any

import openai

from tests.e2e.house import TOKEN, open_house
from turnmill import AsyncTurnmillClient
from turnmill.conversation.client import RolloutApi
from turnmill.conversation.history import read_calls
from turnmill.conversation.http import HttpClient
from turnmill.environment.wordle import feedback, parse_guess
from turnmill.records import Purpose, SampleState, Task
from turnmill.rollout.scheduler import Scheduler

ANSWER = "crane"
TASK = Task(id="drawn", metadata={"prompt": "Guess the five-letter word.", "answer": ANSWER})


async def play_wordle(client: openai.AsyncOpenAI, opening: str) -> tuple[float, int]:
    """Knows OpenAI's library and nothing else."""
    messages: list[Any] = [{"role": "user", "content": opening}]
    for turn in range(6):
        completion = await client.chat.completions.create(model="turnmill", messages=messages)
        message = completion.choices[0].message
        messages.append(message)
        guess = parse_guess(message.content or "")
        if guess == ANSWER:
            return 1.0, turn + 1
        messages.append({"role": "user", "content": feedback(guess, ANSWER) if guess else "Not a five-letter word."})
    return 0.0, 6


async def test_an_openai_agent_plays_and_reports_with_the_client_swapped(tmp_path: Path) -> None:
    async with open_house(tmp_path, has_worker=False) as house, HttpClient() as session:
        ports, run_id = house.ports, house.run.run_id
        scheduler = Scheduler(
            ports.records, ports.rollout_request, ports.rollout_response, run_id, Purpose.EVAL, house.config
        )
        await scheduler.start()
        await scheduler.request([(TASK, "g")])
        api = RolloutApi(session, house.sessions.base_url, TOKEN)
        (leased,) = await api.lease(worker="w", max_rollouts=1, wait_s=10)
        async with AsyncTurnmillClient(base_url=leased.base_url, report_secret=leased.report_secret) as client:
            reward, num_turns = await play_wordle(client, leased.request.data["prompt"])
            await client.report_rollout(leased.request.sample_id, reward, {"turns": num_turns})
        (sample,) = await scheduler.ended()
        calls = await read_calls(ports.records, run_id, Purpose.EVAL, sample.sample_id)
        await scheduler.close()

    assert (sample.state, sample.reward, sample.metrics) == (SampleState.REPORTED, reward, {"turns": float(num_turns)})
    assert sample.calls == tuple(call.call_id for call in calls)
    # OpenAI's message objects, sent back as they came, go on with the stored tokens: nothing is rendered again.
    assert [call.parent for call in calls] == [None, *sample.calls[:-1]]
    assert len(calls) == num_turns
    assert house.sessions.counts.num_forks == 0
