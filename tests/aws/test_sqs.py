"""Queues on SQS, beyond what all queues keep: the wire, lost answers, batches that fail in part, what others send."""

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack

import pytest

from tests.aws.emulator import Emulator
from tests.aws.scripted_proxy import ScriptedProxy, fail_entries, lose, pass_on, refuse, scripted_proxy
from tests.contracts.aws_queue import BUCKET, PREFIX, make_queue, open_queue
from turnmill.backends.aws.backend import AwsBackend
from turnmill.backends.aws.clients import MAX_CALLS, AwsClients
from turnmill.backends.aws.lambdas.boot import NoWeights
from turnmill.backends.aws.queue import POLL_S, SqsQueue, whole_seconds
from turnmill.backends.aws.queue_bodies import MAX_INLINE_BYTES, Overflow
from turnmill.backends.aws.queue_requests import MAX_BATCH_BYTES, Outgoing, batches_of
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound
from turnmill.ports import Leased, Message

# The queue of the test behind a proxy, and the proxy.
OpenProxied = Callable[..., tuple[ScriptedProxy, SqsQueue]]
BODIES = [b"", b"\xff\x00", b"text\x0b", b" \r\n\t", "é𝄞\ufffe".encode(), b"base64,", b'{"a": 1}']
ODD_IDS = ["", "a b/c", "日本\n\x00", "half of a surrogate pair: \ud800", "x" * 1000]


def message(body: str | bytes, group: str = "", dedup_id: str | None = None) -> Message:
    return Message(body=body if isinstance(body, bytes) else body.encode(), group=group or str(body), dedup_id=dedup_id)


def bodies(leased: list[Leased]) -> list[str]:
    return [item.body.decode() for item in leased]


@pytest.fixture
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    clients = AwsClients(emulator.settings("sqs"))
    yield clients
    clients.close()


@pytest.fixture
def name(clients: AwsClients) -> str:
    """Of a queue that was made."""
    name = f"sqs-{secrets.token_hex(8)}"
    make_queue(clients, name, max_receives=2)
    return name


@pytest.fixture
def queue(clients: AwsClients, name: str) -> SqsQueue:
    return open_queue(clients, name)


@pytest.fixture
def proxied(emulator: Emulator, name: str) -> Iterator[OpenProxied]:
    """The queue behind a proxy, and the proxy."""
    with ExitStack() as stack:

        def open_one(*, max_tries: int = 3) -> tuple[ScriptedProxy, SqsQueue]:
            proxy = stack.enter_context(scripted_proxy(emulator.url))
            settings = AwsSettings(region="us-east-1", endpoint_url=proxy.url)
            clients = AwsClients(settings, max_tries=max_tries)
            stack.callback(clients.close)
            return proxy, open_queue(clients, name)

        yield open_one


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


async def test_json_is_on_the_wire_as_it_is(queue: SqsQueue, clients: AwsClients, name: str) -> None:
    body = json.dumps({"version": "v0", "messages": ["é"]})
    await queue.send([message(body)])
    [raw] = raw_messages(clients, name)
    assert raw["Body"] == body


async def test_what_somebody_else_reads_is_in_the_message_itself_or_refused(
    clients: AwsClients, queue: SqsQueue, name: str
) -> None:
    read_by_others = SqsQueue(clients, f"{name}.fifo", f"{name}-dead.fifo", overflow=None)
    large = json.dumps({"messages": ["é" * 250_000]}, ensure_ascii=False)
    with pytest.raises(InvalidInput, match=r"SQS takes 1048576 at most.*shorten the conversation"):
        await read_by_others.send([message(large + large[:-1] + large, "g")])
    await read_by_others.send([message(large, "g")])
    [raw] = raw_messages(clients, name)
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


async def test_what_others_send_is_read_with_their_group(queue: SqsQueue, clients: AwsClients, name: str) -> None:
    url = clients.call_now("sqs", "get_queue_url", QueueName=f"{name}.fifo")["QueueUrl"]
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
    queue: SqsQueue, clients: AwsClients, name: str
) -> None:
    sent = [b"x" * MAX_INLINE_BYTES, b"y" * (MAX_INLINE_BYTES + 1), random.Random(0).randbytes(MAX_INLINE_BYTES)]
    await queue.send([message(body, str(index)) for index, body in enumerate(sent)])
    on_wire = [str(raw["Body"]) for raw in raw_messages(clients, name)]
    assert [len(body) < 200 for body in on_wire] == [False, True, True]
    assert [item.body for item in await queue.take(max_messages=10)] == sent
    await queue.send([message(b"z" * MAX_INLINE_BYTES, str(index)) for index in range(8)])
    assert len(await queue.take(max_messages=10)) == 8


