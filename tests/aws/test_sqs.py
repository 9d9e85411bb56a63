"""Queues on SQS, beyond what all queues keep: the wire, what others send, time, cost."""

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Callable

import pytest

from tests.aws.emulator import Emulator
from tests.aws.sqs_messages import OpenProxied, bodies, message
from tests.contracts.aws_queue import BUCKET, make_queue, open_queue
from turnmill.backends.aws.backend import AwsBackend
from turnmill.backends.aws.clients import MAX_CALLS, AwsClients
from turnmill.backends.aws.lambdas.boot import NoWeights
from turnmill.backends.aws.queue import POLL_S, SqsQueue, whole_seconds
from turnmill.backends.aws.queue_bodies import MAX_INLINE_BYTES
from turnmill.backends.aws.queue_requests import MAX_BATCH_BYTES, Outgoing, batches_of
from turnmill.backends.aws.settings import StackNames
from turnmill.errors import InvalidInput
from turnmill.ports import Message

BODIES = [b"", b"\xff\x00", b"text\x0b", b" \r\n\t", "é𝄞\ufffe".encode(), b"base64,", b'{"a": 1}']
ODD_IDS = ["", "a b/c", "日本\n\x00", "half of a surrogate pair: \ud800", "x" * 1000]


def raw_messages(clients: AwsClients, name: str) -> list[dict[str, object]]:
    """What is on the wire; it is seen again at once."""
    url = clients.call_now("sqs", "get_queue_url", QueueName=f"{name}.fifo")["QueueUrl"]
    received: list[dict[str, object]] = clients.call_now(
        "sqs", "receive_message", QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0
    )["Messages"]
    return received


# ---------------------------------------------------------------- the wire


@pytest.mark.parametrize("odd", ODD_IDS, ids=range(len(ODD_IDS)))
async def test_groups_and_deduplication_ids_may_be_of_any_alphabet_and_length(queue: SqsQueue, odd: str) -> None:
    odd_one = Message(body=b"a", group=odd, dedup_id=odd)
    await queue.send([odd_one, Message(body=b"b", group=odd, dedup_id=f"{odd}2"), odd_one])
    [first] = await queue.lease(max_messages=1, lease_s=30)
    assert (first.body, first.group) == (b"a", odd)
    await queue.ack([first.receipt])
    assert [(item.body, item.group) for item in await queue.take(max_messages=10)] == [(b"b", odd)]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_any_body_comes_as_it_was_sent(queue: SqsQueue, body: bytes) -> None:
    await queue.send([message(body, "g")])
    assert [item.body for item in await queue.take(max_messages=1)] == [body]


async def test_json_is_on_the_wire_as_it_is(queue: SqsQueue, clients: AwsClients, queue_name: str) -> None:
    body = json.dumps({"version": "v0", "messages": ["é"]})
    await queue.send([message(body)])
    [raw] = raw_messages(clients, queue_name)
    assert raw["Body"] == body


async def test_what_somebody_else_reads_is_in_the_message_itself_or_refused(
    clients: AwsClients, queue: SqsQueue, queue_name: str
) -> None:
    read_by_others = SqsQueue(clients, f"{queue_name}.fifo", f"{queue_name}-dead.fifo", overflow=None)
    large = json.dumps({"messages": ["é" * 250_000]}, ensure_ascii=False)
    with pytest.raises(InvalidInput, match=r"SQS takes 1048576 at most.*shorten the conversation"):
        await read_by_others.send([message(large + large[:-1] + large, "g")])
    await read_by_others.send([message(large, "g")])
    [raw] = raw_messages(clients, queue_name)
    assert raw["Body"] == large
    assert bodies(await read_by_others.take(max_messages=1)) == [large]
    # What is in the bucket is for those that know of it.
    await queue.send([message(large, "h")])
    assert await read_by_others.take(max_messages=1) == []


async def test_a_foreign_trainer_and_its_generator_need_no_bucket(clients: AwsClients, emulator: Emulator) -> None:
    settings = emulator.settings("sqs")
    run_id = f"ext-{secrets.token_hex(4)}"
    for queue in ("generate_request", "rollout_response"):
        name = StackNames(stack=run_id).queue(queue)
        clients.call_now("sqs", "create_queue", QueueName=name, Attributes={"FifoQueue": "true"})
    ports = AwsBackend(settings, account="0" * 12, weights_of=lambda _: NoWeights()).open_external_run(run_id)
    large = json.dumps({"messages": ["x" * 500_000]})
    for queue, port in (("generate_request", ports.generate_request[0]), ("rollout_response", ports.rollout_response)):
        await port.send([message(large, "g")])
        [raw] = raw_messages(clients, StackNames(stack=run_id).queue(queue).removesuffix(".fifo"))
        assert raw["Body"] == large


