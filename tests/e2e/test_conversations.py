"""What is sampled anew and what is not, seen through the whole path: proxy, queues, replica, records."""

from pathlib import Path

from tests.e2e.house import CONFIG, House, Letters, open_house
from turnmill.conversation.history import read_calls
from turnmill.environment.base import Chat, Environment, Outcome, opening_messages
from turnmill.records import Call, Purpose, SampleRecord, Task
from turnmill.rollout.scheduler import Scheduler

TASK = Task(id="drawn", metadata={"prompt": "Guess the five-letter word."})


async def play(house: House, num: int) -> list[tuple[SampleRecord, list[Call]]]:
    """Play `TASK` `num` times; the samples with their calls, by sample id."""
    ports, run_id = house.ports, house.run.run_id
    scheduler = Scheduler(
        ports.records, ports.rollout_request, ports.rollout_response, run_id, Purpose.EVAL, house.config
    )
    await scheduler.start()
    try:
        await scheduler.request([(TASK, "g")] * num)
        samples: list[SampleRecord] = []
        while len(samples) < num:
            samples += await scheduler.ended()
    finally:
        await scheduler.close()
    samples.sort(key=lambda sample: sample.sample_id)
    return [(s, await read_calls(ports.records, run_id, Purpose.EVAL, s.sample_id)) for s in samples]


def sampled(call: Call) -> list[int]:
    return call.token_ids[-call.num_sampled :]


async def test_a_task_drawn_three_times_gives_three_different_conversations(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        played = await play(house, 3)
    assert [sample.sample_id for sample, _ in played] == ["drawn_0", "drawn_1", "drawn_2"]
    conversations = [tuple(tuple(sampled(call)) for call in calls) for _, calls in played]
    assert len(set(conversations)) == 3
    openings = {tuple(calls[0].token_ids[: -calls[0].num_sampled]) for _, calls in played}
    assert len(openings) == 1, "the same prompt"


async def test_the_same_run_again_samples_the_same_conversations(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        async with open_house(tmp_path / name) as house:
            found.append([[sampled(call) for call in calls] for _, calls in await play(house, 3)])
    assert found[0] == found[1]


class Stubborn(Environment):
    """Asks the same question twice, word by word."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages = opening_messages(task)
        replies = [await chat.complete(messages) for _ in range(2)]
        return Outcome(reward=1.0, metrics={"equal": float(replies[0].content == replies[1].content)})


async def test_an_agent_that_repeats_an_identical_request_gets_two_samples(tmp_path: Path) -> None:
    async with open_house(tmp_path, environment=Stubborn()) as house:
        ((sample, calls),) = await play(house, 1)
    assert sample.calls == ("drawn_0_0", "drawn_0_1") == tuple(call.call_id for call in calls)
    assert calls[0].request_digest == calls[1].request_digest
    assert calls[0].parent is None and calls[1].parent is None
    assert sampled(calls[0]) != sampled(calls[1])


async def test_each_turn_continues_the_stored_tokens_and_sends_only_what_is_new(tmp_path: Path) -> None:
    async with open_house(tmp_path, CONFIG, environment=Letters()) as house:
        ((_, calls),) = await play(house, 1)
    first, second = calls
    assert second.parent == first.call_id and second.parent_digest == first.digest
    assert [message["role"] for message in second.messages] == ["user"]
    for call in calls:
        assert sum(call.loss_mask) == call.num_sampled and call.loss_mask[-call.num_sampled :] == [1] * call.num_sampled
