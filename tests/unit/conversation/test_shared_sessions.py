"""Two proxies that share nothing but the records: races, crashes and lost messages between them."""

import asyncio
from typing import TYPE_CHECKING, Any

from turnmill.conversation.history import checked_ask, read_asks
from turnmill.conversation.shared import SharedSessions
from turnmill.errors import BackendUnavailable
from turnmill.ports import Write
from turnmill.records import Ask, AskedCall, Purpose, encode

if TYPE_CHECKING:
    from tests.unit.conversation.conftest import World


async def asks_of(world: "World", sample_id: str = "task_0") -> list[Ask]:
    found = await read_asks(world.ports.records, "run-1", Purpose.TRAIN, sample_id)
    return [checked_ask(stored) for stored in found]


async def test_equal_requests_at_both_proxies_each_get_a_recorded_answer_of_their_own(shared_world: "World") -> None:
    first = await shared_world.begin()
    recorded = {(await shared_world.chat(first, "Guess.")).body["id"] for _ in range(6)}
    await shared_world.lose_lease()
    second = await shared_world.lease_one()
    answers = await asyncio.gather(*(shared_world.chat(second, "Guess.") for _ in range(8)))
    ids = [answer.body["id"] for answer in answers]
    assert len(set(ids)) == 8
    assert recorded < set(ids)
    assert len(shared_world.replica.requests) == 8
    assert (await shared_world.report(second)).status == 200
    assert set((await shared_world.sample()).calls) == set(ids)
    assert [ask.index for ask in await asks_of(shared_world)] == list(range(14))


async def test_one_key_at_both_proxies_at_once_is_one_call(shared_world: "World") -> None:
    rollout = await shared_world.begin()
    tries = [shared_world.chat(rollout, "Guess.", headers={"Idempotency-Key": "k"}) for _ in range(8)]
    answers = await asyncio.gather(*tries)
    assert {answer.body["id"] for answer in answers} == {"task_0_0"}
    assert len(shared_world.replica.requests) == 1
    assert shared_world.counts.num_retries == 7


async def test_an_ask_whose_proxy_died_before_it_was_sent_is_sent_by_the_next_that_looks(
    shared_world: "World",
) -> None:
    rollout = await shared_world.begin()
    await shared_world.chat(rollout, "Guess.")
    # What a process leaves that dies after its claim, long ago.
    (ask,) = await asks_of(shared_world)
    left = Ask(
        **{
            **{name: getattr(ask, name) for name in Ask.__struct_fields__},
            "index": 1,
            "calls": (AskedCall(call_id="task_0_1", step_id="task_0_1"),),
            "idempotency_key": "k",
            "nonce": "n",
            "sent_at": ask.sent_at - 1000,
        }
    )
    await shared_world.ports.records.write([Write(key=left.key, value=encode(left), expected=0)])
    poll = shared_world.get(f"{rollout['base_url']}/chat/completions/task_0_1", Prefer="wait=20")
    retry = shared_world.chat(rollout, "Guess.", headers={"Idempotency-Key": "k"})
    answers = await asyncio.gather(poll, retry)
    assert {answer.body["id"] for answer in answers} == {"task_0_1"}
    assert [(request.step_id, request.epoch) for request in shared_world.replica.requests] == [
        ("task_0_0", 0),
        ("task_0_1", 1),
    ]
    assert (await asks_of(shared_world))[1].epoch == 1
    assert (await shared_world.chat(rollout, "Guess.")).body["id"] == "task_0_2"


async def test_of_the_answers_to_a_request_that_was_sent_twice_the_first_stands(shared_world: "World") -> None:
    impatient = SharedSessions(shared_world.ports, run=shared_world.run, config=shared_world.config, resend_s=0.05)
    rollout = await shared_world.begin()
    secret = rollout["base_url"].split("/")[-2]
    shared_world.replica.may_answer.clear()
    body = encode({"messages": [{"role": "user", "content": "Guess."}]})
    asking = asyncio.create_task(impatient.chat(secret, await impatient.parse(secret, body), hold_s=20))
    while [ask.epoch >= 2 for ask in await asks_of(shared_world)] != [True]:  # noqa: ASYNC110 - a record has no event
        await asyncio.sleep(0.02)
    texts = iter(["first", "second", "third", *["later"] * 50])
    shared_world.replica.reply = lambda request: next(texts)
    shared_world.replica.may_answer.set()
    answered = await asking
    assert isinstance(answered, tuple)
    assert [answer.reply["content"] for answer in answered] == ["first"]
    while len(shared_world.replica.requests) < 3:  # noqa: ASYNC110 - nor has a queue
        await asyncio.sleep(0.02)
    answer = await shared_world.get(f"{rollout['base_url']}/chat/completions/task_0_0")
    assert answer.text == "first"


async def test_no_number_is_used_twice_over_attempts(shared_world: "World") -> None:
    ids: list[str] = []
    for attempt in range(3):
        rollout = await (shared_world.begin() if attempt == 0 else shared_world.lease_one())
        ids += [(await shared_world.chat(rollout, f"Guess {attempt} {number}.")).body["id"] for number in range(3)]
        await shared_world.lose_lease()
    assert ids == [f"task_0_{number}" for number in range(9)]


async def test_a_moment_without_a_backend_ends_no_shared_proxy(shared_world: "World") -> None:
    (service, _) = shared_world.services
    service.fail(BackendUnavailable("busy"))
    service.check()
    assert service.is_healthy
    rollout = await shared_world.begin()
    assert (await shared_world.chat(rollout, "Guess.")).status == 200


async def test_many_at_once_that_serialise_nowhere_but_in_the_records(shared_world: "World") -> None:
    """As many processes as there are requests, as functions have them."""
    rollout = await shared_world.begin()
    secret = rollout["base_url"].split("/")[-2]

    async def one(number: int) -> Any:
        service = SharedSessions(shared_world.ports, run=shared_world.run, config=shared_world.config)
        body = encode({"messages": [{"role": "user", "content": f"Guess {number}."}]})
        return await service.chat(secret, await service.parse(secret, body))

    answers = await asyncio.gather(*map(one, range(16)))
    assert {answer.call_id for (answer,) in answers} == {f"task_0_{number}" for number in range(16)}
    assert [ask.index for ask in await asks_of(shared_world)] == list(range(16))
    assert (await shared_world.report(rollout)).status == 200
    assert (await shared_world.sample()).calls == tuple(f"task_0_{number}" for number in range(16))