async def test_what_others_send_is_read_with_their_group(queue: SqsQueue, clients: AwsClients, queue_name: str) -> None:
    url = clients.call_now("sqs", "get_queue_url", QueueName=f"{queue_name}.fifo")["QueueUrl"]
    theirs = {"MessageBody": '{"é": 1}', "MessageGroupId": "their-group", "MessageDeduplicationId": "1"}
    clients.call_now("sqs", "send_message", QueueUrl=url, **theirs)
    for _ in range(2):
        [leased] = await queue.lease(max_messages=10, lease_s=30)
        assert (leased.body, leased.group) == ('{"é": 1}'.encode(), "their-group")
        await queue.release([leased.receipt])
    # So is it when it has died and is redriven.
    assert await queue.lease(max_messages=1, lease_s=30) == []
    [letter] = await queue.dead_letters()
    assert (letter.body, letter.group) == (leased.body, "their-group")
    assert await queue.redrive([letter.letter_id]) == 1
    [again] = await queue.lease(max_messages=1, lease_s=30)
    assert (again.body, again.group, again.num_receives) == (leased.body, "their-group", 1)


async def test_large_bodies_travel_by_key_and_many_at_once_in_several_batches(
    queue: SqsQueue, clients: AwsClients, queue_name: str
) -> None:
    sent = [b"x" * MAX_INLINE_BYTES, b"y" * (MAX_INLINE_BYTES + 1), random.Random(0).randbytes(MAX_INLINE_BYTES)]
    await queue.send([message(body, str(index)) for index, body in enumerate(sent)])
    on_wire = [str(raw["Body"]) for raw in raw_messages(clients, queue_name)]
    assert [len(body) < 200 for body in on_wire] == [False, True, True]
    assert [item.body for item in await queue.take(max_messages=10)] == sent
    await queue.send([message(b"z" * MAX_INLINE_BYTES, str(index)) for index in range(8)])
    assert len(await queue.take(max_messages=10)) == 8