async def test_a_message_whose_body_is_damaged_is_left_and_dies(
    queue: SqsQueue, clients: AwsClients, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    await queue.send([message(b"x" * 300_000, "large"), message("small")])
    key = next(str(raw["Body"]) for raw in raw_messages(clients, name) if str(raw["Body"]).startswith("runs/"))
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


# ---------------------------------------------------------------- failures


async def test_entries_of_a_batch_that_fail_are_sent_again_in_the_order_of_their_group(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [
        fail_entries(0),
        fail_entries(0, code="ThrottlingException", is_senders_fault=True),
    ]
    await queue.send([message("a1", "a"), message("b1", "b"), message("a2", "a")])
    assert proxy.counts["SendMessageBatch"] == 4
    taken = bodies(await queue.take(max_messages=10))
    assert taken.index("a1") < taken.index("a2") and sorted(taken) == ["a1", "a2", "b1"]


async def test_an_entry_that_is_refused_for_what_it_is_is_not_tried_again(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [fail_entries(0, code="InvalidMessageContents", is_senders_fault=True)]
    with pytest.raises(InvalidInput, match="InvalidMessageContents"):
        await queue.send([message("a"), message("b")])
    assert proxy.counts["SendMessageBatch"] == 1


async def test_entries_that_keep_failing_are_unavailability(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["ChangeMessageVisibilityBatch"] = [fail_entries(0)] * 6
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30)
    with pytest.raises(BackendUnavailable, match=r"1 entries of sqs-.*InternalError"):
        await queue.extend([leased.receipt], 30)


async def test_a_send_whose_answer_is_lost_sends_once(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [lose]
    await queue.send([message("a"), message("b", dedup_id="b")])
    assert proxy.counts["SendMessageBatch"] == 2
    assert bodies(await queue.take(max_messages=10)) == ["a", "b"]


async def test_a_receive_whose_answer_is_lost_is_repeated_by_the_same_attempt(
    proxied: OpenProxied,
) -> None:
    """SQS gives the same messages to it; the emulator does not know attempts, and leaves them hidden."""
    proxy, queue = proxied()
    await queue.send([message("a")])
    proxy.acts["ReceiveMessage"] = [lose]
    await queue.lease(max_messages=1, lease_s=1)
    first, second = proxy.of("ReceiveMessage")
    assert first["ReceiveRequestAttemptId"] == second["ReceiveRequestAttemptId"]
    [leased] = await queue.lease(max_messages=1, lease_s=1, wait_s=5)
    assert proxy.of("ReceiveMessage")[-1]["ReceiveRequestAttemptId"] != first["ReceiveRequestAttemptId"]
    assert leased.num_receives == 2


async def test_what_sqs_does_not_allow_is_said_with_the_name_of_the_queue(proxied: OpenProxied, name: str) -> None:
    proxy, queue = proxied()
    proxy.acts["GetQueueUrl"] = [refuse(403, "AccessDeniedException")]
    with pytest.raises(InvalidInput, match=f"check queue {name}.fifo"):
        await queue.counts()
    proxy.acts["ReceiveMessage"] = [refuse(403, "InvalidSecurity")]
    with pytest.raises(InvalidInput, match="what the credentials in use may do"):
        await queue.lease(max_messages=1, lease_s=30)
    with pytest.raises(InvalidInput, match="check the bucket"):
        Overflow(AwsClients(AwsSettings(region="us-east-1")), "absent", PREFIX).put(b"x")


async def test_an_ack_whose_answer_is_lost_removes(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30)
    proxy.acts["DeleteMessageBatch"] = [lose]
    await queue.ack([leased.receipt])
    assert (await queue.counts()).num_held == 0


async def test_a_later_receive_that_fails_costs_nothing_that_came_before(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied(max_tries=1)
    await queue.send([message(str(number)) for number in range(15)])

    proxy.acts["ReceiveMessage"] = [pass_on, refuse(500, "InternalFailure")]
    assert len(await queue.lease(max_messages=15, lease_s=30)) == 10
    proxy.acts["ReceiveMessage"] = [refuse(500, "InternalFailure")]
    with pytest.raises(BackendUnavailable):
        await queue.take(max_messages=5)
    proxy.acts["DeleteMessageBatch"] = [refuse(500, "InternalFailure")]
    assert len(await queue.take(max_messages=10)) == 5
    assert (await queue.counts()).num_held == 15


async def test_bodies_that_cannot_be_fetched_now_are_there_later(
    queue: SqsQueue, clients: AwsClients, name: str
) -> None:
    no_s3 = AwsClients(AwsSettings(region="us-east-1", endpoint_url="http://127.0.0.1:9"), max_tries=1)
    cut_off = SqsQueue(clients, f"{name}.fifo", f"{name}-dead.fifo", overflow=Overflow(no_s3, BUCKET, PREFIX))
    await queue.send([message("small"), message(b"x" * 300_000, "large")])
    with pytest.raises(BackendUnavailable, match="s3 get_object"):
        await cut_off.lease(max_messages=10, lease_s=1000)
    assert [len(item.body) for item in await queue.take(max_messages=10)] == [5, 300_000]


async def test_a_redrive_that_is_cut_off_and_begun_again_delivers_once(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied(max_tries=1)
    await queue.send([message("a", dedup_id="a")])
    for _ in range(3):
        await queue.release([item.receipt for item in await queue.lease(max_messages=1, lease_s=30)])
    proxy.acts["DeleteMessageBatch"] = [refuse(500, "InternalFailure")]
    with pytest.raises(BackendUnavailable):
        await queue.redrive()
    assert len(await queue.dead_letters()) == 1
    assert await queue.redrive() == 1
    assert bodies(await queue.take(max_messages=10)) == ["a"]
    assert (await queue.counts()).num_held == 0


async def test_letters_that_wait_behind_their_group_are_redriven_and_discarded_too(
    queue: SqsQueue, clients: AwsClients, name: str
) -> None:
    url = clients.call_now("sqs", "get_queue_url", QueueName=f"{name}-dead.fifo")["QueueUrl"]
    for number in range(15):
        clients.call_now(
            "sqs",
            "send_message",
            QueueUrl=url,
            MessageBody=str(number),
            MessageGroupId="a",
            MessageDeduplicationId=str(number),
        )
    assert [letter.body for letter in await queue.dead_letters(limit=3)] == [b"0", b"1", b"2"]
    found = await queue.dead_letters()
    assert 10 <= len(found) <= 15
    assert await queue.discard([found[0].letter_id, found[1].letter_id]) == 2
    assert await queue.redrive() == 13
    assert bodies(await queue.take(max_messages=100)) == [str(number) for number in range(2, 15)]


async def test_a_purge_waits_for_the_one_that_somebody_else_has_begun(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    await queue.send([message("a"), message("b")])
    proxy.acts["PurgeQueue"] = [refuse(400, "AWS.SimpleQueueService.PurgeQueueInProgress")]
    assert await queue.purge() == 2
    assert proxy.counts["PurgeQueue"] == 2


async def test_a_queue_is_drained_without_a_purge_that_goes_on_for_a_minute(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    await queue.send([message(str(number), "same" if number < 12 else "") for number in range(25)])
    # The others of its group wait behind it.
    [leased] = await queue.lease(max_messages=1, lease_s=2)
    assert leased.body == b"0"
    assert await queue.drain() == 25
    assert (await queue.counts()).num_held == 0
    assert proxy.counts["PurgeQueue"] == 0


async def test_a_queue_that_is_not_there_is_named(clients: AwsClients) -> None:
    queue = open_queue(clients, "absent")
    with pytest.raises(NotFound, match=r"queue absent\.fifo does not exist"):
        await queue.send([message("a")])
    with pytest.raises(NotFound):
        queue.counts_now()


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        ("SendMessageBatch", lambda queue: queue.send([message("a")])),
        ("ReceiveMessage", lambda queue: queue.lease(max_messages=1, lease_s=1)),
        ("ReceiveMessage", lambda queue: queue.take(max_messages=1)),
        ("DeleteMessageBatch", lambda queue: queue.ack(["receipt"])),
        ("ChangeMessageVisibilityBatch", lambda queue: queue.extend(["receipt"], 1)),
        ("GetQueueAttributes", lambda queue: queue.counts()),
        ("PurgeQueue", lambda queue: queue.purge()),
    ],
)
async def test_what_is_refused_is_named_as_a_matter_of_configuration_or_as_passing(
    proxied: OpenProxied, operation: str, ask: Callable[[SqsQueue], Coroutine[object, object, object]]
) -> None:
    proxy, queue = proxied()
    proxy.acts[operation] = [refuse(400, "AccessDeniedException")]
    with pytest.raises(InvalidInput, match=r"AccessDenied.*what the credentials in use may do"):
        await ask(queue)
    proxy.acts[operation] = [refuse(400, "KmsThrottled")]
    with pytest.raises(BackendUnavailable, match="KmsThrottled"):
        await ask(queue)


async def test_a_large_body_that_cannot_be_stored_is_a_matter_of_configuration(clients: AwsClients, name: str) -> None:
    no_bucket = Overflow(clients, "there-is-no-such-bucket", PREFIX)
    queue = SqsQueue(clients, f"{name}.fifo", f"{name}-dead.fifo", overflow=no_bucket)
    with pytest.raises(InvalidInput, match="check the bucket"):
        await queue.send([message(b"x" * 300_000, "large")])


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