async def test_a_message_whose_body_is_damaged_is_left_and_dies(
    queue: SqsQueue, clients: AwsClients, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.send([message(b"x" * 300_000, "large"), message("small")])
    key = next(str(raw["Body"]) for raw in raw_messages(clients, queue_name) if str(raw["Body"]).startswith("runs/"))
    clients.call_now("s3", "put_object", Bucket=BUCKET, Key=key, Body=b"y" * 300_000)
    with caplog.at_level(logging.ERROR):
        [small] = await queue.lease(max_messages=10, lease_s=1)
    assert small.body == b"small"
    await queue.ack([small.receipt])
    assert "is not the one that was stored" in caplog.text
    await asyncio.sleep(1.1)
    await queue.take(max_messages=10)
    [letter] = await queue.dead_letters()
    assert (letter.body, letter.group) == (key.encode(), "large")


def test_batches_keep_the_limits_and_have_a_group_once() -> None:
    messages = [
        Outgoing(group_id=f"g{number % 7}", dedup_id=str(number), body="x" * (number * 7919 % 190_000 + 1))
        for number in range(200)
    ]
    batches = batches_of(messages)
    for batch in batches:
        assert len({item.group_id for item in batch}) == len(batch) <= 10
        assert sum(item.num_bytes for item in batch) <= MAX_BATCH_BYTES
    for group in range(7):
        mine = [int(item.dedup_id) for batch in batches for item in batch if item.group_id == f"g{group}"]
        assert mine == [number for number in range(200) if number % 7 == group]


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(("seconds", "whole"), [(0, 0), (0.2, 1), (15.0, 15), (15.1, 16), (43_200, 43_200)])
def test_leases_are_of_whole_seconds_rounded_up(seconds: float, whole: int) -> None:
    assert whole_seconds(seconds) == whole


async def test_a_lease_that_is_longer_than_sqs_allows_is_refused(queue: SqsQueue) -> None:
    with pytest.raises(InvalidInput, match="at most 43200 s"):
        await queue.lease(max_messages=1, lease_s=43_201)


async def test_a_wait_below_a_second_is_one_poll(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    assert await queue.lease(max_messages=100, lease_s=30, wait_s=0.01) == []
    assert await queue.take(max_messages=100) == []
    assert [content["WaitTimeSeconds"] for content in proxy.of("ReceiveMessage")] == [1, 0]


@pytest.mark.slow
async def test_a_long_wait_is_several_polls(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    assert await queue.lease(max_messages=1, lease_s=30, wait_s=POLL_S + 2.0) == []
    first, second = (content["WaitTimeSeconds"] for content in proxy.of("ReceiveMessage"))
    assert first == POLL_S and 1 <= second <= 2


async def test_a_lease_that_is_cancelled_while_it_waits_gives_back_what_comes(queue: SqsQueue) -> None:
    waiting = asyncio.create_task(queue.lease(max_messages=1, lease_s=1000, wait_s=30))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.wait([waiting])
    # For the one who polls still.
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30, wait_s=10)
    assert leased.num_receives <= 2


async def test_long_polls_keep_no_other_call_waiting(queue: SqsQueue) -> None:
    polls = [asyncio.create_task(queue.lease(max_messages=1, lease_s=30, wait_s=POLL_S)) for _ in range(MAX_CALLS)]
    await asyncio.sleep(0.2)
    await queue.counts()
    assert not any(poll.done() for poll in polls)
    await queue.send([message(str(number)) for number in range(MAX_CALLS)])
    assert sum(map(len, await asyncio.gather(*polls))) == MAX_CALLS


async def test_a_lease_may_be_cancelled_at_any_moment(clients: AwsClients) -> None:
    name = f"sqs-{secrets.token_hex(8)}"
    make_queue(clients, name, max_receives=1000)
    queue = open_queue(clients, name)
    await queue.send([message("a")])
    for step in range(40):
        leasing = asyncio.create_task(queue.lease(max_messages=1, lease_s=1000))
        await asyncio.sleep(step * 0.0004)
        leasing.cancel()
        await asyncio.wait([leasing])
        if not leasing.cancelled():
            await queue.release([item.receipt for item in leasing.result()])
    [leased] = await queue.lease(max_messages=1, lease_s=30, wait_s=10)
    assert leased.body == b"a"


async def test_a_take_that_is_cancelled_loses_nothing_that_has_not_come(queue: SqsQueue) -> None:
    taking = asyncio.create_task(queue.take(max_messages=1, wait_s=30))
    await asyncio.sleep(0.2)
    taking.cancel()
    await asyncio.wait([taking])
    await queue.send([message("a")])
    assert bodies(await queue.take(max_messages=1, wait_s=10)) == ["a"]


# ---------------------------------------------------------------- cost


async def test_ten_messages_cost_three_requests(
    proxied: OpenProxied, record_property: Callable[[str, str], None]
) -> None:
    proxy, queue = proxied()
    await queue.counts()
    proxy.seen.clear()
    await queue.send([message(str(number)) for number in range(100)])
    leased = await queue.lease(max_messages=100, lease_s=30)
    assert len(leased) == 100
    await queue.ack([item.receipt for item in leased])
    assert proxy.counts == {"SendMessageBatch": 10, "ReceiveMessage": 10, "DeleteMessageBatch": 10}
    proxy.seen.clear()
    await queue.send([message("alone")])
    [alone] = await queue.lease(max_messages=10, lease_s=30)
    await queue.ack([alone.receipt])
    assert proxy.counts.total() == 3
    record_property("figure", "requests per message, send to ack: 0.3 in tens, 3 alone")


@pytest.mark.slow
async def test_figure_messages_a_second(queue: SqsQueue, record_property: Callable[[str, str], None]) -> None:
    num_messages, num_consumers = 2000, 4
    num_acked = 0

    async def consume() -> None:
        nonlocal num_acked
        while num_acked < num_messages:
            leased = await queue.lease(max_messages=10, lease_s=60)
            acked = await queue.ack([item.receipt for item in leased])
            num_acked += sum(acked)

    async def produce(first: int) -> None:
        for start in range(first, num_messages, 40):
            await queue.send([message(str(number)) for number in range(start, start + 10)])

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(produce(first) for first in range(0, 40, 10)), *(consume() for _ in range(num_consumers)))
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    assert num_acked == num_messages and (await queue.counts()).num_held == 0
    rate = f"{num_messages / seconds:.0f} messages/s, {cpu_s / num_messages * 1e3:.2f} ms of CPU each"
    record_property("figure", f"send -> lease -> ack in tens, {num_consumers} consumers: {rate}")
